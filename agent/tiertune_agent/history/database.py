"""The database: address, engine, migrations."""

import json
import os
import re
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DisconnectionError, OperationalError, SQLAlchemyError

from tiertune_connector.documents import plain_file

if TYPE_CHECKING:
    from alembic.config import Config

_PACKAGED = Path(__file__).parents[1] / "migrations"
_REPOSITORY = Path(__file__).parents[3] / "migrations"
_SESSION = (
    "-c timezone=UTC -c statement_timeout=30s -c lock_timeout=5s -c idle_in_transaction_session_timeout=30s "
    "-c default_transaction_isolation=read\\ committed "  # a stricter one refuses what others have changed meanwhile
    "-c synchronous_commit=on "  # a decision is made only when it is sure to be remembered
    # The server also treats a client that is silent for about 10 s as gone: by default it would keep the lead of a
    # dead host for two hours.
    "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3 -c tcp_user_timeout=10s"
)
_NETWORK = {
    "connect_timeout": 3,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "application_name": "tiertune",
    "client_encoding": "UTF8",  # of an SQL_ASCII database the driver would give bytes
}
"""libpq's parameters: a server that is silent for about 10 s counts as gone. The address's query overrules them."""
_NEW_FILE_S = 5.0
_ZERO = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
"""The escape of a zero byte, and of backslashes before it."""
_UPGRADES = 0x74696572, 3
"""Advisory lock that allows one upgrade at a time."""


class DatabaseError(RuntimeError):
    """The database cannot be used now; the message says why, or what to do. It holds no password."""


class UnusableError(DatabaseError, ValueError):
    """What was configured cannot be our database, and retrying is useless; the message says what to mend."""


def sqlite_path(url: str | URL) -> Path | None:
    """The file behind ``sqlite:///path``; None for PostgreSQL; UnusableError for any other address."""
    parsed = _address(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def shown(url: str | URL) -> str:
    """The address for people: no password, no parameters."""
    parsed = make_url(url)
    return URL.create(
        parsed.get_backend_name(), parsed.username, None, parsed.host, parsed.port, parsed.database
    ).render_as_string()


def connect(url: str, password_file: Path | None = None) -> Engine:
    """An engine; creates nothing and does not connect. UnusableError for what our SQLite file cannot be.

    ``password_file`` is read at every connection to PostgreSQL, so that the password can be replaced.
    """
    parsed, path = _address(url), sqlite_path(url)
    if path is None:
        return _postgresql(parsed, password_file)
    if password_file is not None:
        raise UnusableError("database: an SQLite file has no password: name no password file, or a PostgreSQL")
    if not path.parent.is_dir():  # the path may be mistyped: no folder is made
        raise UnusableError(f"database: there is no folder {path.parent}: make it, or mend the path")
    if path.is_dir():
        raise UnusableError(f"database: {path} is a folder: name a file in it")
    engine, file = create_engine(parsed, json_deserializer=_document), _File(path)
    event.listen(engine, "do_connect", file.opening)
    event.listen(engine, "connect", file.opened)
    event.listen(engine, "checkout", file.lent)
    return engine


def _address(url: str | URL) -> URL:
    such_as = "sqlite:///tiertune.sqlite or postgresql://user@host/name; an @ in a password is %40"
    wrong = UnusableError(f"database: no address such as {such_as}")
    try:
        parsed = make_url(url)
        shown(parsed)  # bytes of another encoding cannot be
        backend = parsed.get_backend_name()
    except (ArgumentError, ValueError):
        raise wrong from None
    split = backend != "sqlite" and "@" in f"{parsed.host}{parsed.database}"  # a password: its end is told as a host
    if split or "\0" in (parsed.database or ""):
        raise wrong
    if backend == "sqlite" and "?" in str(url):  # what follows would have no effect
        told = f"an SQLite file has no parameters, and none of its path a ?: {shown(parsed)}?..."
        raise UnusableError(f"database: {told}")
    if parsed.port is not None and not 0 < parsed.port < 1 << 16:
        raise UnusableError(f"database: a port is a number from 1 to 65535, not {parsed.port}")
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed
    if parsed.drivername in ("postgresql", "postgresql+psycopg") and "password" not in parsed.query:
        return parsed.set(drivername="postgresql+psycopg")
    raise UnusableError(
        "database: history is kept in an SQLite file (sqlite:///path) or in PostgreSQL (postgresql://user@host/name, "
        f"no password among its parameters), not in {shown(parsed)}"
    )


def _postgresql(url: URL, password_file: Path | None) -> Engine:
    options = " ".join((_SESSION, *url.normalized_query.get("options", ())))
    network = {name: value for name, value in _NETWORK.items() if name not in url.query}
    try:
        engine = create_engine(
            url,
            pool_pre_ping=True,
            pool_timeout=5,
            hide_parameters=True,
            json_serializer=_written,
            json_deserializer=_document,
            connect_args={**network, "options": options},
        )
    except ModuleNotFoundError as error:
        raise DatabaseError("database: PostgreSQL needs psycopg: pip install 'tiertune[postgres]'") from error
    if password_file is not None:
        event.listen(engine, "do_connect", _password(password_file))
    return engine


def _document(told: str | bytes) -> Any:  # noqa: ANN401 (JSON)
    """Parse JSON quickly; what only Python accepts (NaN, half a surrogate) is left to Python."""
    try:
        return msgspec.json.decode(told)
    except msgspec.DecodeError:
        return json.loads(told)


def _written(document: Any) -> str:  # noqa: ANN401 (JSON)
    """JSON without zero bytes: PostgreSQL takes them, but looks into no document that has one."""
    text = json.dumps(document)
    return _ZERO.sub(r"\1", text) if "u0000" in text else text


def _password(path: Path) -> Any:  # noqa: ANN401 (a listener)
    def add(_dialect: object, _record: object, _arguments: object, parameters: dict[str, Any]) -> None:
        try:
            parameters["password"] = plain_file(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise UnusableError(f"database: the password file {path} cannot be read: {why}") from None

    return add


class _File:
    """The file of an SQLite engine. If it is moved away, it is neither written to nor recreated: it may come back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = False

    def opening(self, *_: object) -> None:
        if self._known and not self._path.exists():
            raise sqlite3.OperationalError(f"the file {self._path} is gone")

    def opened(self, connection: Any, record: Any) -> None:  # noqa: ANN401 (a DB-API connection)
        cursor = connection.cursor()
        cursor.execute("PRAGMA busy_timeout=5000")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.close()
        self._known, record.info["file"] = True, self._identity()

    def lent(self, _connection: object, record: Any, _proxy: object) -> None:  # noqa: ANN401
        if record.info.get("file") != self._identity():
            raise DisconnectionError

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116 (asked often)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _write_ahead(engine: Engine) -> None:
    """Switch the file to write-ahead logging, so that readers do not wait for the loop.

    The file keeps that, so it must be known to be ours. If two open a new file, SQLite fails one: it tries again.
    """
    deadline = time.monotonic() + _NEW_FILE_S
    while engine.dialect.name == "sqlite":
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        except OperationalError as error:
            busy = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return


def _writable(engine: Engine) -> None:
    """UnusableError for an SQLite file that this user may not write, which SQLite itself tells at the first write."""
    path = sqlite_path(engine.url)
    for place in (path, path.parent) if path else ():  # it also makes files beside it
        if place.exists() and not os.access(place, os.W_OK):
            raise UnusableError(f"database: {place} is readonly: let this user write it, or name another file")


def _failed(engine: Engine, what: str, error: Exception) -> DatabaseError:
    kind = DatabaseError if isinstance(error, OperationalError) else UnusableError  # else it will not pass by itself
    return kind(f"database: {shown(engine.url)} cannot be {what}: {cause(error)}")


def _config() -> "Config":
    from alembic.config import Config  # noqa: PLC0415 (0.4 s)

    config = Config()
    folder = _PACKAGED if _PACKAGED.is_dir() else _REPOSITORY
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


def revisions(engine: Engine) -> tuple[str | None, str]:
    """The database's revision (None: empty) and the newest one."""
    from alembic.runtime.migration import MigrationContext  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    try:
        with engine.connect() as connection:
            tables = inspect(connection).get_table_names()  # first, as another may be filling it just now
            have = MigrationContext.configure(connection).get_current_revision()
            ours = inspect(connection).has_table("stage_windows")  # every revision has it; others use Alembic, too
            if tables and (have is None or not ours):
                raise UnusableError("database: it holds tables that are not TierTune's; give it one of its own")
            if have is None:
                _holds_all_letters(connection)
    except SQLAlchemyError as error:
        raise _failed(engine, "opened", error) from error
    return have, str(ScriptDirectory.from_config(_config()).get_current_head())


def _holds_all_letters(connection: Connection) -> None:
    """UnusableError for a PostgreSQL that would refuse what people and stores say, at any time later.

    One that was filled before this was looked at goes on: it lacks nothing until such a letter comes.
    """
    if connection.dialect.name == "postgresql":
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
        if encoding != "UTF8":
            mend = "give it one of CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
            raise UnusableError(f"database: {shown(connection.engine.url)} is encoded in {encoding}: {mend}")


def upgrade(engine: Engine, to: str = "head") -> tuple[str | None, str]:
    """Migrate to the newest revision, wholly or not at all; returns the old and the new one."""
    from alembic import command  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    _writable(engine)
    have, newest = revisions(engine)
    config = _config()
    try:
        _write_ahead(engine)
        with engine.begin() as connection:
            _alone(connection)
            config.attributes["connection"] = connection
            command.upgrade(config, to)
    except CommandError as error:  # also if another version wrote it while this one waited
        raise _newer(str(revisions(engine)[0]), newest) from error
    except SQLAlchemyError as error:
        raise _failed(engine, "upgraded", error) from error
    return have, newest


def _alone(connection: Connection) -> None:
    """Lock: if two upgrade at once, the second waits, and then finds nothing to do."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # its driver begins none before a CREATE TABLE
        return
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
    connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
    connection.exec_driver_sql("SELECT pg_advisory_xact_lock({}, {})".format(*_UPGRADES))


def open_current(url: str, password_file: Path | None = None) -> Engine:
    """An engine on a database at the newest revision: an empty one is filled, an older one is refused."""
    engine = connect(url, password_file)
    _writable(engine)
    have, newest = revisions(engine)
    if have is None:
        upgrade(engine)
    elif have != newest:
        raise outdated(have, newest)
    try:
        _write_ahead(engine)
    except SQLAlchemyError as error:
        raise _failed(engine, "opened", error) from error
    return engine


def outdated(have: str, newest: str) -> DatabaseError:
    """What is wrong with a database of another revision than the newest, and what to do."""
    if have > newest:
        return _newer(have, newest)
    mend = "run `tiertune db upgrade --config FILE` with the agent's settings"
    return DatabaseError(f"database: it is at revision {have}, this version needs {newest}: {mend}")


def _newer(have: str, newest: str) -> DatabaseError:
    told = f"revision {have} is unknown to this version ({newest}): it is newer; run the TierTune that wrote it"
    return DatabaseError(f"database: {told}")


def cause(error: Exception) -> str:
    """What the database said, in one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())
