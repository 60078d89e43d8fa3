"""Where a store's tuning differs from what is expected: only decisions and commands may change it. Pure."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from tiertune_agent.fields import Json, shown
from tiertune_agent.records import Expectation, Snapshot

ADOPTED_AFTER = timedelta(days=1)
"""A change by hand that has stood for this long is taken as intended."""
COMMANDED = ("version", "bypass")
"""Fields that are not tuned by decisions."""
NAMED = ("pools.", "tenants.")
"""Parts of a tuning whose fields come and go. Any other comes and goes with another version of the store."""


def compared(known: Expectation, found: Snapshot, moving: Collection[str], now: datetime) -> tuple[str, Expectation]:
    """A message of what differs, and what is expected from now on: what was found, if it does not, or stood for long.

    Fields that are ``moving`` may be found either way: their change or its undoing has not ended yet.
    """
    told = "; ".join(drift(known.tuning, found.tuning, moving))
    since = min(known.differs or now, now)  # a clock that was ahead is not waited for
    if moving or (told and now - since < ADOPTED_AFTER) or found.tuning == known.tuning:
        return told, replace(known, differs=since if told else None)
    return "", Expectation(dict(found.tuning), found.at)


def drift(wanted: Json, found: Json, moving: Collection[str] = ()) -> Iterator[str]:
    """Every field that differs, with both values; without those that are ``moving``. Null is as good as absent."""
    old, new = dict(leaves(wanted)), dict(leaves(found))
    for field in sorted(old.keys() | new.keys()):
        known = (field in old and field in new) or field.startswith(NAMED)
        if known and field not in (*COMMANDED, *moving) and old.get(field) != new.get(field):
            yield f"{field}: expected {_told(field, old.get(field))}, found {_told(field, new.get(field))}"


def leaves(document: Json, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted fields and their values."""
    for name, value in document.items():
        field = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from leaves(value, field)
        else:
            yield field, value


def _told(field: str, value: Any) -> str:  # noqa: ANN401 (JSON)
    return "none" if value is None else shown(field, value)
