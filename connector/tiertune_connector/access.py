"""How a Redis lets us in: passwords from files, TLS, Sentinels. The same for a store's remote and for the agent's."""

import os
import ssl
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import redis
from pydantic import model_validator
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool, SentinelManagedConnection

from tiertune_connector.addresses import Address, Urls, listed, parse_addresses
from tiertune_connector.documents import Document, DocumentError, plain_file, read_text, stamp

PASSWORD = "TIERTUNE_REMOTE_PASSWORD"  # noqa: S105 (the name of a variable)
Options = dict[str, Any]


class TlsFiles(Document):
    """PEM files. The server's name is always checked against its certificate."""

    ca_file: Path | None = None
    """Who signed the server's certificate: only these are trusted. None: the system's authorities."""
    certificate_file: Path | None = None
    """The client certificate, with ``key_file``."""
    key_file: Path | None = None
    """The certificate's key, without a passphrase."""

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together: name both, or none")
        return self


class Login(Document):
    """Credentials for the servers. Files are read again for every new connection: a password may be changed in place.

    Relative paths start at the folder of the settings, as ``beside`` makes them.
    """

    password_file: Path | None = None
    """None: the password, if there is one, is in TIERTUNE_REMOTE_PASSWORD."""
    sentinel_password_file: Path | None = None
    """None: Sentinels want none."""
    tls: TlsFiles | None = None
    """For ``rediss://`` addresses; None: the system's authorities, and no client certificate."""

    def check(self) -> None:
        """DocumentError if a file cannot be read or is not what it should be."""
        for path in (self.password_file, self.sentinel_password_file):
            if path and not read_text(path).strip():
                raise DocumentError([f"{path} is empty: write the password in it"])
        if self.tls:
            _check_tls(self.tls)

    def fits(self, urls: Urls) -> None:
        """ValueError if something is to be shown that no address asks for."""
        addresses = parse_addresses(listed(urls))
        if self.tls and not all(address.tls for address in addresses):
            raise ValueError(
                "tls is for rediss:// addresses: write them so, or leave it out, as nothing would be encrypted"
            )
        if self.sentinel_password_file and not any(address.service for address in addresses):
            raise ValueError("sentinel_password_file is for redis+sentinel:// addresses: leave it out")


class _Password(CredentialProvider):
    """Asked by every new connection."""

    def __init__(self, user: str | None, file: Path | None, environment: Mapping[str, str]) -> None:
        self._user, self._file, self._environment = user, file, environment

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = read_text(self._file).strip() if self._file else self._environment.get(PASSWORD, "")
        except DocumentError as error:
            raise redis.AuthenticationError(f"password_file: {error}") from None
        return (self._user, password) if self._user else (password,)


class _Trust:
    """What connections by TLS trust and show, read again for a new one if a file has changed. Thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._mutex = threading.Lock()
        self._read: tuple[object, ssl.SSLContext] | None = None

    def now(self) -> ssl.SSLContext:
        """OSError, and redis.ConnectionError where a file is not there or is none."""
        of_system = ssl.get_default_verify_paths()
        own = [path for _, path in self._files]
        with self._mutex:
            seen = [of_system, *(path and stamp(Path(path)) for path in (*own, of_system.cafile, of_system.capath))]
            if self._read is None or self._read[0] != seen:
                self._read = None
                try:
                    self._read = seen, _context(self._files)
                except OSError as error:
                    if not error.filename:
                        raise
                    raise redis.ConnectionError(f"{error.filename}: cannot be read: {error.strerror}") from None
            return self._read[1]


class _Encrypted(redis.Connection):
    """The library's own would read the system's authorities for every connection, and trust them beside ``ca_file``."""

    def __init__(self, *, trust: _Trust, **options: Any) -> None:  # noqa: ANN401 (the library's own)
        self._trust = trust
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def _connect(self) -> ssl.SSLSocket:
        context = self._trust.now()
        return context.wrap_socket(super()._connect(), server_hostname=self.host)  # type: ignore[no-untyped-call]


class _EncryptedMaster(SentinelManagedConnection, _Encrypted):
    """The same to the master that Sentinels name."""


class _Sentinels(Sentinel):
    """Says why there is no master. Threads may ask at the same time: the library reorders its list in place."""

    def __init__(self, hosts: Iterable[tuple[str, int]], options: Options) -> None:
        super().__init__([])  # type: ignore[no-untyped-call]
        pools = (redis.ConnectionPool(host=host, port=port, **options) for host, port in hosts)
        self.sentinels = [redis.Redis(connection_pool=pool) for pool in pools]

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Where the master is; the Sentinel that answered is asked first from then on."""
        told = []
        for sentinel in self.sentinels:
            try:
                masters: Any = sentinel.sentinel_masters()
            except redis.RedisError as error:
                told.append(f"Sentinel {_place(sentinel)}: {error}")
                continue
            state = masters.get(service_name)
            if state and self.check_master_state(state, service_name):  # type: ignore[no-untyped-call]
                self.sentinels = [sentinel, *(other for other in self.sentinels if other is not sentinel)]
                return state["ip"], state["port"]
            known = f"says that {state['ip']}:{state['port']} is down" if state else "watches no such service"
            told.append(f"Sentinel {_place(sentinel)} {known}")
        raise MasterNotFoundError(f"no master of {service_name!r}: {'; '.join(told)}")


def _place(server: redis.Redis) -> str:
    return "{host}:{port}".format_map(server.connection_pool.connection_kwargs)


class _MasterPool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """Every new connection asks the Sentinels where the master is; at most so many at a time, others wait."""

    def owns_connection(self, connection: redis.Connection) -> bool:
        """Every one that it made. One to no present master is closed, and asks again when it is used.

        The library takes that for another pool's, and makes a new one instead without ever letting it go: a dead
        remote is asked every second.
        """
        if not super().owns_connection(connection):  # type: ignore[no-untyped-call]
            connection.disconnect()  # type: ignore[no-untyped-call]
        return bool(redis.ConnectionPool.owns_connection(self, connection))


def connection_pool(
    address: Address,
    login: Login,
    *,
    timeout_s: float,
    connections: int,
    environment: Mapping[str, str] = os.environ,
    **more: Any,  # noqa: ANN401 (of a connection)
) -> redis.BlockingConnectionPool:
    """Connections that fail rather than wait, and are made when they are needed.

    All Sentinels together are asked for at most ``timeout_s``.
    """
    shared: Options = {"retry": Retry(NoBackoff(), 0)}
    kinds: Sequence[type[redis.Connection]] = (redis.Connection, SentinelManagedConnection)
    if address.tls:
        kinds = _Encrypted, _EncryptedMaster
        shared["trust"] = _Trust(login.tls or TlsFiles())
    options: Options = {
        **shared,
        "db": address.db,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "max_connections": connections,
        "timeout": timeout_s,
        **more,
    }
    if address.user or login.password_file or environment.get(PASSWORD):
        options["credential_provider"] = _Password(address.user, login.password_file, environment)
    if address.service:
        each_s = timeout_s / (2 * len(address.hosts))  # each may take its part to connect, and as long again to answer
        asked: Options = {**shared, "socket_timeout": each_s, "socket_connect_timeout": each_s}
        if login.sentinel_password_file:
            asked["credential_provider"] = _Password(None, login.sentinel_password_file, {})
        sentinels = _Sentinels(address.hosts, {**asked, "connection_class": kinds[0]})
        options["connection_class"] = kinds[1]
        return _MasterPool(address.service, sentinels, **options)  # type: ignore[no-untyped-call]
    if address.path:
        del options["socket_connect_timeout"]
        options |= {"connection_class": redis.UnixDomainSocketConnection, "path": address.path}
    else:
        ((host, port),) = address.hosts
        options |= {"connection_class": kinds[0], "host": host, "port": port}
    return redis.BlockingConnectionPool(**options)  # type: ignore[no-untyped-call]


def _context(files: TlsFiles) -> ssl.SSLContext:
    """What the files say; OSError. Reading the system's authorities takes tens of milliseconds."""
    context = ssl.create_default_context(cafile=plain_file(files.ca_file) if files.ca_file else None)
    if files.certificate_file and files.key_file:  # without a passphrase OpenSSL would ask for it
        context.load_cert_chain(plain_file(files.certificate_file), plain_file(files.key_file), lambda: "")
    return context


def _check_tls(files: TlsFiles) -> None:
    try:
        _context(files)
    except OSError as error:
        named = ", ".join(str(path) for _, path in files if path)
        raise DocumentError([f"remote.tls: {named}: {error.strerror or error}"]) from None
