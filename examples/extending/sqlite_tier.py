"""A file of SQLite as the remote tier: shared by the stores of one host, without a server and without a file per chunk.

Its locks hold on a local file system alone. What was written first leaves first.
"""

import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiertune_connector.chunk import NOBODY, Origin, checksum, writer_id
from tiertune_connector.tiers.base import Came, Outcome, Usage, unheard

WAIT_S = 1.0
"""For another store's transaction."""
OUTCOMES = {
    sqlite3.SQLITE_BUSY: Outcome.TIMEOUT,
    sqlite3.SQLITE_LOCKED: Outcome.TIMEOUT,
    sqlite3.SQLITE_FULL: Outcome.FULL,
}
SCHEMA = """
pragma journal_mode = wal;
pragma synchronous = normal;
create table if not exists chunks (
  place integer primary key, namespace text, key blob, writer text, tenant blob, checksum blob, payload blob,
  unique (namespace, key));
create index if not exists of_writer on chunks (writer, place);
create table if not exists held (writer text primary key, nbytes integer, chunks integer);
create trigger if not exists more after insert on chunks begin
  insert into held values (new.writer, length(new.payload), 1)
    on conflict (writer) do update set nbytes = nbytes + excluded.nbytes, chunks = chunks + 1;
end;
create trigger if not exists less after delete on chunks begin
  update held set nbytes = nbytes - length(old.payload), chunks = chunks - 1 where writer = old.writer;
end;
"""
"""``held`` spares adding up all chunks at every write."""
PRESENT = "select 1 from chunks where namespace = ? and key = ?"
READ = "select writer, tenant, checksum, payload from chunks where namespace = ? and key = ?"
WRITE = """
insert or ignore into chunks (namespace, key, writer, tenant, checksum, payload) values (?, ?, ?, ?, ?, ?)
"""
REMOVE = "delete from chunks where namespace = ? and key = ?"
EVICT = "delete from chunks where place = (select min(place) from chunks where writer = ?)"
FLUSH = "delete from chunks where namespace = ifnull(?, namespace) and tenant = ifnull(?, tenant)"
HELD = "select nbytes, chunks from held where writer = ?"


class SqliteTier:
    """A transaction is visible whole or not at all, and what SQLite raises becomes an outcome."""

    name = "remote"

    def __init__(self, path: Path, *, writer: str, capacity_bytes: int | None = None) -> None:
        """``capacity_bytes`` bounds the payloads of ``writer``; None: no bound. The file's folder must be there."""
        self.why = ""
        self._path = path
        self._writer = writer_id(writer)
        self._capacity = capacity_bytes
        self._lock = threading.Lock()  # one connection for all threads
        self._connection: sqlite3.Connection | None = None

    def present(self, namespace: str, keys: Sequence[bytes]) -> tuple[Outcome, int]:
        def run(db: sqlite3.Connection) -> int:
            found = (db.execute(PRESENT, (namespace, key)).fetchone() is not None for key in keys)
            return next((position for position, here in enumerate(found) if not here), len(keys))

        outcome, count = self._do(run)
        return outcome, count or 0

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> tuple[Outcome, Origin]:
        outcome, found = self._do(lambda db: db.execute(READ, (namespace, key)).fetchone())
        if outcome is not Outcome.OK:
            return outcome, NOBODY
        if found is None:
            return Outcome.MISS, NOBODY
        writer, tenant, expected, payload = found
        if len(payload) != len(out) or _sum(payload) != expected:
            self._do(lambda db: db.execute(REMOVE, (namespace, key)))
            return Outcome.CORRUPT, NOBODY
        out[:] = payload
        came(len(out))
        return Outcome.OK, Origin(writer, tenant)

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        if self._capacity is not None and len(payload) > self._capacity:
            return Outcome.FULL
        row = (namespace, key, self._writer, origin.tenant, _sum(payload), payload)

        def run(db: sqlite3.Connection) -> bool:
            new = db.execute(WRITE, row).rowcount > 0
            while self._capacity is not None and self._held(db)[0] > self._capacity:
                db.execute(EVICT, (self._writer,))
            return new

        outcome, new = self._do(run)
        return outcome if new or outcome is not Outcome.OK else Outcome.THERE

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> tuple[Outcome, int]:
        outcome, count = self._do(lambda db: db.execute(FLUSH, (namespace, tenant)).rowcount)
        return outcome, count or 0

    def usage(self) -> Usage:
        """Of this store; 0 as long as the file cannot be read."""
        _, held = self._do(self._held)
        nbytes, chunks = held or (0, 0)
        return Usage(nbytes, self._capacity, chunks)

    def close(self) -> None:
        """The file stays, with its chunks."""
        with self._lock:
            self._drop()

    def _held(self, db: sqlite3.Connection) -> tuple[int, int]:
        """Bytes and chunks of this store."""
        return db.execute(HELD, (self._writer,)).fetchone() or (0, 0)

    def _do(self, run: Callable[[sqlite3.Connection], Any]) -> tuple[Outcome, Any]:
        """What ``run`` answers, in one transaction; None where it could not be done."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = sqlite3.connect(self._path, timeout=WAIT_S, check_same_thread=False)
                    self._connection.executescript(SCHEMA)
                with self._connection as db:
                    return Outcome.OK, run(db)
            except sqlite3.Error as error:
                self._drop()  # the next operation connects anew: the file may have come back
                self.why = str(error)
                return OUTCOMES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, Outcome.ERROR), None

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _sum(payload: memoryview | bytes) -> bytes:
    """Eight bytes: SQLite's integers have a sign."""
    return checksum(payload).to_bytes(8, "little")
