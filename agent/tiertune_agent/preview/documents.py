"""Reads from the committed dashboards (``dashboards/json``) what a page needs of each, and no more."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiertune_agent.fields import Json

ORDER = ("fleet", "tiers", "gate", "whatif", "stages", "decisions")
_PACKAGED = Path(__file__).with_name("json")
_REPOSITORY = Path(__file__).parents[3] / "dashboards" / "json"
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_LABEL = re.compile(r"{{\s*(\w+)\s*}}")


@dataclass(frozen=True)
class Target:
    """One query; ``instant``: only its value at the end is shown."""

    expr: str
    legend: str
    instant: bool


@dataclass(frozen=True)
class Panel:
    """Place and size in cells of 24 columns. ``kind``: Grafana's type, such as timeseries; ``row`` is a heading."""

    id: int
    kind: str
    title: str
    x: int
    y: int
    width: int
    height: int
    description: str = ""
    unit: str = "none"
    targets: tuple[Target, ...] = ()
    steps: bool = False
    thresholds: tuple[tuple[float, str], ...] = ()
    """Pairs of a value and the colour from it on, ascending."""
    words: Mapping[float, tuple[str, str]] | None = None
    """Names and colours of values."""
    most: float | None = None
    """Value of a full bar, if given."""
    x_label: str = ""
    """For a curve: the label whose numbers are its x values."""
    x_unit: str = "none"


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def boards(folder: Path | None = None) -> list[Board]:
    """All dashboards, in the order in which they are read. FileNotFoundError if there are none."""
    folder = folder or (_PACKAGED if _PACKAGED.is_dir() else _REPOSITORY)
    found = {path.stem: board(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise FileNotFoundError(f"{folder}: there are no dashboards")
    first = [name for name in ORDER if name in found]
    return [found[name] for name in (*first, *sorted(set(found) - set(first)))]


def board(path: Path) -> Board:
    document = json.loads(path.read_text(encoding="utf-8"))
    return Board(path.stem, document["title"], document["description"], tuple(map(_panel, document["panels"])))


def _panel(document: Json) -> Panel:
    place = document["gridPos"]
    cells = (place["x"], place["y"], place["w"], place["h"])
    title, kind = document["title"], document["type"]
    if kind == "row":
        return Panel(document["id"], kind, title, *cells)
    defaults, options = document["fieldConfig"]["defaults"], document["options"]
    steps = defaults.get("thresholds", {}).get("steps", [])
    return Panel(
        document["id"],
        kind,
        title,
        *cells,
        description=document.get("description", ""),
        unit=defaults.get("unit", "none"),
        targets=tuple(
            Target(one["expr"], one.get("legendFormat", ""), bool(one.get("instant"))) for one in document["targets"]
        ),
        steps=defaults.get("custom", {}).get("lineInterpolation") == "stepAfter",
        thresholds=tuple((float("-inf") if one["value"] is None else one["value"], one["color"]) for one in steps),
        words=_words(defaults.get("mappings", [])),
        most=defaults.get("max"),
        x_label=options.get("xField", ""),
        x_unit=_unit_of(options.get("xField", ""), document["fieldConfig"].get("overrides", [])),
    )


def _words(mappings: list[Json]) -> dict[float, tuple[str, str]] | None:
    told = {
        float(value): (word["text"], word["color"])
        for mapping in mappings
        if mapping["type"] == "value"
        for value, word in mapping["options"].items()
    }
    return told or None


def _unit_of(field: str, overrides: list[Json]) -> str:
    for one in overrides:
        if one["matcher"] == {"id": "byName", "options": field}:
            return next((str(each["value"]) for each in one["properties"] if each["id"] == "unit"), "none")
    return "none"


def filled(expression: str, values: Mapping[str, str]) -> str:
    """The query with its variables replaced. KeyError for one that has no value."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], expression)


def named(legend: str, labels: Mapping[str, str]) -> str:
    """A legend with its labels filled in; absent ones are left empty."""
    return _LABEL.sub(lambda match: labels.get(match[1], ""), legend).strip()
