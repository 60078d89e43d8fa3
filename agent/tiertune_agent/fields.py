"""Dotted fields of a JSON document, such as ``tiers.remote.fetch``."""

from collections.abc import Mapping
from typing import Any

from tiertune_connector.units import format_size

Json = Mapping[str, Any]
REMOTE_CAPACITY = "remote.capacity_bytes"
"""The same of the remote, in the document that the agent keeps of it."""


def read(document: Mapping[str, Any], field: str) -> Any:  # noqa: ANN401 (JSON)
    """The value there; None where a part of the way is missing."""
    value: Any = document
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def in_force(tuning: Mapping[str, Any], field: str) -> Any:  # noqa: ANN401 (JSON)
    """The value that holds: a pool that names no algorithm has the document's default."""
    found = read(tuning, field)
    return read(tuning, "defaults.eviction") if found is None and field.endswith(".eviction") else found


def capacity_field(tier: str) -> str:
    """Where the tuning of a store says how many bytes a tier may hold."""
    return f"tiers.{tier}.capacity_bytes"


def capacity_of(tuning: Mapping[str, Any], tier: str) -> int:
    """Bytes that a tier may hold by the tuning of its store; 0 where that does not say."""
    return int(read(tuning, capacity_field(tier)) or 0)


def replaced(document: Mapping[str, Any], field: str, value: object) -> dict[str, Any]:
    """A copy with another value there; missing parts of the way are made."""
    head, _, rest = field.partition(".")
    inner = replaced(document.get(head) or {}, rest, value) if rest else value
    return {**document, head: inner}


def shown(field: str, value: object) -> str:
    """The value of a field as people read it."""
    if field.endswith("_bytes") and isinstance(value, int | float):
        return format_size(value)
    return str(value)
