"""The configuration of a store: what is accepted, what is refused, and where."""

from unittest.mock import Mock

import pytest

from connector.volumes import mount
from tiertune_connector.access import Login, TlsFiles
from tiertune_connector.documents import DocumentError, FieldError, parse_yaml
from tiertune_connector.httpd.tokens import TokenFile
from tiertune_connector.serve.__main__ import main
from tiertune_connector.settings import StoreSettings, load
from tiertune_connector.store.control import check
from tiertune_connector.tuning import parse_tuning

WHOLE = """
name: host-a
socket: /run/tiertune/store.sock
state_dir: /var/lib/tiertune/host-a
http: {host: 127.0.0.1, port: 7410}
dram: {capacity: 1GiB, segment: 64MiB}
disk: {path: /var/lib/tiertune/host-a/disk, capacity: 2GiB}
remote: {url: "redis://127.0.0.1:6379/0", timeout: 1s, probe_every: 30s}
eviction: arc
lease: 45s
"""


def parsed(text: str) -> StoreSettings:
    return parse_yaml(text, StoreSettings, name="store.yaml")


def test_the_whole_document():
    """Units are read, and capacities and eviction become the first tuning."""
    settings = parsed(WHOLE)
    tuning = settings.first_tuning()
    assert (settings.lease, settings.remote.timeout) == (45.0, 1.0)
    assert tuning.tiers.dram.capacity_bytes == 1 << 30
    assert (tuning.tiers.disk.capacity_bytes, tuning.tiers.disk.write) == (2 << 30, "evict")
    assert (tuning.tiers.remote.fetch, tuning.tiers.remote.write) == ("on", "commit")
    assert tuning.defaults.eviction == "arc"


def test_a_tier_left_out_is_off_in_the_first_tuning():
    """No knob of a tier that is not there is on."""
    tuning = parsed("socket: /s\nstate_dir: /d\ndram: {capacity: 0}\n").first_tuning()
    assert (tuning.tiers.disk.capacity_bytes, tuning.tiers.disk.write) == (0, "off")
    assert (tuning.tiers.remote.fetch, tuning.tiers.remote.write) == ("off", "off")


def test_a_tier_that_is_taken_away_is_off_in_the_tuning_that_was_kept():
    """The rest of a kept tuning stays, and its version tells that it changed; with every tier there it is as it was."""
    whole = parsed(WHOLE)
    kept = whole.first_tuning().model_copy(update={"version": 7})
    alone = parsed(WHOLE.replace("remote:", "#").replace("disk:", "#")).fit(kept)
    assert (alone.version, alone.defaults.eviction, alone.tiers.dram) == (8, "arc", kept.tiers.dram)
    assert (alone.tiers.remote.fetch, alone.tiers.remote.write) == ("off", "off")
    assert (alone.tiers.disk.capacity_bytes, alone.tiers.disk.write) == (0, "off")
    assert whole.fit(kept) is kept


def test_of_a_tier_that_is_taken_away_nothing_else_is_said_either():
    """In both tiers' admission, the gate's bounds and the disk's part of pools; what is said of DRAM stays."""
    whole = parsed(WHOLE)
    own = {"capacity_bytes": 1 << 20, "eviction": "s3fifo"}
    said = {
        "tiers": {"dram": {"capacity_bytes": 5}, "disk": {"capacity_bytes": 7}, "remote": {"margin": 2.0}},
        "pools": {"ab" * 16: {"dram": own, "disk": own}},
        "admission": {"disk": "second_access", "remote": "second_access"},
    }
    kept = parse_tuning(said)
    alone = parsed(WHOLE.replace("remote:", "#").replace("disk:", "#")).fit(kept)
    off = {"disk": {"write": "off"}, "remote": {"fetch": "off", "write": "off"}}
    pools = {"ab" * 16: {"dram": own}}
    assert alone == parse_tuning({"version": 2, "tiers": {"dram": {"capacity_bytes": 5}, **off}, "pools": pools})
    assert whole.fit(kept) is kept


@pytest.mark.parametrize("away", [(), ("disk:",), ("remote:",), ("disk:", "remote:")])
@pytest.mark.parametrize("place", ["redis://127.0.0.1:6379/0", "file:///srv/remote"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_kept_tuning_is_fitted_to_one_that_the_store_can_do(monkeypatch, away, place, installed):
    """Whatever was on: the store starts with it, and looks no further."""
    lz4, own = {"fetch": "on", "codec": "lz4", "margin": 2.0}, {"capacity_bytes": 1 << 20, "eviction": "s3fifo"}
    said = {
        "tiers": {"dram": {"capacity_bytes": 5}, "disk": {"capacity_bytes": 7, "write": "evict"}, "remote": lz4},
        "pools": {"ab" * 16: {"dram": own, "disk": own}},
        "admission": {"disk": "second_access", "remote": "second_access"},
    }
    text = WHOLE.replace("redis://127.0.0.1:6379/0", place)
    for tier in away:
        text = text.replace(tier, "#")
    settings = parsed(text)
    monkeypatch.setattr("tiertune_connector.codec._blosc", lambda: Mock() if installed else None)
    lanes = {
        tier: Mock(codec=None if tier == "disk" or place.startswith("file") else Mock()) for tier in settings.slower
    }
    store = Mock(lanes=lanes)
    check(store, settings.fit(parse_tuning(said)))
    check(store, settings.first_tuning())
    if away or place.startswith("file") or not installed:
        with pytest.raises(FieldError):
            check(store, parse_tuning(said))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_addresses_need_no_token(host):
    """Whoever is on this machine may tune."""
    assert parsed(WHOLE.replace("127.0.0.1, port", f'"{host}", port')).http.host == host


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{host: 127.0.0.1", "{host: 0.0.0.0", "store.yaml:5:7: http: 0.0.0.0 is no loopback address: name a tokens"),
        ("{host: 127.0.0.1", "{host: example.org", "store.yaml:5:7: http: example.org is no loopback address: name"),
        ("{host: 127.0.0.1", "{tokens_file: t, host: é..", "store.yaml:5:7: http: 'é..' is no host: its parts"),
        ("{host: 127.0.0.1", "{key_file: k, host: 127.0.0.1", "store.yaml:5:7: http: certificate_file and key_file"),
        ("port: 7410", "port: 70000", "store.yaml:5:31: http.port: Input should be less than or equal to 65535"),
        ("capacity: 1GiB", "capacity: 1 GB", "store.yaml:6:18: dram.capacity: '1 GB' is not understood"),
        ("capacity: 1GiB", "capacity: 64", "store.yaml:6:18: dram.capacity: 64 is less than 4096 bytes, so that no"),
        ("capacity: 1GiB", "capacity: '0.5'", "store.yaml:6:18: dram.capacity: 0.5 is less than 4096 bytes, so that"),
        ("capacity: 1GiB", "capacity: 1KiB", "store.yaml:6:18: dram.capacity: 1KiB is less than 4096 bytes, so that"),
        ("capacity: 1GiB", "capacity: 1e300", "store.yaml:6:18: dram.capacity: Input should be less than or"),
        ("segment: 64MiB", "segment: 0", "store.yaml:6:33: dram.segment: Input should be greater than 0"),
        ("capacity: 1GiB, ", "", "store.yaml:6:7: dram.capacity: Field required"),
        ("redis://127.0.0.1:6379/0", "memcached://x", "store.yaml:8:15: remote.url: expected a redis://"),
        ("redis://127.0.0.1:6379/0", "file://shared/dir", "store.yaml:8:15: remote.url: write a path as file:///"),
        ("redis://127.0.0.1:6379/0", "file:///srv/a#1", "store.yaml:8:15: remote.url: write ? in a path as %3F, and #"),
        ("redis://127.0.0.1:6379/0", "file:///srv/a?", "store.yaml:8:15: remote.url: write ? in a path as %3F, and #"),
        ("redis://127.0.0.1:6379/0", "file:///srv/%00", "store.yaml:8:15: remote.url: write a path as file:///abso"),
        ("redis://127.0.0.1:6379/0", "redis://h:port/0", "store.yaml:8:15: remote.url: a port is a number"),
        ("redis://127.0.0.1:6379/0", "redis://:word@h", "store.yaml:8:15: remote.url: leave the password out"),
        ('"redis://127.0.0.1:6379/0"', "[redis://a, file:///b]", "store.yaml:8:15: remote.url: a path stands alone"),
        ('"redis://127.0.0.1:6379/0"', "[]", "store.yaml:8:15: remote.url: name at least one address"),
        ('"redis://127.0.0.1:6379/0"', "[redis://a, redis://u@a/1]", "store.yaml:8:15: remote.url: a:6379 is named"),
        ("timeout: 1s", "tls: {ca_file: ca.pem}", "store.yaml:8:9: remote: tls is for rediss:// addresses"),
        ("timeout: 1s", "tls: {key_file: k}", "store.yaml:8:48: remote.tls: certificate_file and key_file belong"),
        ("timeout: 1s", "sentinel_password_file: s", "store.yaml:8:9: remote: sentinel_password_file is for redis+s"),
        ("timeout: 1s", "timeout: 0s", "store.yaml:8:52: remote.timeout: Input should be greater than 0"),
        ("timeout: 1s", "capacity: 1GiB", "store.yaml:8:9: remote: capacity bounds what a path names"),
        ("eviction: arc", "eviction: mru", "store.yaml:9:11: eviction: Input should be 'lru', 'arc', 's3fifo'"),
        ("lease: 45s", "lease: never", "store.yaml:10:8: lease: 'never' is not understood"),
        ("name: host-a", "name: fleet", "store.yaml:2:7: name: fleet stands for the whole fleet"),
        ("name: host-a", "name: host/a", "store.yaml:2:7: name: String should match pattern"),
        ("/run/tiertune/store.sock", "/" + 100 * "x", "store.yaml:3:9: socket: the path of a unix socket has at most"),
        ("lease: 45s", "leese: 45s", "store.yaml:10:1: leese: unknown key: did you mean lease?"),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(old, new, problem):
    """Each with its line and column, and how to mend it."""
    assert WHOLE.count(old) == 1
    with pytest.raises(DocumentError) as raised:
        parsed(WHOLE.replace(old, new))
    assert any(line.startswith(problem) for line in raised.value.problems), raised.value.problems


def test_files_of_the_remote_lie_beside_the_settings(tmp_path):
    """Relative paths start at the file's folder, wherever the store is started; absolute ones stay."""
    files = "password_file: word, tls: {ca_file: /etc/ca.pem, certificate_file: own.pem, key_file: own.key}"
    text = WHOLE.replace("redis://127.0.0.1:6379/0", "rediss://tiertune@a/0").replace("timeout: 1s", files)
    (tmp_path / "store.yaml").write_text(text)
    remote = load(tmp_path / "store.yaml").remote
    assert remote.password_file == tmp_path / "word"
    own = TlsFiles(ca_file="/etc/ca.pem", certificate_file=tmp_path / "own.pem", key_file=tmp_path / "own.key")
    assert remote.tls == own


def test_files_beside_settings_that_kubernetes_mounts_are_read_again(tmp_path):
    """Also after the folder that all of them were in has gone: a token that was taken away is nobody's."""
    settings = WHOLE.replace("127.0.0.1, port: 7410", "0.0.0.0, port: 7410, tokens_file: tokens")
    first, second = "a" * 20, "b" * 20
    mount(tmp_path / "v", {"store.yaml": settings, "tokens": f"read one {first}\n"})
    tokens = TokenFile(load(tmp_path / "v" / "store.yaml").http.tokens_file)
    assert tokens.holder(first) is not None
    mount(tmp_path / "v", {"store.yaml": settings, "tokens": f"read two {second}\n"})
    assert [tokens.holder(token) is not None for token in (first, second)] == [False, True]


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_password_file_is_told_at_the_start(tmp_path, text):
    """A secret that was never written would else be a Redis that refuses."""
    (tmp_path / "word").write_text(text)
    with pytest.raises(DocumentError, match=r"word is empty"):
        Login(password_file=tmp_path / "word").check()


def test_a_directory_wants_no_password():
    """A setting without effect is a mistake."""
    text = WHOLE.replace("redis://127.0.0.1:6379/0", "file:///srv/x").replace("timeout: 1s", "password_file: word")
    with pytest.raises(DocumentError, match="what a path names has neither passwords nor tls"):
        parsed(text)


def test_the_module_tells_how_it_is_started(capsys):
    """``python -m tiertune_connector.serve`` has a usage, and without a file ends with 2."""
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "CONFIG" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "required: CONFIG" in capsys.readouterr().err
