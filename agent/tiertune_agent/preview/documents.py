"""Reads from the committed dashboards (``dashboards/json``) what a page needs of each, and no more."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    words: Mapping[float, tuple[str, str]] = field(default_factory=dict)
    """Names and colours of values."""
    most: float | None = None
    """Value of a full bar, if given."""
    x_label: str = ""
    """For a curve: the label whose numbers are its x values, in bytes."""


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def boards(folder: Path | None = None) -> list[Board]:
    """All dashboards, in the order in which they are read. FileNotFoundError if one is missing."""
    folder = folder or (_PACKAGED if _PACKAGED.is_dir() else _REPOSITORY)
    read = [(name, json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))) for name in ORDER]
    return [Board(name, one["title"], one["description"], tuple(map(_panel, one["panels"]))) for name, one in read]


def _panel(document: Json) -> Panel:
    place = document["gridPos"]
    heading = Panel(document["type"], document["title"], place["x"], place["y"], place["w"], place["h"])
    if heading.kind == "row":
        return heading
    defaults = document["fieldConfig"]["defaults"]
    return replace(
        heading,
        description=document["description"],
        unit=defaults["unit"],
        targets=tuple(Target(one["expr"], one["legendFormat"], one["instant"]) for one in document["targets"]),
        steps=defaults.get("custom", {}).get("lineInterpolation") == "stepAfter",
        thresholds=tuple(
            (float("-inf") if one["value"] is None else one["value"], one["color"])
            for one in defaults["thresholds"]["steps"]
        ),
        words={
            float(value): (word["text"], word["color"])
            for mapping in defaults.get("mappings", ())
            for value, word in mapping["options"].items()
        },
        most=defaults.get("max"),
        x_label=document["options"].get("xField", ""),
    )


def filled(expression: str, values: Mapping[str, str]) -> str:
    """The query with its variables replaced. KeyError for one that has no value."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], expression)


def named(legend: str, labels: Mapping[str, str]) -> str:
    """A legend with its labels filled in; absent ones are left empty."""
    return _LABEL.sub(lambda match: labels.get(match[1], ""), legend).strip()
