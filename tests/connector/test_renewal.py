"""A certificate that is exchanged while it is served: none of several ways to exchange it is overlooked."""

import os
import ssl
import threading
from shutil import copy
from types import SimpleNamespace

import pytest
import uvicorn

from connector.stores import PATIENCE_S
from e2e.redis_servers import certificates
from tiertune_connector.httpd.renewal import renewing


@pytest.fixture
def pairs(tmp_path):
    """The pair that is served, and a new one."""
    (tmp_path / "new").mkdir()
    return certificates(tmp_path), certificates(tmp_path / "new")


def served(config):
    """Whether a new connection is served another pair than that which the process began with."""
    connection = SimpleNamespace(context=None)
    config.ssl.sni_callback(connection, "localhost", config.ssl)
    return connection.context is not config.ssl


def exchange(files, new):
    copy(new.server, files.server)
    copy(new.server_key, files.server_key)


class Exchanging(uvicorn.Config):
    """Its files are exchanged as soon as it has read them."""

    exchanges = staticmethod(lambda: None)

    def load(self):
        super().load()
        self.exchanges()


def configured(files, exchanges=lambda: None):
    config = Exchanging(lambda: None, ssl_certfile=files.server, ssl_keyfile=files.server_key, lifespan="off")
    config.exchanges = exchanges
    return renewing(config, files.server, files.server_key)


def test_what_is_exchanged_while_the_process_starts_is_served(pairs):
    """After the files were read, and before anybody connects."""
    assert not served(configured(pairs[0]))
    assert served(configured(pairs[0], lambda: exchange(*pairs)))


def test_what_becomes_readable_later_is_served(pairs, monkeypatch):
    """Who exchanges files as root gives them to the process's user after that, which no file's mtime tells."""

    def refused(*_args, **_more):
        raise PermissionError(13, "Permission denied")

    config = configured(pairs[0])
    exchange(*pairs)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(ssl.SSLContext, "load_cert_chain", refused)
        assert not served(config)
    given(pairs[0].server_key)
    assert served(config)


def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(pairs, caplog):
    """Nobody may ever write into it, and the thread that reads it serves all: the former pair is served on."""
    config = configured(pairs[0])
    pairs[0].server_key.unlink()
    os.mkfifo(pairs[0].server_key)
    asked = threading.Thread(target=served, args=(config,), daemon=True)
    asked.start()
    asked.join(PATIENCE_S)
    assert not asked.is_alive()
    assert not served(config)
    assert caplog.text.count("it is no regular file") == 1, "told once, not to every caller"


def given(path):
    """A clock that ticks slowly may show one time for two changes."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.chmod(0o600)
