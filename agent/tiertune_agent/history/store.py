"""Stores: what they tell, what is expected and wished of them; and access to all else that is remembered."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Engine, delete, insert, select, update
from sqlalchemy.orm import Session

from tiertune_agent.fields import read
from tiertune_agent.history.changed import Changed
from tiertune_agent.history.decisions import Answers, Decisions, Verdicts
from tiertune_agent.history.journal import Journal
from tiertune_agent.history.ledger import Booked, Ledger, book
from tiertune_agent.history.measured import Measured
from tiertune_agent.history.models import AnswerRow, IncidentRow, StageWindowRow, StoreRow, WindowRow, WishRow
from tiertune_agent.history.retention import Retention
from tiertune_agent.history.rollup import NEVER, add_late, over
from tiertune_agent.history.rows import window_columns
from tiertune_agent.history.sessions import OfHistory, Sessions, altered, renew
from tiertune_agent.records import FLEET, OBSERVED, Expectation, Rates, Snapshot, Window
from tiertune_agent.tuners.gate_settings import HOLDOUT
from tiertune_agent.tuners.remote_fetch import candidates

_STATE = ("url", "boot_id", "version", "status", "tuning")
NOWHERE = ""
"""Address of a store when another store answers at its former one."""


class History(OfHistory):
    """Every method is one transaction: whole, or rolled back. DatabaseError if the database is away."""

    def __init__(self, engine: Engine, fence: Callable[[Connection], None] = lambda _: None) -> None:
        """``fence`` is called in every transaction before its first write; it may raise."""
        self.named: Callable[[], Collection[str]] | None = None
        """Returns addresses of the present stores and sources; None: any address counts."""
        self._engine = engine
        super().__init__(Sessions(engine, fence))
        self.measured = Measured(self._session)
        self.ledger = Ledger(self._session)
        self.retention = Retention(self._session)
        self.decisions = Decisions(self._session)
        self.verdicts = Verdicts(self._session)
        self.changed = Changed(self._session)
        self.answers = Answers(self._session)
        self.journal = Journal(self._session)

    def close(self) -> None:
        self._engine.dispose()

    def fence(self) -> None:
        """Call right before commanding a store. DatabaseError if this agent may not (any more)."""
        self._session.fence()

    def remember(self, told: Sequence[tuple[Snapshot, Rates]], booked: Sequence[tuple[Window, Rates]] = ()) -> Booked:
        """Write the state and windows of different stores, and the windows' entries in the ledger; returns these.

        ``booked`` are windows of no store, which go into the ledger only. Takes as many statements for many stores as
        for one.
        """
        snapshots = [snapshot for snapshot, _ in told]
        windows = [(window, rates) for snapshot, rates in told for window in snapshot.windows]
        stages = [dict(vars(stage)) for snapshot in snapshots for stage in snapshot.stages]
        shares = {snapshot.store: str(read(snapshot.tuning, HOLDOUT) or 0.0) for snapshot in snapshots}
        late = any(over(window.start, snapshot.at) for snapshot in snapshots for window in snapshot.windows)
        with self._session.summing if late else nullcontext(), self._session() as session:
            summed = _write_stores(session, snapshots)
            if windows:
                session.execute(insert(WindowRow), [window_columns(window) for window, _ in windows])
                late_ones = [window for window, _ in windows if window.start < (summed.get(window.store) or NEVER)]
                add_late(session, late_ones)
            if stages:
                session.execute(insert(StageWindowRow), stages)
            return book(session, [*windows, *booked], shares)

    def expectations(self, stores: Iterable[str]) -> dict[str, Expectation]:
        """The tuning expected of stores that were seen."""
        columns = (StoreRow.name, StoreRow.expected, StoreRow.expected_at, StoreRow.differs_since)
        there = StoreRow.name.in_(stores)
        with self._session() as session:
            for row in session.scalars(select(StoreRow).where(there, StoreRow.expected_at.is_(None))):
                row.expected, row.expected_at = row.tuning, row.last_seen  # as schemas before 0010 leave it
            found = session.execute(select(*columns).where(there))
            return {row.name: Expectation(row.expected, row.expected_at, row.differs_since) for row in found}

    def expect(self, anew: Mapping[str, tuple[datetime, Expectation]]) -> None:
        """Set what is expected of stores; not where another was set meanwhile than that known since then."""
        with self._session() as session:
            for store, (known, then) in sorted(anew.items()):
                values = {"expected": then.tuning, "expected_at": then.since, "differs_since": then.differs}
                session.execute(update(StoreRow).filter_by(name=store, expected_at=known).values(values))

    def stores(self) -> Sequence[StoreRow]:
        """Stores at the addresses of ``named``, or all without it; former ones stay remembered."""
        query = select(StoreRow).where(StoreRow.name != FLEET).order_by(StoreRow.name)
        if self.named:
            query = query.where(StoreRow.url.in_(self.named()))
        return self._all(query)

    def called(self, urls: Iterable[str]) -> dict[str, str]:
        """Names of the stores that answered at these addresses last, by address."""
        found = self._rows(select(StoreRow.url, StoreRow.name).where(StoreRow.url.in_(urls)))
        return {row.url: row.name for row in found}

    def store(self, name: str) -> StoreRow | None:
        """A store by its name; ``fleet`` is the managed remote."""
        with self._session() as session:
            return session.get(StoreRow, name)

    def forget(self, store: str) -> None:
        """Delete a store's state, and close its incidents; its decisions stay."""
        closed = update(IncidentRow).filter_by(store=store, closed_at=None)
        with self._session() as session:
            session.execute(delete(StoreRow).filter_by(name=store))
            session.execute(closed.values(closed_at=IncidentRow.last_seen))

    def leave_out(self, called: Collection[str]) -> set[str]:
        """Close the incidents of what is at no address of ``named``, unless it is ``called`` so; returns what stays.

        Drop its wishes, and what tuners answered about it.
        """
        assert self.named is not None
        named = self.named()
        with self._session() as session:
            present = session.scalars(select(StoreRow.name).where(StoreRow.url.in_(named)))
            names = {"", FLEET, *called, *named, *present}
            still = update(IncidentRow).filter_by(closed_at=None).where(IncidentRow.store.not_in(names))
            session.execute(still.values(closed_at=IncidentRow.last_seen))
            session.execute(delete(AnswerRow).where(AnswerRow.store.not_in(names)))
            for url in sorted(session.scalars(select(WishRow.url).where(WishRow.url.not_in({FLEET, *named})))):
                session.execute(delete(WishRow).filter_by(url=url))  # in the order in which all lock them
        return names

    def wishes(self, urls: Collection[str]) -> dict[str, bool]:
        """The bypass, on or off, wished of stores that never answered, by address, until they have heard it."""
        return {row.url: row.bypass for row in self._all(select(WishRow).where(WishRow.url.in_(urls)))}

    def wish_bypass(self, stores: Mapping[str, str], *, on: bool) -> None:
        """Remember what these stores, by name and address, have not acknowledged yet; if off, that it is not of all.

        Where another one, or none, answered at the address last, it is for whoever will answer there.
        """
        with self._session() as session:
            # First, which locks the rows: a round may move to an address what was wished of its store until then.
            wished = update(StoreRow).values(pending_bypass=on)
            there = sorted(stores.items())
            known = {name for name, url in there if altered(session, wished.filter_by(name=name, url=url))}
            if not on:
                session.execute(delete(WishRow).filter_by(url=FLEET))
            for name, url in sorted(there, key=itemgetter(1)):
                if name in known:
                    session.execute(delete(WishRow).filter_by(url=url))
                else:
                    _keep(session, url, on=on)

    def wish_bypass_of_all(self, *, on: bool) -> None:
        """Wish it of all stores that were ever seen; if on, of new ones, too.

        Those that left hear it under their names: another store may have the address by then.
        """
        told = self._rows(select(StoreRow.name, StoreRow.status))  # PostgreSQL looks into no document with a zero byte
        ours = sorted(name for name, status in told if name != FLEET and not status.get(OBSERVED))
        with self._session() as session:
            for name in ours:  # all who write several stores lock them in this order
                session.execute(update(StoreRow).filter_by(name=name).values(pending_bypass=on))
            if self.named:
                left = StoreRow.name.in_(ours), StoreRow.url.not_in(self.named())
                session.execute(update(StoreRow).where(*left).values(url=NOWHERE))
            if on:
                _keep(session, FLEET, on=True)
            else:
                session.execute(delete(WishRow).filter_by(url=FLEET))

    def acknowledge_bypass(self, heard: Iterable[tuple[str, str, bool]]) -> None:
        """Note that who answers there has it, as its next answer will say. Another wish that came meanwhile stays.

        ``heard``: name and address of each store, and whether it is on.
        """
        told = {name: (url, on) for name, url, on in heard}
        with self._session() as session:
            # First, which locks the rows: what a round writes meanwhile is read here.
            wished = update(StoreRow).values(pending_bypass=None)
            met = [
                name
                for name, (url, on) in sorted(told.items())
                if altered(session, wished.filter_by(name=name, url=url, pending_bypass=on))
            ]
            for row in session.scalars(select(StoreRow).where(StoreRow.name.in_(met))).all():
                row.tuning = {**row.tuning, "bypass": told[row.name][1]}
            for url, on in sorted(told.values()):
                session.execute(delete(WishRow).filter_by(url=url, bypass=on))


def _keep(session: Session, url: str, *, on: bool) -> None:
    """In one statement: others may keep or drop the wish for this address at the same time."""
    renew(session, WishRow, [{"url": url, "bypass": on}])


def _write_stores(session: Session, snapshots: Sequence[Snapshot]) -> dict[str, datetime | None]:
    """Write the state of each; returns until when the windows of already known stores are summed up."""
    names = [snapshot.store for snapshot in snapshots]
    columns = (StoreRow.name, StoreRow.summed_until, StoreRow.candidates)
    known = {row.name: row for row in session.execute(select(*columns).where(StoreRow.name.in_(names)))}
    bypassed = session.get(WishRow, FLEET)
    served = _served_again(session, snapshots) if bypassed else {}
    new, old = list[dict[str, Any]](), list[dict[str, Any]]()
    for one in snapshots:
        row = known.get(one.store)
        remote = (window for window in one.windows if window.tier == "remote")
        state = {"name": one.store, "last_seen": one.at, **{name: getattr(one, name) for name in _STATE}}
        state["candidates"] = candidates((row and row.candidates) or (), remote)
        if row:
            old.append(state)
        else:  # the tuning of one seen for the first time is taken as intended
            new.append({**state, "first_seen": one.at, "expected": one.tuning, "expected_at": one.at})
    here = [snapshot.url for snapshot in snapshots if not snapshot.observed]  # several sources may share one
    moved = select(StoreRow.name, StoreRow.url).where(StoreRow.url.in_(here), StoreRow.name.not_in(names))
    former = {row.name: row.url for row in session.execute(moved)}
    old += [{"name": name, "url": NOWHERE} for name in former]
    old.sort(key=itemgetter("name"))  # all who write several lock them in this order
    for statement, rows in ((insert(StoreRow), new), (update(StoreRow), old)):
        if rows:
            session.execute(statement, rows)
    if bypassed:
        _hold_or_lift(session, [one.store for one in snapshots if not (one.observed or one.store in known)], served)
    if former:  # their rows are locked by now: what was wished of them meanwhile is read here
        left = session.scalars(select(StoreRow).where(StoreRow.name.in_(former))).all()
        for gone in sorted(left, key=lambda row: former[row.name]):  # all lock wishes by address, after stores
            if gone.pending_bypass is not None:  # whoever answers there now must hear it
                _keep(session, former[gone.name], on=gone.pending_bypass)
                gone.pending_bypass = None
    return {name: row.summed_until for name, row in known.items()}


def _served_again(session: Session, snapshots: Sequence[Snapshot]) -> dict[str, bool]:
    """Stores that were bypassed when they last answered, and are not any more; whether somebody lifted that there.

    Lifting it makes a later version; a store that lost its state begins with the first one.
    """
    found = {one.store: one.tuning for one in snapshots if one.tuning.get("bypass") is False}
    known = session.execute(select(StoreRow.name, StoreRow.tuning).where(StoreRow.name.in_(found)))
    return {name: found[name].get("version", 0) > was.get("version", 0) for name, was in known if was.get("bypass")}


def _hold_or_lift(session: Session, new: Sequence[str], served: Mapping[str, bool]) -> None:
    """All were bypassed: new ones hear it, and who lost its state; lifted by hand, it holds for no new one."""
    hear = [*new, *(name for name, lifted in served.items() if not lifted)]
    if session.scalar(select(WishRow.url).filter_by(url=FLEET).with_for_update()):  # not lifted meanwhile, nor now
        altered(session, update(StoreRow).where(StoreRow.name.in_(hear)).values(pending_bypass=True))
    if any(served.values()):
        altered(session, delete(WishRow).filter_by(url=FLEET))
