"""Transactions: whole or rolled back, fenced before their first write."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from sqlalchemy import Connection, Engine, Executable, Select, UpdateBase, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DatabaseError as Damaged
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import ORMExecuteState, Session, sessionmaker

from tiertune_agent.fields import JsonDict
from tiertune_agent.history.database import DatabaseError, cause, shown
from tiertune_agent.history.models import Base
from tiertune_agent.history.rows import decision_of
from tiertune_agent.records import Decision

_INSERTS: Mapping[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeout)


class Sessions:
    """Each call opens one transaction. DatabaseError if the database is away."""

    def __init__(self, engine: Engine, fence: Callable[[Connection], None]) -> None:
        """``fence`` is called in every transaction before its first write; it may raise."""
        self.summing = Lock()
        """Held while summing windows up, and while adding late ones, so that each sees all of the other's."""
        self._engine = engine
        self._fence = fence
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        event.listen(self._sessions, "before_flush", lambda session, *_: self._writes(session))
        event.listen(self._sessions, "do_orm_execute", self._executes)

    @contextmanager
    def __call__(self) -> Iterator[Session]:
        try:
            with self._sessions.begin() as session:
                yield session
        except (DBAPIError, PoolTimeout) as error:
            if not isinstance(error, _AWAY) and type(error) is not Damaged:
                raise  # a statement of ours is wrong
            raise DatabaseError(f"database: {shown(self._engine.url)}: {cause(error)}") from error

    def fence(self) -> None:
        """Call the fence, as before a write."""
        with self() as session:
            self._fence(session.connection())

    def _writes(self, session: Session) -> None:
        if not session.info.get("fenced"):
            session.info["fenced"] = True
            self._fence(session.connection())

    def _executes(self, state: ORMExecuteState) -> None:
        if state.is_insert or state.is_update or state.is_delete:
            self._writes(state.session)


class OfHistory:
    """A part of `History`, with the same transactions."""

    def __init__(self, session: Sessions) -> None:
        self._session = session

    def _all(self, query: Select[Any]) -> Sequence[Any]:
        """What a query of one thing finds; of the tables' rows, each is as it was then."""
        with self._session() as session:
            return session.scalars(query).all()

    def _rows(self, query: Executable) -> Sequence[Any]:
        """What a query of several columns finds."""
        with self._session() as session:
            return session.execute(query).all()

    def _told(self, query: Select[Any], *columns: str) -> list[JsonDict]:
        """These columns of each row, ready for JSON."""
        return [row.told(*columns) for row in self._all(query)]

    def _decided(self, query: Select[Any]) -> list[Decision]:
        """The decisions of a query."""
        return [decision_of(row) for row in self._all(query)]


def altered(session: Session, change: UpdateBase) -> int:
    """Make a change in the database alone, not in what the session has read; returns how many rows it met."""
    made = session.execute(change.execution_options(synchronize_session=False))
    return int(getattr(made, "rowcount", 0))


def renew(session: Session, table: type[Base], rows: Sequence[JsonDict]) -> None:
    """Write whole rows, also in place of those of the same keys; others may do so at the same time."""
    if rows:  # by the table itself: of the class, rows with other columns unknown would be statements of their own
        newer = _INSERTS[session.get_bind().dialect.name](table.__table__)
        keys = table.__table__.primary_key
        session.execute(newer.on_conflict_do_update(index_elements=keys, set_=newer.excluded), rows)
