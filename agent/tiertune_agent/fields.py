"""Dotted fields of a JSON document, such as ``tiers.remote.fetch``."""

from collections.abc import Mapping
from typing import Any

from tiertune_connector.units import format_size

Json = Mapping[str, Any]
"""A JSON object, to be read."""
JsonDict = dict[str, Any]
"""One that is its reader's own."""
REMOTE_CAPACITY = "remote.capacity_bytes"
"""Field of the remote's capacity, in the document that the agent keeps of it."""


def read(document: Json, field: str) -> Any:  # noqa: ANN401 (JSON)
    """The field's value; None if a part of its path is missing."""
    value: Any = document
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def in_force(tuning: Json, field: str) -> Any:  # noqa: ANN401 (JSON)
    """The value in force: a pool that names no algorithm has the document's default."""
    found = read(tuning, field)
    return read(tuning, "defaults.eviction") if found is None and field.endswith(".eviction") else found


def capacity_field(tier: str) -> str:
    """Field of a store's tuning that says how many bytes a tier may hold."""
    return f"tiers.{tier}.capacity_bytes"


def capacity_of(tuning: Json, tier: str) -> int:
    """Bytes that a tier may hold by the tuning of its store; 0 if that does not say."""
    return int(read(tuning, capacity_field(tier)) or 0)


def replaced(document: Json, field: str, value: object) -> JsonDict:
    """A copy with another value of the field; missing parts of its path are made."""
    head, _, rest = field.partition(".")
    inner = replaced(document.get(head) or {}, rest, value) if rest else value
    return {**document, head: inner}


def shown(field: str, value: object) -> str:
    """The value of a field as people read it."""
    if field.endswith("_bytes") and isinstance(value, int | float):
        return format_size(value)
    return str(value)


def change(field: str, before: object, after: object) -> str:
    """A change of a field as people read it."""
    return f"{shown(field, before)} → {shown(field, after)}"
