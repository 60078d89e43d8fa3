"""Ages what was measured: sums windows up into hours, folds hours into days, drops what is old."""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, ColumnExpressionArgument, delete, func, select
from sqlalchemy.orm import Session

from tiertune_agent.history.models import AnswerRow, HourRow, ProspectRow, StageWindowRow, StoreRow, WindowRow
from tiertune_agent.history.rollup import LATE, NEVER, fold, sum_up
from tiertune_agent.history.sessions import OfHistory
from tiertune_agent.records import FLEET
from tiertune_agent.verdicts.ledger import hour_of

HOURS_AT_ONCE = 200
"""Hours summed up by one call, over all stores: catching up takes several calls."""
DAYS_AT_ONCE = 400
"""Days folded by one call."""
FORTNIGHT, YEAR = timedelta(days=14), timedelta(days=366)
AT_ONCE = timedelta(hours=6)
"""Time whose windows one statement drops: weeks of them take longer than it may, and nothing else is written then."""


class Retention(OfHistory):
    """Every method takes several transactions, each for an hour, a day or the windows of a store.

    One statement first tells for which stores there is something to do: of many remembered names there is nothing.
    """

    def sum_up(self, now: datetime) -> int:
        """Sum up windows of hours that are over, stores furthest behind first; returns how many hours."""
        since = func.coalesce(StoreRow.summed_until, NEVER)
        due = _any(WindowRow, WindowRow.start >= since, WindowRow.start < hour_of(now - LATE))
        return self._repeat(sum_up, now, self._stores(since, due), HOURS_AT_ONCE)

    def fold(self, now: datetime) -> int:
        """Fold hours over a fortnight old into days, of windows and the ledger; returns how many days."""
        before, since = _midnight(now - FORTNIGHT), func.coalesce(StoreRow.folded_until, NEVER)
        old = (StoreRow.first_seen < before) | _any(HourRow, HourRow.start < before)  # of a clock that was set back
        stores = self._stores(StoreRow.name, since < before, since <= StoreRow.last_seen, old)
        return self._repeat(fold, before, stores, DAYS_AT_ONCE)

    def forget(self, now: datetime, keep: timedelta, named: Collection[str]) -> None:
        """Drop stores at no address of ``named`` that were not seen for a fortnight, or ``keep`` if that is longer.

        So names that never come again do not pile up. Of what they counted, the ledger by the day stays.
        """
        before = _midnight(now - max(keep, FORTNIGHT))
        former = (StoreRow.name != FLEET, StoreRow.last_seen < before, StoreRow.url.not_in(named))
        for store in self._stores(StoreRow.name, *former):
            with self._session.summing, self._session() as session:
                still = select(StoreRow).filter_by(name=store).where(*former).with_for_update()
                if (row := session.scalar(still)) is None:
                    continue  # it came back meanwhile
                while fold(session, row, before):
                    pass
                for kind in (WindowRow, HourRow, StageWindowRow):
                    session.execute(delete(kind).filter_by(store=store))
                session.delete(row)

    def prune(self, now: datetime, keep: timedelta) -> None:
        """Drop windows older than ``keep``, prospects older than a fortnight, hours and days older than a year.

        Windows not summed up yet stay. Answers go after a fortnight: they are about what no longer exists.
        """
        year, fortnight = now - max(keep, YEAR), now - max(keep, FORTNIGHT)
        for kind, before in ((WindowRow, now - keep), (StageWindowRow, now - keep), (HourRow, year)):
            summed = (WindowRow.start < StoreRow.summed_until,) if kind is WindowRow else ()
            for store in self._stores(StoreRow.name, _any(kind, kind.start < before, *summed)):
                with self._session() as session:
                    until = session.get_one(StoreRow, store).summed_until if summed else None
                self._shed(kind, store, min(before, until or before))
        with self._session() as session:
            session.execute(delete(ProspectRow).where(ProspectRow.start < fortnight))
            session.execute(delete(AnswerRow).where(AnswerRow.at < fortnight))

    def _shed(self, kind: type[WindowRow | StageWindowRow | HourRow], store: str, before: datetime) -> None:
        """Drop the store's rows that began before that time, the oldest first."""
        old = kind.store == store, kind.start < before
        while True:
            with self._session() as session:
                first = session.scalar(select(kind.start).where(*old).order_by(kind.start).limit(1))
                if first is None:
                    return
                session.execute(delete(kind).where(*old, kind.start < first + AT_ONCE))

    def _repeat(
        self, step: Callable[[Session, StoreRow, datetime], bool], until: datetime, stores: Sequence[str], most: int
    ) -> int:
        """Repeat ``step`` for each store while there is something to do; returns how often."""
        done = 0
        for store in stores:
            while done < most:
                with self._session.summing, self._session() as session:
                    row = session.get(StoreRow, store)
                    if row is None or not step(session, row, until):
                        break
                done += 1
        return done

    def _stores(self, order: Any, *which: ColumnExpressionArgument[bool]) -> Sequence[str]:  # noqa: ANN401 (a column)
        """Names of stores, including former ones."""
        return self._all(select(StoreRow.name).where(*which).order_by(order))


def _any(
    kind: type[WindowRow | StageWindowRow | HourRow], *which: ColumnExpressionArgument[bool]
) -> ColumnElement[bool]:
    """Whether the store of the enclosing query has such a row. No EXISTS: PostgreSQL may read a whole table for it."""
    return select(kind.id).where(kind.store == StoreRow.name, *which).limit(1).scalar_subquery().is_not(None)


def _midnight(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)
