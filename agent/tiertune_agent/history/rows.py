"""Windows as rows and back."""

import sys
from typing import Any

from sqlalchemy import Row

from tiertune_agent.history.models import HourRow, WindowRow
from tiertune_agent.records import Histogram, Window

WINDOW_COLUMNS = ("store", "namespace", "model", "tier", "start", "seconds", "counters")
"""What a window is read from."""


def window_columns(window: Window) -> dict[str, Any]:
    return {**_columns(window), "requests": int(window.total("gate_candidate_requests_total"))}


def hour_row(window: Window) -> HourRow:
    return HourRow(**_columns(window))


def window_of(row: WindowRow | HourRow | Row[Any], *, histograms: bool = True) -> Window:
    """With or without its histograms."""
    values = {
        sys.intern(name): Histogram.parse(value) if isinstance(value, dict) else value
        for name, value in row.counters.items()
        if histograms or not isinstance(value, dict)
    }
    return Window(row.store, row.namespace, row.model, row.tier, row.start, row.seconds, values)


def _columns(window: Window) -> dict[str, Any]:
    columns = {name: value for name, value in vars(window).items() if name != "values"}
    counters = {
        name: value.document() if isinstance(value, Histogram) else value for name, value in window.values.items()
    }
    return {**columns, "counters": counters}
