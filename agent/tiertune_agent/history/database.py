"""The database: engine, migrations, one leader."""

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

if TYPE_CHECKING:
    from alembic.config import Config

_PACKAGED = Path(__file__).parents[1] / "migrations"
_REPOSITORY = Path(__file__).parents[3] / "migrations"


class DatabaseError(RuntimeError):
    """The database cannot be used; the message says what to do."""


class AddressError(ValueError):
    """An address that names no database of this version."""


def sqlite_path(url: str) -> Path:
    """The file behind ``sqlite:///path``; AddressError for any other address."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise AddressError(f"database: {url!r} is not an address such as sqlite:///tiertune.sqlite") from error
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise AddressError(f"database: this version keeps history in an SQLite file (sqlite:///path), not in {url!r}")
    return Path(parsed.database)


def connect(url: str) -> Engine:
    """An engine; makes the file's folder, but no file."""
    path = sqlite_path(url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(f"database: the folder {path.parent} cannot be made: {error.strerror}") from error
    engine = create_engine(url)
    event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:  # noqa: ANN401 (a DB-API connection)
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")  # readers do not wait for the loop
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()


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
            have = MigrationContext.configure(connection).get_current_revision()
            if have is None and inspect(connection).get_table_names():
                raise DatabaseError("database: it holds tables that are not TierTune's; give it one of its own")
    except SQLAlchemyError as error:
        raise DatabaseError(f"database: {engine.url} cannot be opened: {_cause(error)}") from error
    return have, str(ScriptDirectory.from_config(_config()).get_current_head())


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Migrate to the newest revision; returns the old and the new one."""
    from alembic import command  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    have, newest = revisions(engine)
    config = _config()
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        raise DatabaseError(f"database: revision {have} is unknown to this version ({newest}): it is newer") from error
    except SQLAlchemyError as error:
        raise DatabaseError(f"database: {engine.url} cannot be upgraded: {_cause(error)}") from error
    return have, newest


def open_current(url: str) -> Engine:
    """An engine on a database at the newest revision: an empty one is filled, an older one is refused."""
    engine = connect(url)
    have, newest = revisions(engine)
    if have is None:
        upgrade(engine)
    elif have != newest:
        raise DatabaseError(
            f"database: it is at revision {have}, this version needs {newest}: run `tiertune db upgrade`"
        )
    return engine


def _cause(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error)


class Leader:
    """One leader per database file: an advisory lock beside it, gone with the process."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + ".lock")
        self._handle: int | None = None

    def leads(self) -> bool:
        """Whether this agent leads; tries to, where it does not yet."""
        if self._handle is not None:
            return True
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    def resign(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
