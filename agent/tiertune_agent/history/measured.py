"""What was measured over stretches of time: windows and prospects."""

from collections.abc import Collection, Iterable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

from sqlalchemy import ColumnExpressionArgument, Select, select

from tiertune_agent.history.models import HourRow, ProspectRow, StageWindowRow, StoreRow, WindowRow
from tiertune_agent.history.rollup import hourly
from tiertune_agent.history.rows import WINDOW_COLUMNS, window_of
from tiertune_agent.history.sessions import OfHistory
from tiertune_agent.records import Prospect, StageWindow, Window
from tiertune_agent.tuners.base import MOST_OF_TIER, TypicalCandidate
from tiertune_agent.tuners.remote_fetch import typical_candidate
from tiertune_agent.verdicts.ledger import hour_of

IN_DETAIL = timedelta(days=1)
"""For a longer time, hours are read instead of windows that were summed up."""
MOST_WINDOWS = 6000
"""Windows read of one tier or pool at a time, about a day of them."""
LAST = datetime.max.replace(tzinfo=UTC)
"""Later than any window."""


class Measured(OfHistory):
    """Windows come in through `History`."""

    def windows(self, store: str, *, tier: str) -> list[Window]:
        """The last windows of a whole tier, oldest first, without histograms."""
        return self._windows(_of_place(WindowRow, store, tier, "").limit(MOST_OF_TIER), histograms=False)

    def fleet_windows(self, stores: Collection[str], since: datetime, until: datetime = LAST) -> list[Window]:
        """Windows of all tiers and pools of these stores that began by ``until``, oldest first."""
        return self._windows(_read(WindowRow, WindowRow.store.in_(stores), WindowRow.start.between(since, until)))

    def prompts(self, store: str, pools: Collection[str], since: datetime, until: datetime) -> list[Window]:
        """Windows of these pools that count their prompts, which no tier does, oldest first, without histograms."""
        which = WindowRow.namespace.in_(pools), WindowRow.start.between(since, until)
        return self._windows(_read(WindowRow, *which).filter_by(store=store, tier=""), histograms=False)

    def windows_since(
        self, store: str, since: datetime, until: datetime = LAST, *, tier: str, namespace: str = ""
    ) -> list[Window]:
        """Windows of one tier or pool that began by ``until``, oldest first; over more than a day, hours if summed up.

        At most about a day of windows is read. Before the first that is left, less than a day is told in hours, too.
        """
        with self._session() as session:
            row = session.get(StoreRow, store)
            summed = row.summed_until if row else None
        short = summed is None or min(summed, until) - since <= IN_DETAIL
        windows = _of_place(WindowRow, store, tier, namespace).where(WindowRow.start <= until).limit(MOST_WINDOWS)
        found = self._windows(windows.where(WindowRow.start >= (since if short else summed)))
        before = hour_of(found[0].start) if found else until
        told = found if short else hourly(found)
        if before <= since:  # nothing is missing: mostly so
            return told
        hours = _of_place(HourRow, store, tier, namespace).where(HourRow.start >= since, HourRow.start < before)
        return [*self._windows(hours), *told]

    def pool_windows(self, store: str, since: datetime, until: datetime, *, tier: str, namespace: str) -> list[Window]:
        """``windows_since`` of one pool with its ghosts, which are counted with its tier, or with none."""
        found = [self.windows_since(store, since, until, tier=place, namespace=namespace) for place in (tier, "")]
        return sorted(chain(*found), key=lambda window: window.start)

    def typical(self, stores: Collection[str]) -> dict[str, TypicalCandidate | None]:
        """By store, what a typical candidate of the remote was when there last were any, however long ago."""
        rows = self._rows(select(StoreRow.name, StoreRow.candidates).where(StoreRow.name.in_(stores)))
        return {row.name: typical_candidate(row.candidates or ()) for row in rows}

    def _windows(self, query: Select[Any], *, histograms: bool = True) -> list[Window]:
        """Windows of a query from ``_read``, oldest first."""
        with self._session() as session:
            return [window_of(row, histograms=histograms) for row in session.execute(query)][::-1]

    def stage_windows(self, since: datetime, until: datetime) -> list[StageWindow]:
        """Stage windows of all stores, oldest first."""
        query = select(StageWindowRow).where(StageWindowRow.start.between(since, until)).order_by(StageWindowRow.start)
        names = [field.name for field in fields(StageWindow)]
        return [StageWindow(**{name: getattr(row, name) for name in names}) for row in self._all(query)]

    def remember_prospects(self, prospects: Iterable[Prospect]) -> None:
        with self._session() as session:
            session.add_all(ProspectRow(**vars(each)) for each in prospects)

    def prospects(self, namespace: str, since: datetime, until: datetime = LAST) -> list[Prospect]:
        """Prospects of one namespace (empty: all), oldest first."""
        begun = ProspectRow.start.between(since, until)
        query = select(ProspectRow).where(begun).order_by(ProspectRow.start, ProspectRow.id)
        if namespace:
            query = query.filter_by(namespace=namespace)
        return [Prospect(row.namespace, row.start, row.seconds, row.requests, row.costs) for row in self._all(query)]


def _of_place(row: type[WindowRow | HourRow], store: str, tier: str, namespace: str) -> Select[Any]:
    """Query of one tier or pool, newest first."""
    return _read(row).filter_by(store=store, tier=tier, namespace=namespace)


def _read(row: type[WindowRow | HourRow], *which: ColumnExpressionArgument[bool]) -> Select[Any]:
    """Query of windows or hours, newest first."""
    return select(*(getattr(row, name) for name in WINDOW_COLUMNS)).where(*which).order_by(row.start.desc())
