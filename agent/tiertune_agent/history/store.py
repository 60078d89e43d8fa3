"""Everything but decisions: stores, windows, prospects, ledger, incidents, freezes, policies, audit."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, select, update

from tiertune_agent.history.decisions import Decisions
from tiertune_agent.history.models import (
    WITH_CANDIDATES,
    AuditRow,
    FreezeRow,
    HourRow,
    IncidentRow,
    LedgerRow,
    PolicyRevisionRow,
    ProspectRow,
    StageWindowRow,
    StoreRow,
    WindowRow,
    cut,
)
from tiertune_agent.history.remembering import remember
from tiertune_agent.history.rollup import fold, hourly, sum_up
from tiertune_agent.history.rows import WINDOW_COLUMNS, window_of
from tiertune_agent.history.sessions import Sessions
from tiertune_agent.records import (
    FLEET,
    Expectation,
    Freeze,
    Prospect,
    Rates,
    Snapshot,
    StageWindow,
    StoreRecord,
    Window,
)

KEPT_CANDIDATE_WINDOWS = 20
"""Per store; never pruned: while fetch is off, the last ones tell what a typical candidate is."""

IN_DETAIL = timedelta(days=1)
"""Of a longer time, hours are read where windows were summed up."""
MOST_OF_TIER = 240
"""Windows that a tuner of one tier looks through: an hour of 15 s."""
MOST_WINDOWS = 6000
"""Read of one tier or pool at a time: about a day of them."""
HOURS_AT_ONCE = 200
"""Summed up by one call, of all stores: the catching up of a history takes several."""
DAYS_AT_ONCE = 400
"""Folded by one call."""
FORTNIGHT, YEAR = timedelta(days=14), timedelta(days=366)
_NEVER = datetime(1, 1, 1, tzinfo=UTC)


class History:
    """Every method is one transaction: whole, or rolled back. DatabaseError where the database is away."""

    def __init__(self, engine: Engine, fence: Callable[[Connection], None] = lambda _: None) -> None:
        """``fence`` is called in every transaction before its first write; it may raise."""
        self._engine = engine
        self._session = Sessions(engine, fence)
        self.decisions = Decisions(self._session)

    def close(self) -> None:
        self._engine.dispose()

    # Stores and windows

    def remember(self, snapshot: Snapshot, rates: Rates) -> None:
        """The store's state, its windows, and their entries in the ledger."""
        self.remember_all([(snapshot, rates)])

    def remember_all(self, told: Sequence[tuple[Snapshot, Rates]]) -> None:
        """Of different stores: all of it, or nothing."""
        if told:
            with self._session() as session:
                remember(session, told)

    def expectations(self, stores: Iterable[str]) -> dict[str, Expectation]:
        """What tuning is expected of stores that were seen, but for later decisions."""
        names = {cut(store): store for store in stores}
        columns = (StoreRow.name, StoreRow.expected, StoreRow.expected_at, StoreRow.differs_since)
        with self._session() as session:
            for row in session.scalars(select(StoreRow).where(StoreRow.expected_at.is_(None))):
                row.expected, row.expected_at = row.tuning, row.last_seen  # of an earlier version
            found = session.execute(select(*columns).where(StoreRow.name.in_(names))).all()
        return {names[name]: Expectation(dict(tuning), since, differs) for name, tuning, since, differs in found}

    def expect(self, expectations: Mapping[str, Expectation]) -> None:
        """From now on this is expected of these stores."""
        rows = [
            {"name": cut(store), "expected": dict(one.tuning), "expected_at": one.since, "differs_since": one.differs}
            for store, one in expectations.items()
        ]
        if rows:
            with self._session() as session:
                session.execute(update(StoreRow), rows)

    def stores(self) -> list[StoreRecord]:
        with self._session() as session:
            rows = session.scalars(select(StoreRow).where(StoreRow.name != FLEET).order_by(StoreRow.name))
            return [_store(row) for row in rows]

    def store(self, name: str) -> StoreRecord | None:
        """One by its name; ``fleet`` is the remote that is managed."""
        with self._session() as session:
            row = session.get(StoreRow, name)
            return _store(row) if row else None

    def forget(self, store: str) -> None:
        """What is remembered of it, but for decisions; its incidents are over."""
        with self._session() as session:
            session.execute(delete(StoreRow).where(StoreRow.name == store))
            session.execute(
                update(IncidentRow)
                .where(IncidentRow.store == store, IncidentRow.closed_at.is_(None))
                .values(closed_at=IncidentRow.last_seen)
            )

    def wish_bypass(self, store: str, *, on: bool) -> None:
        """Remember what the store has not acknowledged yet."""
        with self._session() as session:
            session.get_one(StoreRow, store).pending_bypass = on

    def acknowledge_bypass(self, store: str, *, on: bool) -> None:
        """The store has it, as its next answer will say."""
        with self._session() as session:
            row = session.get_one(StoreRow, store)
            row.pending_bypass, row.tuning = None, {**row.tuning, "bypass": on}

    def windows(
        self, store: str, *, tier: str, namespace: str = "", limit: int = MOST_OF_TIER, histograms: bool = True
    ) -> list[Window]:
        """The last ones of one tier or pool, oldest first."""
        query = select(WindowRow).where(
            WindowRow.store == store, WindowRow.tier == tier, WindowRow.namespace == namespace
        )
        return self._windows(query.order_by(WindowRow.start.desc()).limit(limit), histograms=histograms)

    def store_windows(self, store: str, since: datetime) -> list[Window]:
        """As ``fleet_windows``, of one store."""
        return self.fleet_windows([store], since)

    def fleet_windows(self, stores: Collection[str], since: datetime) -> list[Window]:
        """All tiers and pools of these stores, oldest first."""
        query = select(WindowRow).where(WindowRow.store.in_(stores), WindowRow.start >= since)
        return self._windows(query.order_by(WindowRow.start.desc()))

    def windows_since(self, store: str, since: datetime, *, tier: str, namespace: str = "") -> list[Window]:
        """All of one tier or pool, oldest first; of more than a day in hours, where they are summed up.

        Never more than a day of windows is read: where hours are not summed up yet, the oldest are left out.
        """
        with self._session() as session:
            row = session.get(StoreRow, store)
            until = row.summed_until if row else None
        if until is None or until - since <= IN_DETAIL:
            return self._windows(_of_place(WindowRow, store, tier, namespace, since).limit(MOST_WINDOWS))
        return [
            *self._windows(_of_place(HourRow, store, tier, namespace, since)),
            *hourly(self._windows(_of_place(WindowRow, store, tier, namespace, until).limit(MOST_WINDOWS))),
        ]

    def sum_up(self, now: datetime) -> int:
        """Sum up hours of windows that are over, the stores longest behind first; returns how many hours."""
        with self._session() as session:
            stores = session.scalars(select(StoreRow.name).order_by(func.coalesce(StoreRow.summed_until, _NEVER))).all()
        done = 0
        for store in stores:
            while done < HOURS_AT_ONCE and self._sum_up(store, now):
                done += 1
        return done

    def _sum_up(self, store: str, now: datetime) -> bool:
        with self._session() as session:
            row = session.get(StoreRow, store)
            return row is not None and sum_up(session, row, now)

    def candidate_windows(self, store: str, tier: str, limit: int = KEPT_CANDIDATE_WINDOWS) -> list[Window]:
        """The last ones in which requests found chunks in the tier, oldest first."""
        query = select(WindowRow).where(WindowRow.store == store, WindowRow.tier == tier, WITH_CANDIDATES)
        return self._windows(query.order_by(WindowRow.start.desc()).limit(limit))

    def _windows(self, query: Any, *, histograms: bool = True) -> list[Window]:  # noqa: ANN401 (a Select)
        """Of windows or hours that are asked for newest first."""
        columns = [getattr(query.column_descriptions[0]["entity"], name) for name in WINDOW_COLUMNS]
        with self._session() as session:
            found = session.execute(query.with_only_columns(*columns))
            return [window_of(row, histograms=histograms) for row in found][::-1]

    def stage_windows(self, since: datetime) -> list[StageWindow]:
        """Of all stores, oldest first."""
        query = select(StageWindowRow).where(StageWindowRow.start >= since).order_by(StageWindowRow.start)
        names = [field.name for field in fields(StageWindow)]
        with self._session() as session:
            return [StageWindow(**{name: getattr(row, name) for name in names}) for row in session.scalars(query)]

    def remember_prospects(self, prospects: Iterable[Prospect]) -> None:
        with self._session() as session:
            session.add_all(ProspectRow(**{**vars(each), "costs": dict(each.costs)}) for each in prospects)

    def prospects(self, namespace: str, since: datetime) -> list[Prospect]:
        """Of one namespace (empty: of all), oldest first."""
        query = select(ProspectRow).where(ProspectRow.start >= since).order_by(ProspectRow.start, ProspectRow.id)
        if namespace:
            query = query.where(ProspectRow.namespace == namespace)
        with self._session() as session:
            return [
                Prospect(row.namespace, row.start, row.seconds, row.requests, row.costs)
                for row in session.scalars(query)
            ]

    def ledger(self, since: datetime) -> list[dict[str, Any]]:
        """By hour, store, namespace and tier; what is more than a fortnight old by day."""
        columns = [getattr(LedgerRow, name) for name in ("hour", *_LEDGER_FIELDS)]
        query = select(*columns).where(LedgerRow.hour >= since).order_by(LedgerRow.hour, LedgerRow.store)
        found: list[dict[str, Any]] = []
        with self._session() as session:
            for hour, rows in groupby(session.execute(query), key=itemgetter(0)):
                told = hour.isoformat()
                found += [{"hour": told, **dict(zip(_LEDGER_FIELDS, row[1:], strict=True))} for row in rows]
        return found

    def account(self, since: datetime) -> dict[str, dict[str, float]]:
        """Seconds saved and lost, and money, by tier."""
        sums = [func.sum(getattr(LedgerRow, name)).label(name) for name in ("saved", "lost", "money")]
        query = select(LedgerRow.tier, *sums).where(LedgerRow.hour >= since).group_by(LedgerRow.tier)
        with self._session() as session:
            return {
                row.tier: {"saved": row.saved, "lost": row.lost, "money": row.money} for row in session.execute(query)
            }

    def prune(self, now: datetime, keep: timedelta) -> int:
        """Drop windows older than ``keep``, prospects of more than a fortnight, hours and days of more than a year.

        The last windows with candidates of a store stay. Returns how many rows went; a transaction holds one store's.
        """
        dropped, fortnight = 0, now - max(keep, FORTNIGHT)
        for store in self._names():
            with self._session() as session:
                mine = (WindowRow.store == store, WindowRow.start < now - keep)
                last = select(WindowRow.id).where(WindowRow.store == store, WITH_CANDIDATES)
                kept = session.scalars(last.order_by(WindowRow.start.desc()).limit(KEPT_CANDIDATE_WINDOWS)).all()
                dropped += _rows(session.execute(delete(WindowRow).where(*mine, WindowRow.id.not_in(kept))))
        with self._session() as session:
            for row, before in (
                (StageWindowRow, now - keep),
                (ProspectRow, fortnight),
                (HourRow, now - max(keep, YEAR)),
            ):
                dropped += _rows(session.execute(delete(row).where(row.start < before)))
        return dropped

    def fold(self, now: datetime) -> int:
        """Sum hours of more than a fortnight ago up into days, of windows and of the ledger; returns how many days."""
        before, done = (now - FORTNIGHT).replace(hour=0, minute=0, second=0, microsecond=0), 0
        for store in self._names():
            while done < DAYS_AT_ONCE:
                with self._session() as session:
                    row = session.get(StoreRow, store)
                    if row is None or not fold(session, row, before):
                        break
                done += 1
        return done

    def _names(self) -> list[str]:
        """Of all stores, also of former ones."""
        with self._session() as session:
            return list(session.scalars(select(StoreRow.name).order_by(StoreRow.name)))

    # Incidents, freezes, policies, audit

    def open_incident(self, kind: str, store: str, message: str, now: datetime) -> bool:
        """Open one, or renew the open one of the kind; True if it is new."""
        with self._session() as session:
            same = (IncidentRow.kind == kind, IncidentRow.store == store, IncidentRow.closed_at.is_(None))
            row = session.scalars(select(IncidentRow).where(*same)).first()
            if row is None:
                session.add(IncidentRow(kind=kind, store=store, message=message, opened_at=now, last_seen=now))
                return True
            row.message, row.last_seen = message, now
            return False

    def tell_incidents(self, told: Mapping[tuple[str, str], str], now: datetime) -> None:
        """By kind and store: open an incident with the message, or renew the open one; empty: close it."""
        messages = {(cut(kind), cut(store)): message for (kind, store), message in told.items()}
        query = select(IncidentRow).where(
            IncidentRow.kind.in_({kind for kind, _ in messages}), IncidentRow.closed_at.is_(None)
        )
        with self._session() as session:
            here = {(row.kind, row.store): row for row in session.scalars(query)}
            for (kind, store), message in messages.items():
                row = here.get((kind, store))
                if row is None and message:
                    session.add(IncidentRow(kind=kind, store=store, message=message, opened_at=now, last_seen=now))
                elif row is not None and message:
                    row.message, row.last_seen = message, now
                elif row is not None:
                    row.closed_at = now

    def close_incidents(self, kinds: Collection[str], stores: Collection[str], now: datetime) -> None:
        with self._session() as session:
            session.execute(
                update(IncidentRow)
                .where(IncidentRow.kind.in_(kinds), IncidentRow.store.in_(stores), IncidentRow.closed_at.is_(None))
                .values(closed_at=now)
            )

    def incidents(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """Open ones first, then newest first."""
        query = select(IncidentRow).order_by(IncidentRow.closed_at.is_not(None), IncidentRow.id.desc()).limit(limit)
        with self._session() as session:
            return [
                {
                    "id": row.id,
                    "kind": row.kind,
                    "store": row.store,
                    "message": row.message,
                    "opened_at": row.opened_at.isoformat(),
                    "last_seen": row.last_seen.isoformat(),
                    "closed_at": row.closed_at.isoformat() if row.closed_at else None,
                }
                for row in session.scalars(query)
            ]

    def open_incidents(self) -> dict[str, int]:
        """How many are open, by kind; 0 for kinds that were."""
        query = select(IncidentRow.kind, func.count(), func.count(IncidentRow.closed_at)).group_by(IncidentRow.kind)
        with self._session() as session:
            return {kind: int(every) - int(closed) for kind, every, closed in session.execute(query)}

    def freeze(self, reason: str, who: str, now: datetime, until: datetime | None) -> None:
        with self._session() as session:
            session.add(FreezeRow(reason=reason, who=who, start=now, until=until))

    def unfreeze(self, now: datetime) -> int:
        """Lift every freeze in force; returns how many."""
        with self._session() as session:
            rows = session.scalars(_in_force(now)).all()
            for row in rows:
                row.lifted_at = now
            return len(rows)

    def frozen(self, now: datetime) -> Freeze | None:
        """The freeze in force that lasts longest."""
        with self._session() as session:
            rows = session.scalars(_in_force(now)).all()
            row = max(rows, key=lambda row: (row.until is None, row.until or now, row.id), default=None)
            return Freeze(row.id, row.reason, row.who, row.start, row.until) if row else None

    def policy_revision(self, digest: str, source: str, text: str, now: datetime) -> int:
        """The number of this policy: the newest revision's, or that of a new row if it is another text."""
        with self._session() as session:
            row = session.scalars(select(PolicyRevisionRow).order_by(PolicyRevisionRow.id.desc()).limit(1)).first()
            if row is None or row.digest != digest or row.source != source:
                row = PolicyRevisionRow(digest=digest, source=source, text=text, loaded_at=now)
                session.add(row)
                session.flush()
            return row.id

    def policy_revisions(self, limit: int = 20) -> list[dict[str, Any]]:
        query = select(PolicyRevisionRow).order_by(PolicyRevisionRow.id.desc()).limit(limit)
        with self._session() as session:
            return [
                {
                    "id": row.id,
                    "digest": row.digest,
                    "source": row.source,
                    "text": row.text,
                    "loaded_at": row.loaded_at.isoformat(),
                }
                for row in session.scalars(query)
            ]

    def audit(self, who: str, source: str, what: str, detail: Mapping[str, Any], now: datetime) -> None:
        with self._session() as session:
            session.add(AuditRow(at=now, who=who, source=source, what=what, detail=dict(detail)))

    def audited(self, limit: int = 100) -> list[dict[str, Any]]:
        """Newest first."""
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
        with self._session() as session:
            return [
                {"at": row.at.isoformat(), "who": row.who, "from": row.source, "what": row.what, "detail": row.detail}
                for row in session.scalars(query)
            ]


_LEDGER_FIELDS = (
    *("store", "namespace", "tier", "seconds", "saved", "lost", "bytes", "transferred", "money"),
    *("measured", "measured_low", "measured_high"),
)
_STORE_FIELDS = tuple(StoreRecord.__dataclass_fields__)


def _store(row: StoreRow) -> StoreRecord:
    return StoreRecord(**{name: getattr(row, name) for name in _STORE_FIELDS})


def _rows(result: object) -> int:
    return int(getattr(result, "rowcount", 0))


def _in_force(now: datetime) -> Any:  # noqa: ANN401 (a Select)
    ends = FreezeRow.until.is_(None) | (FreezeRow.until > now)
    return select(FreezeRow).where(FreezeRow.lifted_at.is_(None), FreezeRow.start <= now, ends)


def _of_place(row: type[WindowRow | HourRow], store: str, tier: str, namespace: str, since: datetime) -> Any:  # noqa: ANN401 (a Select)
    """Newest first."""
    place = (row.store == store, row.tier == tier, row.namespace == namespace)
    return select(row).where(*place, row.start >= since).order_by(row.start.desc())
