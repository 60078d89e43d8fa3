"""What a store's tuning should be, and where it differs: only decisions and commands may change it. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from tiertune_agent.fields import Json, JsonDict, read, replaced, shown
from tiertune_agent.records import CHANGED, Decision, State

ADOPTED_AFTER = timedelta(days=1)
"""A change by hand that has stood for this long is taken as intended."""
COMMANDED = ("version", "bypass")
"""Fields that are not tuned by decisions."""
NAMED = ("pools.", "tenants.")
"""Parts of a tuning whose fields come and go. Any other that nobody expected came with another version."""


def expected(base: Json, since: datetime, decisions: Iterable[Decision]) -> JsonDict:
    """The tuning known at ``since``, with what later ``decisions`` changed; these come oldest first."""
    document = dict(base)
    made = [each for each in decisions if each.state in CHANGED and (_changed_at(each) or since) >= since]
    for decision in made:
        back = decision.state == State.ROLLED_BACK
        document = replaced(document, decision.field, decision.before if back else decision.after)
    undone = (each for each in made if each.state == State.ROLLED_BACK)
    for decision in sorted(undone, key=lambda each: each.updated_at):  # also after a later one had set the same
        if read(document, decision.field) == decision.after and _the_last(decision, made):
            document = replaced(document, decision.field, decision.before)
    return document


def unsettled(decisions: Iterable[Decision], at: datetime) -> set[str]:
    """Fields that were being changed when the tuning was read: either value may be found."""
    return {
        decision.field
        for decision in decisions
        if decision.state == State.APPROVED
        or (decision.state in CHANGED and (_changed_at(decision) or at) >= at)
        or (decision.undo is not None and decision.state != State.ROLLED_BACK)
    }


def drift(wanted: Json, found: Json) -> Iterator[str]:
    """Every field that differs, with both values."""
    old, new = dict(leaves(wanted)), dict(leaves(found))
    for field in sorted(old.keys() | new.keys()):
        known = field.startswith(NAMED) or _has(wanted, field)
        if known and field not in COMMANDED and old.get(field) != new.get(field):
            yield f"{field}: expected {_told(field, old.get(field))}, found {_told(field, new.get(field))}"


def leaves(document: Json, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted fields and their values; null counts as absent."""
    for name, value in document.items():
        field = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from leaves(value, field)
        elif value is not None:
            yield field, value


def _has(document: Json, field: str) -> bool:
    """Whether it has the field, if only as null."""
    path, _, name = field.rpartition(".")
    there = read(document, path) if path else document
    return isinstance(there, Mapping) and name in there


def overlooking(fields: Iterable[str], wanted: Json, found: Json) -> JsonDict:
    """The wanted tuning, but with ``fields`` as they were found."""
    document = dict(wanted)
    for field in fields:
        document = replaced(document, field, read(found, field))
    return document


def _changed_at(decision: Decision) -> datetime | None:
    return decision.updated_at if decision.state == State.ROLLED_BACK else decision.applied_at


def _the_last(undone: Decision, made: Iterable[Decision]) -> bool:
    """Whether nothing changed its field after it was rolled back."""
    same = [each.applied_at for each in made if each.field == undone.field]
    return all(at is None or at <= undone.updated_at for at in same)


def _told(field: str, value: Any) -> str:  # noqa: ANN401 (JSON)
    return "none" if value is None else shown(field, value)
