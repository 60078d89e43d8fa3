"""The ledger in SQL: windows are booked by hour, hours folded into days, and both add up to the counters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter
from statistics import fmean

from sqlalchemy import func, inspect, select
from sqlalchemy.orm import Session

from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.history.models import LedgerRow
from tiertune_agent.history.sessions import OfHistory, renew
from tiertune_agent.records import Rates, Window, sum_known
from tiertune_agent.verdicts.holdout import COUNTER, GROUPS, added, measured, sums
from tiertune_agent.verdicts.ledger import Entry, entry, hour_of

COLUMNS = tuple(column.key for column in LedgerRow.__table__.columns)
_TOLD = tuple(name for name in COLUMNS if name != "holdout")
"""Columns of a row that are reported, its hour first."""
HOUR = timedelta(hours=1)
Booked = Sequence[tuple[Window, Entry]]
"""Windows and their entries."""
Place = tuple[datetime, str, str, str]
"""Hour, store, namespace and tier: a row's key."""


class Ledger(OfHistory):
    """Entries come in through `History`."""

    def hours(self, since: datetime) -> Iterator[list[JsonDict]]:
        """Rows from the hour of ``since`` on, by store, namespace and tier; by day if over a fortnight old.

        One hour that has rows is read after another: a year of many stores has millions.
        """
        query = select(*(getattr(LedgerRow, name) for name in _TOLD)).order_by(*inspect(LedgerRow).primary_key)
        hour = self._after(hour_of(since) - HOUR)
        while hour:
            found = self._rows(query.filter_by(hour=hour))
            yield [dict(zip(_TOLD, (hour.isoformat(), *told), strict=True)) for _, *told in found]
            hour = self._after(hour)

    def _after(self, hour: datetime) -> datetime | None:
        """The next hour that has rows."""
        with self._session() as session:
            return session.scalar(select(func.min(LedgerRow.hour)).where(LedgerRow.hour > hour))

    def account(self, since: datetime) -> dict[str, dict[str, float]]:
        """Seconds saved and lost, and money, by tier, over the same hours as ``hours``."""
        names = "saved", "lost", "money"
        columns = (func.sum(getattr(LedgerRow, name)) for name in names)
        query = select(LedgerRow.tier, *columns).where(LedgerRow.hour >= hour_of(since)).group_by(LedgerRow.tier)
        return {tier: dict(zip(names, told, strict=True)) for tier, *told in self._rows(query)}


def book(session: Session, windows: Iterable[tuple[Window, Rates]], shares: Mapping[str, str]) -> Booked:
    """Add windows to their hours; returns their entries. ``shares``: the share held out meanwhile, by store."""
    entries = [(window, booked) for window, rates in windows if (booked := entry(window, rates))]
    rows = _rows(session, entries)
    add_up(rows, entries, shares)
    renew(session, LedgerRow, [{name: getattr(row, name) for name in COLUMNS} for row in rows.values()])
    return entries


def add_up(rows: dict[Place, LedgerRow], entries: Booked, shares: Mapping[str, str]) -> None:
    """Add entries to existing rows, or to new ones where there is none."""
    for window, booked in entries:
        place = booked.hour, window.store, window.namespace, window.tier
        if place not in rows:
            rows[place] = _empty(*place)
        _add(rows[place], booked)
        _measure(rows[place], window, shares.get(window.store, ""))


def _rows(session: Session, entries: Booked) -> dict[Place, LedgerRow]:
    """Rows of the same hours and stores, in no session, as they are written all at once."""
    hours, stores = {booked.hour for _, booked in entries}, {window.store for window, _ in entries}
    query = select(*(getattr(LedgerRow, name) for name in COLUMNS))
    found = session.execute(query.where(LedgerRow.hour.in_(hours), LedgerRow.store.in_(stores))).mappings()
    return {(row["hour"], row["store"], row["namespace"], row["tier"]): LedgerRow(**row) for row in found}


def fold_ledger(session: Session, store: str, start: datetime, end: datetime) -> None:
    """Add up the store's rows of this time into one per tier and pool, at ``start``."""
    within = select(LedgerRow).filter_by(store=store).where(LedgerRow.hour >= start, LedgerRow.hour < end)
    rows = session.scalars(within.order_by(LedgerRow.tier, LedgerRow.namespace, LedgerRow.hour)).all()
    for (tier, namespace), group in groupby(rows, key=attrgetter("tier", "namespace")):
        whole = _empty(start, store, namespace, tier)
        for row in group:
            _add(whole, row)
            if row.holdout:
                _hold(whole, row.holdout)
            session.delete(row)
        session.add(whole)


def _empty(hour: datetime, store: str, namespace: str, tier: str) -> LedgerRow:
    return LedgerRow(hour=hour, store=store, namespace=namespace, tier=tier, seconds=0.0)


def _add(whole: LedgerRow, row: LedgerRow | Entry) -> None:
    known = [(each.bytes, each.seconds) for each in (whole, row) if each.bytes is not None and each.seconds]
    whole.bytes = round(fmean(*zip(*known, strict=True))) if known else None  # a mean over the seconds
    whole.seconds += row.seconds
    for name in ("saved", "lost", "transferred", "money"):
        setattr(whole, name, sum_known(getattr(each, name) for each in (whole, row)))


def _measure(row: LedgerRow, window: Window, share: str) -> None:
    if not window.matching(COUNTER):
        return
    counted = {group: vars(sums(window, group)) for group in GROUPS}
    if any(group["requests"] for group in counted.values()):
        _hold(row, {share: counted})


def _hold(row: LedgerRow, counted: Json) -> None:
    row.holdout = added(row.holdout or {}, counted)
    if told := measured(row.holdout.values()):
        row.measured, row.measured_low, row.measured_high = told
