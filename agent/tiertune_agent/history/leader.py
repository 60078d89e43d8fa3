"""One leader per database. Leadership ends with the process; an agent that lost it writes nothing more."""

import contextlib
import fcntl
import os
import threading
from pathlib import Path

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from tiertune_agent.history.database import DatabaseError, cause, shown, sqlite_path

_KEY, _LEADS, _WRITES = 0x74696572, 1, 2
"""Advisory locks ``(key, number)``: the holder of the first leads; writers share the second while they write."""
_TRY = text(f"SELECT pg_try_advisory_lock({_KEY}, {_LEADS})")
_WAIT = text(f"SELECT pg_advisory_lock({_KEY}, {_WRITES}), pg_advisory_unlock({_KEY}, {_WRITES})")
_END_IDLE = text("SELECT set_config(name, :after, false) FROM pg_settings WHERE name = 'idle_session_timeout'")
"""Does nothing in PostgreSQL 13, which has no such bound."""
_RELEASE = text(f"SELECT pg_advisory_unlock({_KEY}, {_LEADS})")
_SHARE = text(f"SELECT pg_advisory_xact_lock_shared({_KEY}, {_WRITES})")
_HELD = text(
    "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = :pid"  # noqa: S608
    f" AND classid = {_KEY} AND objid = {_LEADS} AND objsubid = 2"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
)
SILENT = "30s"
"""A leader asks every second; the lead of one that is stopped, or paused with its machine, ends after this time."""


class NotLeadingError(DatabaseError):
    """Another agent leads by now, or none does: this one may neither write nor command stores."""

    def __init__(self) -> None:
        super().__init__("this agent does not lead (any more)")


class FileLeader:
    """Leads an SQLite file by a lock on a file beside it."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + ".lock")
        self._handle: int | None = None
        self._mutex = threading.Lock()
        self.leading, self.away = False, ""
        """Whether it led when it was last checked; why the database did not answer then: it is not asked."""

    def leads(self) -> bool:
        """Whether this agent leads now; tries to take the lead if not. Never raises."""
        with self._mutex:
            if not self._holds():
                self._drop()
                self._take()
            self.leading = self._holds()
            return self.leading

    def fence(self, connection: Connection) -> None:  # noqa: ARG002
        """Called in every transaction that is about to write, and before a store is commanded.

        Raises NotLeadingError if this agent does not lead.
        """
        with self._mutex:
            if not self._holds():
                raise NotLeadingError

    def resign(self) -> None:
        """Give up the lead, if this agent has it. Never raises."""
        with self._mutex:
            self._drop()

    def _take(self) -> None:
        try:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._drop()

    def _holds(self) -> bool:
        """Whether the lock is held, on the file that is there now: a removed one keeps nobody out."""
        try:
            return self._handle is not None and os.path.samestat(os.fstat(self._handle), self._path.stat())
        except OSError:
            return False

    def _drop(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self.leading = None, False


class SessionLeader:
    """Leads a PostgreSQL database by an advisory lock of a session of its own, which ends with that session.

    A transaction that writes asks PostgreSQL itself whether that session still holds the lock, and shares a second lock
    until it ends. A successor waits for all that share it, so that nothing is written after it first reads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session: Connection | None = None
        self._pid: int | None = None
        """PID of the server's process that holds the lock."""
        self._mutex = threading.Lock()
        self.leading, self.away = False, ""
        """Whether it led when it was last checked; why the database did not answer then, empty where it did."""

    def leads(self) -> bool:
        with self._mutex:
            try:
                self.leading, self.away = self._holds() or self._take(), ""
            except (SQLAlchemyError, DatabaseError) as error:
                self.away = f"{shown(self._engine.url)}: {cause(error)}"
                self._drop()
            return self.leading

    def fence(self, connection: Connection) -> None:
        pid = self._pid
        if pid is not None:
            connection.execute(_SHARE)
            if connection.scalar(_HELD, {"pid": pid}):
                return
        raise NotLeadingError

    def resign(self) -> None:
        with self._mutex:
            session, pid = self._session, self._pid
            if session is not None and pid is not None:
                with contextlib.suppress(SQLAlchemyError):  # the lock goes with the session, a moment later
                    session.execute(_RELEASE)
            self._drop()

    def _holds(self) -> bool:
        if self._session is None or self._pid is None:
            return False
        if self._session.scalar(_HELD, {"pid": self._pid}):
            return True
        self._drop()
        return False

    def _take(self) -> bool:
        if self._session is None:
            self._session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._session.detach()
            self._session.execute(_END_IDLE, {"after": SILENT})
        if not self._session.scalar(_TRY):
            return False
        self._session.execute(_WAIT)
        self._pid = self._session.scalar(text("SELECT pg_backend_pid()"))
        return True

    def _drop(self) -> None:
        session, self._session, self._pid, self.leading = self._session, None, None, False
        if session is not None:
            try:
                session.close()
            except SQLAlchemyError:
                session.invalidate()


Leader = FileLeader | SessionLeader


def leader_of(engine: Engine) -> Leader:
    """The leader of this engine's database; nobody leads before ``leads`` is called."""
    path = sqlite_path(engine.url)
    return SessionLeader(engine) if path is None else FileLeader(path)
