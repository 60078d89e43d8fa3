"""Puts the windows of an hour into one row per tier and pool, and the hours of a day into one when they are old.

So nobody has to read days of windows, and a year of many stores takes little room.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from statistics import fmean

from sqlalchemy import select
from sqlalchemy.orm import Session

from tiertune_agent.collector.counters import is_gauge
from tiertune_agent.history.ledger import fold_ledger
from tiertune_agent.history.models import HourRow, LedgerRow, StoreRow, WindowRow
from tiertune_agent.history.rows import hour_row, window_of
from tiertune_agent.records import Histogram, Value, Window, Windows, sum_of
from tiertune_agent.verdicts.ledger import hour_of

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
NEVER = datetime(1, 1, 1, tzinfo=UTC)
LATE = timedelta(minutes=5)
"""How long an hour stays open after its end: a window is known only when it is over."""


def sum_up(session: Session, store: StoreRow, now: datetime) -> bool:
    """Write the rows of the store's next hour that has windows; False, and no change, if none is over."""
    mine = select(WindowRow).filter_by(store=store.name).where(WindowRow.start >= (store.summed_until or NEVER))
    first = session.scalars(mine.order_by(WindowRow.start).limit(1)).first()
    if first is None or not over(first, now):
        return False
    end = hour_of(first.start) + HOUR
    rows = mine.where(WindowRow.start < end).order_by(WindowRow.tier, WindowRow.namespace, WindowRow.start)
    for _, group in groupby(session.scalars(rows), key=lambda row: (row.tier, row.namespace)):
        session.add_all(hour_row(hour) for hour in hourly(window_of(row) for row in group))
    store.summed_until = end
    return True


def add_late(session: Session, windows: Iterable[Window]) -> None:
    """Add windows to hours that are summed up already: those of a store that comes back began when last seen."""
    for window in windows:
        hour = hour_of(window.start)
        place = {"store": window.store, "tier": window.tier, "namespace": window.namespace}
        row = session.scalars(select(HourRow).filter_by(**place, start=hour)).first()
        if row is None:
            session.add(hour_row(summed([window], hour)))
        else:
            whole = hour_row(summed([window_of(row), window], hour))
            row.seconds, row.counters = whole.seconds, whole.counters


def fold(session: Session, store: StoreRow, before: datetime) -> bool:
    """Fold the store's next day that ended by ``before`` into rows of that day, of windows and of the ledger.

    False, and no change, if none is left. A day's row is that of its first hour, but covers more seconds.
    """
    since = store.folded_until or NEVER
    firsts = [
        session.scalar(select(start).where(kind.store == store.name, start >= since).order_by(start).limit(1))
        for kind, start in ((HourRow, HourRow.start), (LedgerRow, LedgerRow.hour))
    ]
    day = min((first for first in firsts if first), default=before).replace(hour=0)
    if day + DAY > before:
        return False
    within = select(HourRow).where(HourRow.store == store.name, HourRow.start >= day, HourRow.start < day + DAY)
    rows = session.scalars(within.order_by(HourRow.tier, HourRow.namespace, HourRow.start)).all()
    for _, group in groupby(rows, key=lambda row: (row.tier, row.namespace)):
        same = list(group)
        session.add(hour_row(summed([window_of(row) for row in same], day)))
        for row in same:
            session.delete(row)
    fold_ledger(session, store.name, day, day + DAY)
    store.folded_until = day + DAY
    return True


def hourly(windows: Iterable[Window]) -> list[Window]:
    """Windows of one tier or pool, oldest first, summed by hour."""
    return [summed(list(group), start) for start, group in groupby(windows, key=lambda window: hour_of(window.start))]


def over(window: Window | WindowRow, now: datetime) -> bool:
    """Whether its hour may be summed up, or is already."""
    return hour_of(window.start) + HOUR + LATE <= now


def summed(windows: Windows, start: datetime) -> Window:
    """Windows of one tier or pool as one that began at ``start``: counters add up, gauges are means over the seconds.

    So one of them may itself be the sum of many; a gauge known only in part of it weighs as if known in all.
    """
    told: dict[str, list[tuple[Value, float]]] = {}
    for window in windows:
        for name, value in window.values.items():
            told.setdefault(name, []).append((value, window.seconds))
    last = windows[-1]
    values = {name: _sum(name, found) for name, found in told.items()}
    seconds = sum(window.seconds for window in windows)
    return Window(last.store, last.namespace, last.model, last.tier, start, seconds, values)


def _sum(name: str, told: Sequence[tuple[Value, float]]) -> Value:
    """Sum or mean of one series; each value comes with the seconds of its window."""
    whole = sum_of([value for value, _ in told])
    if isinstance(whole, Histogram) or not is_gauge(name.partition("{")[0]):
        return whole
    numbers = [value for value, _ in told if not isinstance(value, Histogram)]
    first = numbers[0]  # so the mean of equal values is the same to the bit
    return first + fmean([value - first for value in numbers], [seconds for _, seconds in told])
