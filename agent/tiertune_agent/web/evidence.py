"""A decision's evidence, whatever its shape, as small tables. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiertune_agent.fields import Json
from tiertune_agent.web.text import figure, title
from tiertune_connector.units import format_size
from tiertune_connector.whatif.chain import Shape

SHOWN_ROWS = 30
SHAPES = ("shape", "best")
"""Keys of evidence that hold the sizes of all tiers, written as a shape."""


@dataclass(frozen=True)
class Table:
    """``head`` is empty where rows are pairs of a name and a value; ``left_out`` rows are not shown."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0


def tables(evidence: Json) -> list[Table]:
    """One table of all plain values, and one for each list of objects."""
    lists = {
        name: value
        for name, value in evidence.items()
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)
    }
    plain = [(title(name), _plain(name, value)) for name, value in evidence.items() if name not in lists]
    first = [Table("", (), plain)] if plain else []
    return first + [_table(name, rows) for name, rows in lists.items()]


def _table(name: str, rows: list[Json]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_plain(key, row.get(key)) for key in columns] for row in rows[-SHOWN_ROWS:]]
    return Table(title(name), [title(key) for key in columns], cells, max(0, len(rows) - SHOWN_ROWS))


def _plain(name: str, value: Any) -> str:  # noqa: ANN401 (JSON)
    if name in SHAPES:
        return _shape(str(value))
    if name == "goal" and isinstance(value, int):  # a capacity's: nothing else moves by steps
        return format_size(value)
    if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        return ", ".join(figure(name, item) for item in value)
    return json.dumps(value) if isinstance(value, list | Mapping) else figure(name, value)


def _shape(text: str) -> str:
    """``10.0 MiB dram, 0 B disk, 320.0 MiB remote``; the text itself where it is no shape."""
    try:
        shape = Shape.parse(text)
    except (TypeError, ValueError):
        return text
    return ", ".join(f"{format_size(size)} {tier}" for tier, size in shape._asdict().items())
