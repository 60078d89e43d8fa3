"""The agent's settings: strict, placed errors, paths from the file's folder."""

import pytest

from connector.volumes import mount
from tiertune_agent.settings import load
from tiertune_connector.documents import DocumentError


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "agent.yaml").write_text(text)
        return tmp_path / "agent.yaml"

    return write


def test_paths_start_at_the_files_folder(written, tmp_path):
    """A relative database and policy lie beside the file, wherever the agent is started; absolute ones stay."""
    text = "stores: [{url: 'http://127.0.0.1:7410/'}]\npolicy: p.yaml\ndatabase: sqlite:///d/h.sqlite\nwindow: 2s\n"
    settings = load(written(text))
    assert settings.policy == tmp_path / "p.yaml"
    assert settings.database == f"sqlite:///{tmp_path}/d/h.sqlite"
    assert (settings.stores[0].url, settings.window) == ("http://127.0.0.1:7410", 2.0)
    absolute = load(written("stores: [{url: 'http://a:1'}]\ndatabase: sqlite:////var/lib/h.sqlite\n"))
    assert (absolute.database, absolute.policy) == ("sqlite:////var/lib/h.sqlite", None)


def test_a_policy_beside_settings_that_kubernetes_mounts_is_found_after_an_edit(tmp_path):
    """Though the folder that both were in has gone by then."""
    files = {"agent.yaml": "stores: [{url: 'http://a:1'}]\npolicy: p.yaml\n", "p.yaml": "version: 1\n"}
    mount(tmp_path / "v", files)
    policy = load(tmp_path / "v" / "agent.yaml").policy
    mount(tmp_path / "v", files | {"p.yaml": "version: 1\nmode: observe\n"})
    assert policy.read_text() == "version: 1\nmode: observe\n"


def test_postgresql_is_an_address_and_its_password_a_file(written, tmp_path):
    """The address stays as it is, the file is found beside the settings; neither password nor address are printed."""
    text = "stores: [{url: 'http://a:1'}]\ndatabase: postgresql://u:secret@h:5432/d\ndatabase_password_file: pg\n"
    settings = load(written(text))
    assert (settings.database, settings.database_password_file) == ("postgresql://u:secret@h:5432/d", tmp_path / "pg")
    assert "secret" not in repr(settings)


MISTAKES = {
    "stores: []\n": ":1:1: name a store in stores, stores_file or stores_dns, or a source in observe",
    "stores: [{url: 'host-a:7410'}]\n": ":1:16: stores.0.url: write a store's address as http://host:port",
    "stores: [{url: 'http://a:1/v1'}]\n": ":1:16: stores.0.url: write a store's address as http://host:port",
    "stores: [{url: 'http://a:1?x=y'}]\n": ":1:16: stores.0.url: write a store's address as http://host:port",
    "stores: [{url: 'http://u:secret@a:1'}]\n": (
        ":1:16: stores.0.url: no user and no password in an address: a token stands in stores_token_file"
    ),
    "stores: [{url: 'http://a:99999'}]\n": ":1:16: stores.0.url: a port is a number from 1 to 65535",
    "stores: [{url: 'http://a:port'}]\n": ":1:16: stores.0.url: a port is a number from 1 to 65535",
    "stores: [{url: 'http://a:1'}, {url: 'http://a:1/'}]\n": ":1:9: stores: http://a:1 is named twice",
    "stores: [{name: a, url: 'http://a:1'}, {name: a, url: 'http://b:1'}]\n": ":1:9: stores: a is named twice",
    "stores: [{url: 'http://a:1'}]\nhttp: {host: 0.0.0.0}\n": ":2:7: http: 0.0.0.0 is no loopback",
    "stores: [{url: 'http://a:1'}]\ndatabase: mysql://x/y\n": ":2:11: database: write sqlite:///path, or postgresql",
    "stores: [{url: 'http://a:1'}]\ndatabase: postgresql://x\n": ":2:11: database: write sqlite:///path, or postgresql",
    "stores: [{url: 'http://a:1'}]\ndatabase: sqlite:///\n": ":2:11: database: write sqlite:///path, or postgresql",
    "stores: [{url: 'http://a:1'}]\ndatabase: 'sqlite:///:memory:'\n": ":2:11: database: write sqlite:///path, or",
    "stores: [{url: 'http://a:1'}]\nwindow: 0s\n": ":2:9: window: Input should be greater than or equal to 0.5",
    "stores: [{url: 'http://a:1', name: fleet}]\n": (
        ":1:36: stores.0.name: fleet stands for the whole fleet: choose another name"
    ),
    "stores: [{url: 'http://a:1'}]\nkeep: 1h\n": ":2:7: keep: Input should be greater than or equal to 21600",
    "stores: {url: 'http://a:1'}\n": ":1:9: stores: Input should be a list",
    "stores: [{url: 'http://a:1', nmae: x}]\n": ":1:30: stores.0.nmae: unknown key: did you mean name?",
}


@pytest.mark.parametrize(("text", "said"), MISTAKES.items())
def test_a_bad_file_is_told_with_its_place(written, text, said):
    """Every kind of mistake is named with file, line, column and field."""
    with pytest.raises(DocumentError) as caught:
        load(written(text))
    assert said in caught.value.problems[0]
