"""Windows and decisions as rows; rows as windows and decisions."""

import re
import sys
import uuid
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import Row

from tiertune_agent.history.models import DecisionRow, HourRow, WindowRow
from tiertune_agent.records import Decision, Histogram, State, Target, Value, Window
from tiertune_agent.tuners.base import Proposal

WINDOW_COLUMNS = ("store", "namespace", "model", "tier", "start", "seconds", "counters")
"""Columns that a window is read from."""
_AS_KEPT = tuple(field.name for field in fields(Decision) if field.name not in {"target", "state", "waits"})
"""Fields of a decision that have the same name in its row."""
_BYTES = re.compile(r"_bytes(_total)?(\{|$)")


def window_columns(window: Window) -> dict[str, Any]:
    columns = {name: value for name, value in vars(window).items() if name != "values"}
    return {**columns, "counters": {name: _told(name, value) for name, value in window.values.items()}}


def hour_row(window: Window) -> HourRow:
    return HourRow(**window_columns(window))


def window_of(row: WindowRow | HourRow | Row[Any], *, histograms: bool = True) -> Window:
    """A row as a window, with or without its histograms."""
    values = {
        sys.intern(name): Histogram.parse(value) if isinstance(value, dict) else value
        for name, value in row.counters.items()
        if histograms or not isinstance(value, dict)
    }
    return Window(row.store, row.namespace, row.model, row.tier, row.start, row.seconds, values)


def decision_row(tuner: str, target: Target, proposal: Proposal, told: Mapping[str, Any]) -> DecisionRow:
    """A new row, proposed; ``told``: the columns that each look renews."""
    return DecisionRow(
        key=uuid.uuid4().hex,
        tuner=tuner,
        **vars(target),
        target=str(target),
        field=proposal.field,
        before=proposal.before,
        after=proposal.after,
        state=State.PROPOSED,
        created_at=told["updated_at"],
        approved_by="",
        **told,
    )


def decision_of(row: DecisionRow) -> Decision:
    return Decision(
        **{name: getattr(row, name) for name in _AS_KEPT},
        target=Target(row.store, row.tier, row.namespace, tuple(row.models)),
        state=State(row.state),
        waits=row.waits or "",
    )


def _told(name: str, value: Value) -> Any:  # noqa: ANN401 (JSON)
    """A value for JSON: bytes are whole, all else is as measured."""
    if isinstance(value, Histogram):
        return {**vars(value)}
    return int(value) if _BYTES.search(name) and float(value).is_integer() else value
