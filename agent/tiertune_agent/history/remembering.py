"""Writes a round's answers: the stores' state, their windows, their entries in the ledger."""

from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from tiertune_agent.fields import read
from tiertune_agent.history.ledger import book
from tiertune_agent.history.models import StageWindowRow, StoreRow, WindowRow, WishRow, cut
from tiertune_agent.history.rollup import add_late
from tiertune_agent.history.rows import window_columns
from tiertune_agent.records import FLEET, Rates, Snapshot, Window
from tiertune_agent.tuners.holdout import FIELD as HELD_OUT

_STATE = ("url", "boot_id", "version", "status", "tuning", "totals")
NOWHERE = ""
"""Address of a store when another store answers at its former one."""


def remember(session: Session, told: Sequence[tuple[Snapshot, Rates]], booked: Sequence[tuple[Window, Rates]]) -> None:
    """Remember different stores, each with its rates. Takes as many statements for many stores as for one."""
    snapshots = [snapshot for snapshot, _ in told]
    summed = _stores(session, snapshots)
    windows = [(window, rates) for snapshot, rates in told for window in snapshot.windows]
    if windows:
        session.execute(insert(WindowRow), [window_columns(window) for window, _ in windows])
        add_late(session, [window for window, _ in windows if _late(window, summed.get(cut(window.store)))])
    stages = list(chain.from_iterable(snapshot.stages for snapshot in snapshots))
    if stages:
        session.execute(insert(StageWindowRow), [dict(vars(window)) for window in stages])
    shares = {snapshot.store: str(read(snapshot.tuning, HELD_OUT) or 0.0) for snapshot in snapshots}
    book(session, [*windows, *booked], shares)


def _late(window: Window, summed_until: datetime | None) -> bool:
    return summed_until is not None and window.start < summed_until


def _stores(session: Session, snapshots: Sequence[Snapshot]) -> dict[str, datetime | None]:
    """Write the state of each; returns until when the windows of already known stores are summed up."""
    names = [cut(snapshot.store) for snapshot in snapshots]
    found = session.execute(select(StoreRow.name, StoreRow.summed_until).where(StoreRow.name.in_(names)))
    known = {row.name: row.summed_until for row in found}
    bypassed = session.get(WishRow, FLEET) and True
    new = [  # the tuning of one seen for the first time is taken as intended
        {
            **_state(one),
            "first_seen": one.at,
            "expected": one.tuning,
            "expected_at": one.at,
            "pending_bypass": None if one.observed else bypassed,
        }
        for one in snapshots
        if cut(one.store) not in known
    ]
    old = [_state(snapshot) for snapshot in snapshots if cut(snapshot.store) in known]
    for statement, rows in ((insert(StoreRow), new), (update(StoreRow), old)):
        if rows:
            session.execute(statement, rows)
    here = [snapshot.url for snapshot in snapshots if not snapshot.observed]  # several sources may share one
    for former in session.scalars(select(StoreRow).where(StoreRow.url.in_(here), StoreRow.name.not_in(names))):
        if former.pending_bypass is not None:  # whoever answers there now must hear it
            session.merge(WishRow(url=former.url, bypass=former.pending_bypass))
        former.url, former.pending_bypass = NOWHERE, None
    return known


def _state(snapshot: Snapshot) -> dict[str, Any]:
    return {"name": snapshot.store, "last_seen": snapshot.at, **{name: getattr(snapshot, name) for name in _STATE}}
