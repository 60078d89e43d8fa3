"""A certificate that is exchanged while it is served: none of several ways to exchange it is overlooked."""

import os
import ssl
import threading
from shutil import copy
from types import SimpleNamespace

import pytest

from connector.stores import PATIENCE_S
from e2e.redis_servers import certificates
from tiertune_connector.httpd.serving import certificate
from tiertune_connector.settings import HttpSettings


@pytest.fixture
def pairs(tmp_path):
    """The pair that is served, and a new one."""
    (tmp_path / "new").mkdir()
    return certificates(tmp_path), certificates(tmp_path / "new")


def served(context):
    """Whether a new connection is served another pair than that which the process began with."""
    connection = SimpleNamespace(context=None)
    context.sni_callback(connection, "localhost", context)
    return connection.context is not context


def exchange(files, new):
    copy(new.server, files.server)
    copy(new.server_key, files.server_key)


def configured(files):
    return certificate(HttpSettings(port=0, certificate_file=files.server, key_file=files.server_key))


def test_what_is_exchanged_while_the_process_starts_is_served(pairs, monkeypatch):
    """As soon as the files were read, and before anybody connects."""
    assert not served(configured(pairs[0]))
    load, read = ssl.SSLContext.load_cert_chain, []

    def exchanged(context, first, *more, **options):
        load(context, first, *more, **options)
        read.append(first.read_bytes())
        exchange(*pairs)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", exchanged)
    served(configured(pairs[0]))
    assert read[0] != read[-1] == pairs[1].server.read_bytes()


def test_what_becomes_readable_later_is_served(pairs, monkeypatch):
    """Who exchanges files as root gives them to the process's user after that, which no file's mtime tells."""

    def refused(*_args, **_more):
        raise PermissionError(13, "Permission denied")

    context = configured(pairs[0])
    exchange(*pairs)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(ssl.SSLContext, "load_cert_chain", refused)
        assert not served(context)
    given(pairs[0].server_key)
    assert served(context)


def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(pairs, caplog):
    """Nobody may ever write into it, and the thread that reads it serves all: the former pair is served on."""
    context = configured(pairs[0])
    pairs[0].server_key.unlink()
    os.mkfifo(pairs[0].server_key)
    asked = threading.Thread(target=served, args=(context,), daemon=True)
    asked.start()
    asked.join(PATIENCE_S)
    assert not asked.is_alive()
    assert not served(context)
    assert caplog.text.count("it is no regular file") == 1, "told once, not to every caller"


def given(path):
    """A clock that ticks slowly may show one time for two changes."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.chmod(0o600)
