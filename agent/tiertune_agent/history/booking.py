"""Windows' entries in the ledger: hours add up to the counters, and so do days."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import groupby

from sqlalchemy import select
from sqlalchemy.orm import Session

from tiertune_agent.history.models import LedgerRow
from tiertune_agent.holdout import GROUPS, Sums, document, measured, parse, sums
from tiertune_agent.ledger import Entry, entry
from tiertune_agent.records import Rates, Window


def book(session: Session, windows: Iterable[Window], rates: Rates) -> None:
    """Add windows of one store to their hours."""
    entries = [(window, booked) for window in windows if (booked := entry(window, rates))]
    hours = {booked.hour for _, booked in entries}
    stores = {window.store for window, _ in entries}
    query = select(LedgerRow).where(LedgerRow.hour.in_(hours), LedgerRow.store.in_(stores))
    rows = {(row.hour, row.namespace, row.tier): row for row in session.scalars(query)} if entries else {}
    for window, booked in entries:
        key = (booked.hour, window.namespace, window.tier)
        row = rows.get(key)
        if row is None:
            rows[key] = row = _empty(booked.hour, window.store, window.namespace, window.tier)
            session.add(row)
        _book(row, window, booked)


def _book(row: LedgerRow, window: Window, booked: Entry) -> None:
    seconds = row.seconds + booked.seconds
    row.bytes = round((row.bytes * row.seconds + booked.resident * booked.seconds) / seconds) if seconds else 0
    row.seconds = seconds
    row.saved += booked.saved
    row.lost += booked.lost
    row.transferred += round(booked.transferred)
    row.money += booked.money
    _measure(row, window)


def fold_ledger(session: Session, store: str, start: datetime, end: datetime) -> None:
    """Add the store's rows of this time up in one row per tier and pool, at ``start``."""
    within = select(LedgerRow).where(LedgerRow.store == store, LedgerRow.hour >= start, LedgerRow.hour < end)
    rows = session.scalars(within.order_by(LedgerRow.tier, LedgerRow.namespace, LedgerRow.hour)).all()
    for _, group in groupby(rows, key=lambda row: (row.tier, row.namespace)):
        whole, *others = group
        if whole.hour != start:
            others.insert(0, whole)
            whole = _empty(start, store, whole.namespace, whole.tier)
            session.add(whole)
        for row in others:
            _add(whole, row)
            session.delete(row)


def _empty(hour: datetime, store: str, namespace: str, tier: str) -> LedgerRow:
    nothing = {"seconds": 0.0, "saved": 0.0, "lost": 0.0, "bytes": 0, "transferred": 0, "money": 0.0}
    return LedgerRow(hour=hour, store=store, namespace=namespace, tier=tier, **nothing)


def _add(whole: LedgerRow, row: LedgerRow) -> None:
    seconds = whole.seconds + row.seconds
    whole.bytes = round((whole.bytes * whole.seconds + row.bytes * row.seconds) / seconds) if seconds else 0
    whole.seconds = seconds
    whole.saved += row.saved
    whole.lost += row.lost
    whole.transferred += row.transferred
    whole.money += row.money
    if row.holdout:
        _hold(whole, parse(row.holdout))


def _measure(row: LedgerRow, window: Window) -> None:
    counted = {group: sums(window, group) for group in GROUPS}
    if any(group.requests for group in counted.values()):
        _hold(row, counted)


def _hold(row: LedgerRow, counted: Mapping[str, Sums]) -> None:
    had = parse(row.holdout)
    both = {name: had[name] + counted[name] for name in GROUPS}
    row.holdout = document(both)
    told = measured(both["held"], both["fetched"])
    if told:
        row.measured, row.measured_low, row.measured_high = told.saved, told.low, told.high
