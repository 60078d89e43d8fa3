"""Charts of the pages and the report: plain values, drawn as SVG by pygal.

A drawing has no style or script of its own: ``web/static/charts.css`` and the page that holds it style it by class.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any
from xml.etree.ElementTree import Element, tostring

import pygal
from markupsafe import Markup
from pygal.etree import etree
from pygal.style import Style

etree.to_etree()  # pygal takes lxml's trees where that is installed; what is changed below is the standard library's

Point = tuple[float, float]
Ticks = tuple[tuple[float, str], ...]
"""Places on an axis, and their labels."""
WIDTH, HEIGHT = 520, 170
ROW_PX, FOOT_PX = 26, 12
LETTER_PX = 16
"""Size of letters that pygal leaves room for, which is that on phones."""
KEPT = 256
"""Drawings that are kept while their values stay the same."""
_SERIES = re.compile(r"series serie-(\d+)")
_FRACTION = re.compile(r"(\.\d)\d+")
_ROUNDED = ("d", "x", "y", "cx", "cy", "width", "height")


@dataclass(frozen=True)
class Series:
    """``kind``: its classes. A point that is None breaks the line; an area has its outline. ``dots``: their radius."""

    kind: str
    points: tuple[Point | None, ...]
    name: str = ""
    """Shown by browsers under the pointer."""
    line: bool = True
    dots: float = 0.0
    tips: tuple[str, ...] = ()
    """What browsers show at each dot."""


@dataclass(frozen=True)
class Chart:
    """Series over numbers, within ``x`` and ``y``. Ticks are all the labels that there are."""

    label: str
    """Text for those who cannot see it."""
    series: tuple[Series, ...]
    x: tuple[float, float]
    y: tuple[float, float]
    xs: Ticks = ()
    ys: Ticks = ()
    marked: str = ""
    """The label among ``xs`` that has a line of its own."""
    kind: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    letter: int = LETTER_PX


@dataclass(frozen=True)
class Piece:
    """One part of every row, in the order of the rows. None: not known."""

    kind: str
    values: tuple[float | None, ...]
    doubts: tuple[float | None, ...] = ()
    """What each value may be off by."""
    tips: tuple[str, ...] = ()
    """What browsers show at each."""


@dataclass(frozen=True)
class Bars:
    """Rows of pieces, one behind the other, from 0 to ``top``. ``against``: a line across all of them."""

    label: str
    rows: tuple[str, ...]
    pieces: tuple[Piece, ...]
    top: float
    against: float | None = None


def joined(runs: Iterable[Iterable[Point]]) -> tuple[Point | None, ...]:
    """Points of one series: one run after the other, with a break between."""
    return tuple(point for run in runs for point in (*run, None))[:-1]


def stepped(points: Sequence[Point]) -> list[Point]:
    """Points of a line that goes from each point horizontally, then vertically to the next."""
    corners = (corner for (_, before), (at, after) in pairwise(points) for corner in ((at, before), (at, after)))
    return [*points[:1], *corners]


@lru_cache(maxsize=KEPT)
def draw(chart: Chart) -> Markup:
    """As SVG; the same chart is drawn once."""
    bare = not (chart.xs or chart.ys)  # without axes it takes the room that it is given
    drawn = pygal.XY(
        **_options(chart.width, chart.height, chart.letter, 0 if bare else 6),
        xrange=chart.x,
        range=chart.y,
        zero=chart.y[0],
        show_x_labels=bool(chart.xs),
        show_y_labels=bool(chart.ys),
        show_x_guides=True,
        x_labels=[{"value": at, "label": label} for at, label in chart.xs],
        y_labels=[{"value": at, "label": label} for at, label in chart.ys],
        x_labels_major=[chart.marked] if chart.marked else [],
        y_labels_major=[0.0 if chart.y[0] < 0.0 else None],
        allow_interruptions=True,
        value_formatter=lambda _: "",
        x_value_formatter=lambda _: "",
    )
    for one in chart.series:
        each = zip_longest(one.points, one.tips)
        values = [{"value": point, "tooltip": tip} if tip and point else point for point, tip in each]
        drawn.add(one.name, values, stroke=one.line, show_dots=bool(one.dots), dots_size=one.dots)
    classes = f"chart {chart.kind}".rstrip()
    return _svg(drawn, classes, chart.label, [(one.kind, one.name) for one in chart.series], bare=bare)


@lru_cache(maxsize=KEPT)
def draw_bars(bars: Bars) -> Markup:
    """As SVG; the same bars are drawn once."""
    drawn = pygal.HorizontalStackedBar(
        **_options(WIDTH, ROW_PX * len(bars.rows) + FOOT_PX, LETTER_PX, 4),
        range=(0.0, bars.top),
        x_labels=bars.rows[::-1],
        show_y_guides=False,
        show_x_guides=True,
        y_labels=[{"value": bars.against or 0.0, "label": ""}],
        value_formatter=lambda _: "",
    )
    for piece in bars.pieces:
        drawn.add(piece.kind, list(_lengths(piece))[::-1])
    classes = "chart values" if bars.against is None else "chart values against"
    return _svg(drawn, classes, bars.label, [(piece.kind, "") for piece in bars.pieces], guides_over=True)


def _options(width: int, height: int, letter: int, margin: int) -> dict[str, Any]:
    return {
        "width": width,
        "height": height,
        "margin": margin,
        "spacing": 4,
        "style": Style(label_font_size=letter, value_font_size=letter),
        "css": (),
        "js": (),
        "show_legend": False,
        "truncate_label": -1,
        "no_prefix": True,
    }


def _lengths(piece: Piece) -> Iterator[dict[str, Any]]:
    for value, doubt, tip in zip_longest(piece.values, piece.doubts, piece.tips):
        told: dict[str, Any] = {"value": value, "tooltip": tip or ""}
        if value is not None and doubt is not None:
            told["ci"] = {"low": max(0.0, value - doubt), "high": value + doubt}
        yield told


def _svg(
    chart: Any,  # noqa: ANN401 (one of pygal's)
    classes: str,
    label: str,
    told: list[tuple[str, str]],
    *,
    bare: bool = False,
    guides_over: bool = False,
) -> Markup:
    """``told``: classes and name of each series.

    Styles, scripts, ids and comments are removed: the pages' content policy forbids them, or nobody needs them.
    """
    root = chart.render_tree()
    box, (graph,) = root.get("viewBox", ""), root.findall("g")
    root.attrib.clear()
    root.attrib |= {"class": classes, "viewBox": box, "role": "img", "aria-label": label}
    if bare:
        root.set("preserveAspectRatio", "none")
    root[:] = [part for part in graph if part.tag == "g" and "tooltip" not in part.get("class", "")]
    for part in root:
        part[:] = [child for child in part if child.tag != "rect"]
        if guides_over:
            part[:] = sorted(part, key=lambda child: child.get("class", "").startswith("axis x"))
    _tidy(root)
    for group in root.iter("g"):
        if found := _SERIES.match(group.get("class", "")):
            kind, name = told[int(found[1])]
            group.set("class", kind)
            if name:
                title = Element("title")
                title.text = name
                group.insert(0, title)
    return Markup(tostring(root, "unicode"))  # noqa: S704 (it escapes what it writes)


def _tidy(node: Element) -> None:
    """Shorten numbers, and remove what is empty or meant for pygal's script."""
    for child in list(node):
        _tidy(child)
        empty = (child.tag == "g" and not len(child)) or (child.tag == "title" and not child.text)
        if empty or child.tag == "desc":
            node.remove(child)
    for name in _ROUNDED:
        if name in node.attrib:
            node.set(name, _FRACTION.sub(r"\1", node.attrib[name]))
