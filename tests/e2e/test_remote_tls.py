"""A Redis by TLS, also behind Sentinel: who is trusted, what is shown, and files that are exchanged. Real servers."""

import os
import re
import ssl
import subprocess
from pathlib import Path
from shutil import copy
from threading import Thread
from unittest.mock import Mock

import pytest
import redis

from connector.store.serving import evict_all
from connector.stores import PATIENCE_S, chain, eventually
from e2e.redis_servers import certificates, redis_by_tls, sentinel_by_tls
from e2e.remote_stores import NBYTES, SECRET, A, opened, read, serving, write, written
from tiertune_connector.access import Login, TlsFiles
from tiertune_connector.documents import DocumentError
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.redis import WINDOW_BYTES

pytestmark = pytest.mark.real
NO_PEM = Path(__file__)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def by_tls(files):
    with redis_by_tls(files, options=["--requirepass", SECRET]) as port:
        yield port


def login(files, tmp_path, **more):
    (tmp_path / "password").write_text(SECRET + "\n")
    tls = {"ca_file": files.ca, "certificate_file": files.client, "key_file": files.client_key, **more}
    return Login(password_file=tmp_path / "password", tls=TlsFiles(**tls))


@pytest.mark.slow
def test_a_store_speaks_tls_and_shows_its_certificate(files, by_tls, tmp_path):
    """Chunks of several windows come and go; by the settings' own fields, as a store is started."""
    shown = login(files, tmp_path)
    shown.check()
    with opened(f"rediss://localhost:{by_tls}/0", shown) as tier:
        for nbytes in (1, 255, NBYTES, 7 * WINDOW_BYTES):
            assert write(tier, b"%d" % nbytes, nbytes) is Outcome.OK
            assert read(tier, b"%d" % nbytes, nbytes) is Outcome.OK
    with serving(f"rediss://localhost:{by_tls}/0", **shown.model_dump(exclude_none=True)) as (engine, http):
        engine.put_all(chain("k", 3))
        written(http)
        evict_all(http)
        assert engine.get(chain("k", 3)) == 3


@pytest.mark.parametrize(
    ("host", "more"),
    [
        ("127.0.0.1", {}),
        ("localhost", {"ca_file": None}),
        ("localhost", {"certificate_file": None, "key_file": None}),
    ],
    ids=["a name that the certificate has not", "an authority that nobody knows", "no certificate of ours"],
)
def test_who_cannot_be_trusted_is_an_error(files, by_tls, tmp_path, host, more):
    """Nothing is sent to a server of another name or authority, and a server turns away whom it does not know."""
    with opened(f"rediss://{host}:{by_tls}/0", login(files, tmp_path, **more)) as tier:
        assert tier.present(A, [b"key"]) == (Outcome.ERROR, 0)
        assert write(tier, b"key") is Outcome.ERROR


def test_with_a_ca_file_no_authority_of_the_system_is_trusted(files, by_tls, tmp_path, monkeypatch):
    """Password and chunks go to nobody whom a public authority alone vouches for."""
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    (tmp_path / "another").mkdir()
    for ca, trusted in ((None, True), (certificates(tmp_path / "another").ca, False)):
        with opened(f"rediss://localhost:{by_tls}/0", login(files, tmp_path, ca_file=ca)) as tier:
            assert write(tier, b"key").kept is trusted
            assert ("certificate verify failed" in tier.why) is not trusted


@pytest.mark.parametrize("of_system", [False, True])
def test_authorities_are_read_once_and_again_when_they_change(files, by_tls, tmp_path, monkeypatch, of_system):
    """Those of the system cost 20 ms of a processor, which each of a host's two dozen connections would pay."""
    own = Path(copy(files.ca, tmp_path))
    if of_system:
        monkeypatch.setenv("SSL_CERT_FILE", str(own))
    read = Mock(wraps=ssl.create_default_context)
    monkeypatch.setattr(ssl, "create_default_context", read)
    with opened(f"rediss://localhost:{by_tls}/0", login(files, tmp_path, ca_file=None if of_system else own)) as tier:
        pool = tier._redis.connection_pool
        held = [pool.get_connection() for _ in range(5)]
        assert read.call_count == 1
        (tmp_path / "another").mkdir()
        certificates(tmp_path / "another").ca.replace(own)
        with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            pool.get_connection()
        copy(files.ca, tmp_path / "another" / "ca.pem").replace(own)
        held.append(pool.get_connection())
        assert read.call_count == 3
        for connection in held:
            pool.release(connection)


@pytest.mark.slow
def test_sentinels_and_the_master_that_they_name_are_met_by_tls(files, by_tls, tmp_path, monkeypatch):
    """Both are shown our certificate, and are trusted by ``ca_file`` alone."""
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    with sentinel_by_tls(files, by_tls, SECRET) as port:
        url = f"rediss+sentinel://localhost:{port}/chunks/0"
        with opened(url, login(files, tmp_path)) as tier:
            eventually(lambda: write(tier, b"by Sentinel").kept)
            assert read(tier, b"by Sentinel") is Outcome.OK
        (tmp_path / "another").mkdir()
        with opened(url, login(files, tmp_path, ca_file=certificates(tmp_path / "another").ca)) as tier:
            assert write(tier, b"key") is Outcome.ERROR
            refused = rf"no master of 'chunks': Sentinel localhost:{port}: .*certificate verify failed.*"
            assert re.fullmatch(refused, tier.why)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"ca_file": Path("none.pem")}, r"remote\.tls: none\.pem, .*: No such file"),
        ({"ca_file": Path("/dev/null")}, r"remote\.tls: /dev/null, .*: it is no regular file"),
        ({"ca_file": NO_PEM}, r"remote\.tls: .*test_remote_tls\.py, .*: .*NO_CERTIFICATE_OR_CRL_FOUND"),
        ({"key_file": "server_key"}, r"remote\.tls: .*client\.pem, .*server\.key: .*KEY_VALUES_MISMATCH"),
    ],
)
def test_files_that_are_not_what_they_should_be_are_told_at_the_start(files, tmp_path, more, told):
    """With the files, before anything is served."""
    more = {name: getattr(files, value) if isinstance(value, str) else value for name, value in more.items()}
    with pytest.raises(DocumentError, match=told):
        login(files, tmp_path, **more).check()


@pytest.mark.parametrize("field", ["ca_file", "key_file"])
@pytest.mark.parametrize("why", ["No such file", "it is no regular file"])
def test_a_file_that_is_gone_or_a_pipe_is_named_until_it_is_back(files, by_tls, tmp_path, field, why):
    """New connections read it again, as files that are exchanged must be, and wait for nobody to write into a pipe."""
    told, own = [], Path(copy(source := {"ca_file": files.ca, "key_file": files.client_key}[field], tmp_path))
    with opened(f"rediss://localhost:{by_tls}/0", login(files, tmp_path, **{field: own})) as tier:
        own.unlink()
        if "regular" in why:
            os.mkfifo(own)
        asked = Thread(target=lambda: told.append(write(tier, b"key")), daemon=True)
        asked.start()
        asked.join(PATIENCE_S)
        assert told == [Outcome.ERROR]
        assert re.fullmatch(rf"{re.escape(str(own))}: cannot be read: {why}.*", tier.why)
        own.unlink(missing_ok=True)
        copy(source, tmp_path)
        assert write(tier, b"key").kept


def test_nobody_is_asked_for_a_passphrase_that_a_new_key_has(files, by_tls, tmp_path, monkeypatch):
    """At a terminal OpenSSL would ask, and the operation would wait for ever."""
    own, loads = Path(copy(files.client_key, tmp_path)), ssl.SSLContext.load_cert_chain

    def unasked(context, certfile, keyfile=None, password=None):
        assert password is not None
        loads(context, certfile, keyfile, password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", unasked)
    with opened(f"rediss://localhost:{by_tls}/0", login(files, tmp_path, key_file=own)) as tier:
        secret = ("-aes256", "-passout", "pass:secret", "-out", str(own))
        subprocess.run(["openssl", "ec", "-in", str(files.client_key), *secret], check=True, capture_output=True)
        assert write(tier, b"key") is Outcome.ERROR
        assert "PEM" in tier.why
