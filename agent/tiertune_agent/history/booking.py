"""Windows' entries in the ledger: hours add up to the counters."""

from sqlalchemy.orm import Session

from tiertune_agent.history.models import LedgerRow
from tiertune_agent.holdout import GROUPS, document, measured, parse, sums
from tiertune_agent.ledger import entry
from tiertune_agent.records import Rates, Window


def book(session: Session, window: Window, rates: Rates) -> None:
    """Add a window to its hour."""
    booked = entry(window, rates)
    if booked is None:
        return
    key = {"hour": booked.hour, "store": window.store, "namespace": window.namespace, "tier": window.tier}
    row = session.get(LedgerRow, key)
    if row is None:
        row = LedgerRow(**key, seconds=0.0, saved=0.0, lost=0.0, bytes=0, transferred=0, money=0.0)
        session.add(row)
    seconds = row.seconds + booked.seconds
    row.bytes = round((row.bytes * row.seconds + booked.resident * booked.seconds) / seconds) if seconds else 0
    row.seconds = seconds
    row.saved += booked.saved
    row.lost += booked.lost
    row.transferred += round(booked.transferred)
    row.money += booked.money
    _measure(row, window)


def _measure(row: LedgerRow, window: Window) -> None:
    counted = {group: sums(window, group) for group in GROUPS}
    if not any(group.requests for group in counted.values()):
        return
    had = parse(row.holdout)
    both = {name: had[name] + counted[name] for name in GROUPS}
    row.holdout = document(both)
    told = measured(both["held"], both["fetched"])
    if told:
        row.measured, row.measured_low, row.measured_high = told.saved, told.low, told.high
