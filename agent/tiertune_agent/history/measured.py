"""What was measured, a stretch of time at a time: windows, prospects, the ledger; summed up, folded and pruned."""

from collections.abc import Collection, Iterable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import delete, func, select

from tiertune_agent.history.models import (
    WITH_CANDIDATES,
    HourRow,
    LedgerRow,
    ProspectRow,
    StageWindowRow,
    StoreRow,
    WindowRow,
)
from tiertune_agent.history.rollup import fold, hourly, sum_up
from tiertune_agent.history.rows import WINDOW_COLUMNS, window_of
from tiertune_agent.history.sessions import Sessions
from tiertune_agent.records import Prospect, StageWindow, Window

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


class Measured:
    """Transactions as of `History`, through which windows come in; ``sum_up``, ``fold`` and ``prune`` take several."""

    def __init__(self, session: Sessions) -> None:
        self._session = session

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

    def pool_windows(self, store: str, since: datetime, *, tier: str, namespace: str) -> list[Window]:
        """As ``windows_since``, of one pool with its ghosts: these are counted with its tier, or with none."""
        found = [self.windows_since(store, since, tier=place, namespace=namespace) for place in (tier, "")]
        return sorted(chain(*found), key=lambda window: window.start)

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

    def candidate_windows(self, store: str, tier: str) -> list[Window]:
        """The last ones in which requests found chunks in the tier, oldest first."""
        query = select(WindowRow).where(WindowRow.store == store, WindowRow.tier == tier, WITH_CANDIDATES)
        return self._windows(query.order_by(WindowRow.start.desc()).limit(KEPT_CANDIDATE_WINDOWS))

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


_LEDGER_FIELDS = (
    *("store", "namespace", "tier", "seconds", "saved", "lost", "bytes", "transferred", "money"),
    *("measured", "measured_low", "measured_high"),
)


def _rows(result: object) -> int:
    return int(getattr(result, "rowcount", 0))


def _of_place(row: type[WindowRow | HourRow], store: str, tier: str, namespace: str, since: datetime) -> Any:  # noqa: ANN401 (a Select)
    """Newest first."""
    place = (row.store == store, row.tier == tier, row.namespace == namespace)
    return select(row).where(*place, row.start >= since).order_by(row.start.desc())
