"""Puts the windows of an hour into one row per tier and pool, and the hours of a day into one when they are old.

So nobody has to read days of windows, and a year of many stores takes little room.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Mapped, Session

from tiertune_agent.collector.counters import is_gauge
from tiertune_agent.history.ledger import fold_ledger
from tiertune_agent.history.models import HourRow, LedgerRow, StoreRow, WindowRow
from tiertune_agent.history.rows import hour_row, window_of
from tiertune_agent.records import Histogram, Value, Window, Windows
from tiertune_agent.verdicts.ledger import hour_of

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
NEVER = datetime(1, 1, 1, tzinfo=UTC)
LATE = timedelta(minutes=5)
"""How long an hour stays open after its end: a window is known only when it is over."""


def sum_up(session: Session, store: StoreRow, now: datetime) -> bool:
    """Write the rows of the store's next hour that has windows; False, and no change, if none is over."""
    first = _first(session, WindowRow.start, store, store.summed_until)
    if first is None or not over(first, now):
        return False
    hour = hour_of(first)
    session.add_all(_wholes(_within(session, WindowRow, store, hour, hour + HOUR), hour))
    store.summed_until = hour + HOUR
    return True


def add_late(session: Session, windows: Iterable[Window]) -> None:
    """Add windows to hours that are summed up already: those of a store that comes back began when last seen."""
    for window in windows:
        hour = hour_of(window.start)
        place = select(HourRow).filter_by(store=window.store, tier=window.tier, namespace=window.namespace)
        parts = session.scalars(place.filter_by(start=hour)).all()
        session.add(hour_row(summed([*map(window_of, parts), window], hour)))
        for part in parts:
            session.delete(part)


def fold(session: Session, store: StoreRow, before: datetime) -> bool:
    """Fold the store's next day that ended by ``before`` into rows of that day, of windows and of the ledger.

    False, and no change, if none is left. A day's row is that of its first hour, but covers more seconds.
    """
    firsts = [_first(session, start, store, store.folded_until) for start in (HourRow.start, LedgerRow.hour)]
    day = min((first for first in firsts if first), default=before).replace(hour=0)
    if day + DAY > before:
        return False
    rows = _within(session, HourRow, store, day, day + DAY)
    session.add_all(_wholes(rows, day))
    for row in rows:
        session.delete(row)
    fold_ledger(session, store.name, day, day + DAY)
    store.folded_until = day + DAY
    return True


def _first(session: Session, start: Mapped[datetime], store: StoreRow, since: datetime | None) -> datetime | None:
    """The store's first ``start``, a column, from ``since`` on; None: there is none."""
    query = select(start).filter_by(store=store.name).where(start >= (since or NEVER))
    return session.scalar(query.order_by(start).limit(1))


def _within(
    session: Session, kind: type[WindowRow | HourRow], store: StoreRow, start: datetime, end: datetime
) -> Sequence[Any]:
    """The store's rows of this time, by tier and pool."""
    query = select(kind).filter_by(store=store.name).where(kind.start >= start, kind.start < end)
    return session.scalars(query.order_by(kind.tier, kind.namespace, kind.start)).all()


def _wholes(rows: Iterable[WindowRow | HourRow], start: datetime) -> Iterator[HourRow]:
    """Rows by tier and pool, those of each as one that began at ``start``."""
    for _, group in groupby(rows, key=attrgetter("tier", "namespace")):
        yield hour_row(summed([window_of(row) for row in group], start))


def hourly(windows: Iterable[Window]) -> list[Window]:
    """Windows of one tier or pool, oldest first, summed by hour."""
    return [summed(list(group), start) for start, group in groupby(windows, key=lambda window: hour_of(window.start))]


def over(start: datetime, now: datetime) -> bool:
    """Whether the hour of a window that began then may be summed up, or is already."""
    return hour_of(start) + HOUR + LATE <= now


def summed(windows: Windows, start: datetime) -> Window:
    """Windows of one tier or pool as one that began at ``start``: counters add up, gauges are means over the seconds.

    So one of them may itself be the sum of many; a gauge known only in part of it weighs as if known in all.
    """
    told: dict[str, list[tuple[Value, float]]] = {}
    for window in windows:
        for name, value in window.values.items():
            told.setdefault(name, []).append((value, window.seconds))
    values = {name: _sum(name, found) for name, found in told.items()}
    return replace(windows[-1], start=start, seconds=sum(window.seconds for window in windows), values=values)


def _sum(name: str, told: Sequence[tuple[Value, float]]) -> Value:
    """Sum or mean of one series; each value comes with the seconds of its window."""
    if histograms := [value for value, _ in told if isinstance(value, Histogram)]:
        return Histogram.added(histograms)
    numbers = [value for value, _ in told if not isinstance(value, Histogram)]
    if not is_gauge(name.partition("{")[0]):
        return sum(numbers)
    first = numbers[0]  # so the mean of equal values is the same to the bit
    return first + fmean([value - first for value in numbers], [seconds for _, seconds in told])
