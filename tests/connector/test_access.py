"""Why a Redis does not let us in: what of the files is told, and how often they are read for it."""

import pytest
import redis

from e2e.redis_servers import certificates
from tiertune_connector import access
from tiertune_connector.access import Login, TlsFiles

AWAY = redis.ConnectionError("Connection refused")


@pytest.fixture
def files(tmp_path):
    return certificates(tmp_path)


@pytest.fixture
def login(files, tmp_path):
    (tmp_path / "password").write_text("secret")
    tls = TlsFiles(ca_file=files.ca, certificate_file=files.client, key_file=files.client_key)
    return Login(password_file=tmp_path / "password", tls=tls)


@pytest.fixture
def read(monkeypatch):
    """The files that were read."""
    paths, plain_file = [], access.plain_file

    def noted(path):
        paths.append(path)
        return plain_file(path)

    monkeypatch.setattr(access, "plain_file", noted)
    return paths


def test_files_are_read_once_for_however_many_operations_that_fail(login, files, tmp_path, read):
    """All operations of a store may fail at once, for another reason mostly. A file that has changed is read again."""
    assert {login.why(AWAY) for _ in range(100)} == {"Connection refused"}
    assert sorted(read) == sorted([tmp_path / "password", files.ca, files.client, files.client_key])
    files.ca.rename(tmp_path / "moved")
    assert login.why(AWAY) == f"remote.tls.ca_file: {files.ca} cannot be read: No such file or directory"
    (tmp_path / "moved").rename(files.ca)
    read.clear()
    assert {login.why(AWAY) for _ in range(100)} == {"Connection refused"}
    assert read.count(files.ca) == 1


def test_an_error_that_no_file_can_have_caused_has_none_read(login, read):
    """The server answered."""
    assert login.why(redis.ResponseError("unknown command")) == "unknown command"
    assert read == []
