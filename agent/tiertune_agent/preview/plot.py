"""What the panels draw: series in, charts, rows and bars out, with figures in Grafana's units. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from itertools import groupby
from math import ceil, floor, log10

from tiertune_agent.preview import prometheus
from tiertune_agent.web.charts import Chart, Point, Series, Ticks, joined, stepped
from tiertune_agent.web.text import POWERS

TICK_PX = 100.0
GAP_STEPS = 1.5
"""A line breaks between points that are more steps apart than this: some are missing there."""
FLAT = 1e-12
"""Values that are no further apart are drawn as a level line."""
COLOURS, LETTER_PX, DAY_S = 10, 11, 86400.0
Points = Sequence[Point]
Named = Sequence[tuple[str, prometheus.Series]]


_BYTES = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
_DECIMAL = (*POWERS, (1.0, " "))
_SCALES: dict[str, Sequence[tuple[float, str]]] = {
    "percentunit": ((0.01, " %"),),
    "s": ((86400.0, " d"), (3600.0, " h"), (60.0, " min"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "bytes": _BYTES,
    "Bps": _BYTES,
}
_SUFFIXES = {"Bps": "/s", "reqps": "req/s", "ops": "ops/s", "watt": "W", "joule": "J"}
_STEPS = 5
"""Of an axis, at most."""


def figure(value: float, unit: str) -> str:
    """``12.4 k``, ``81 %``, ``3.2 ms``, ``10 MiB/s``: three digits or so."""
    scale, name = _scale(float(f"{value:.3g}"), unit)  # 999,999 is 1 M
    digits = Decimal(f"{value / scale + 0.0:.3g}")  # 0.0: else "-0"
    return f"{digits:,f}{name}{_SUFFIXES.get(unit, '')}".rstrip()


def ticks(low: float, high: float, unit: str) -> list[float]:
    """Values between ``low`` and a higher ``high`` that are round in the unit in which they are written."""
    scale, _ = _scale(max(-low, high), unit)
    least = (high - low) / scale / _STEPS
    power = 10.0 ** floor(log10(least))
    step = scale * power * next((each for each in (1, 2, 5) if each * power >= least), 10)
    return [step * place for place in range(ceil(low / step), floor(high / step) + 1)]


def _scale(value: float, unit: str) -> tuple[float, str]:
    """The largest unit of which the value has at least one, else the smallest; for 0 the plain one."""
    scales = _SCALES.get(unit, _DECIMAL)
    return next((each for each in scales if (abs(value) or 1.0) >= each[0]), scales[-1])


@dataclass(frozen=True)
class Frame:
    """Time that a drawing covers, its size in pixels, and its name."""

    start: float
    end: float
    step_s: float
    width: int
    height: int
    label: str = ""

    def clock(self) -> Ticks:
        """Times in the middle of equal parts."""
        count, span = max(2, int(self.width / TICK_PX)), self.end - self.start
        form = "%H:%M:%S" if span <= DAY_S else "%d %b %H:%M"
        found = [self.start + span * (place + 0.5) / count for place in range(count)]
        return tuple((at, datetime.fromtimestamp(at, UTC).strftime(form)) for at in found)


def colour(place: int) -> str:
    """Class of the line or bar in this place."""
    return f"c{place % COLOURS}"


def lines(named: Named, frame: Frame, unit: str, *, steps: bool) -> Chart:
    """Lines over time."""
    made: list[Series] = []
    for place, (name, series) in enumerate(named):
        kind, runs = colour(place), broken(series.points, frame.step_s)
        paths = [stepped(run) if steps else run for run in runs if len(run) > 1]
        made.append(Series(kind, joined(paths), name))
        alone = tuple(run[0] for run in runs if len(run) == 1)
        made.append(Series(kind, alone, name, line=False, dots=2.0))
    shown = [one for one in made if one.points]
    return _chart(shown, frame, unit, (frame.start, frame.end), frame.clock())


def curve(points: Points, frame: Frame, unit: str) -> Chart:
    """A line over bytes, from 0 on."""
    x = _limits(x for x, _ in points)
    xs = tuple((mark, figure(mark, "bytes")) for mark in ticks(*x, "bytes"))
    line = Series("c0", tuple(sorted(points)), dots=3.0)
    return _chart([line], frame, unit, x, xs)


def spark(points: Points, frame: Frame) -> Chart | None:
    """The course of a figure, over the whole width and without axes. None for fewer than two points."""
    if len(points) < 2:
        return None
    line, y = Series("line", tuple(points)), _limits(value for _, value in points)
    return Chart(frame.label, (line,), (frame.start, frame.end), y, kind="spark")


def _chart(series: Sequence[Series], frame: Frame, unit: str, x: Point, xs: Ticks) -> Chart:
    y = _limits(point[1] for one in series for point in one.points if point)
    return Chart(
        frame.label,
        tuple(series),
        x,
        y,
        xs=xs,
        ys=tuple((mark, figure(mark, unit)) for mark in ticks(*y, unit)),
        width=frame.width,
        height=frame.height,
        letter=LETTER_PX,
    )


def _limits(values: Iterable[float]) -> Point:
    """The lowest and the highest of the values and zero."""
    known = [0.0, *values]
    low, high = min(known), max(known)
    return low, high if high - low > FLAT else low + 1.0


def broken(points: Points, step_s: float) -> list[list[Point]]:
    """The points in runs without a gap."""
    runs: list[list[Point]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= GAP_STEPS * step_s:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


@dataclass(frozen=True)
class Stretch:
    """Part of a row; begin and length in per cent of it."""

    word: str
    colour: str
    begin: float
    length: float


def stretches(series: prometheus.Series, frame: Frame, words: Mapping[float, tuple[str, str]]) -> tuple[Stretch, ...]:
    """What a series was called over the time shown. ``words``: names and colours of values.

    A value lasts until the next one; before a gap it ends a step beyond its last point.
    """
    found, percent = [], 100.0 / (frame.end - frame.start)
    for run in broken(series.points, frame.step_s):
        ends = [at for at, _ in run[1:]] + [run[-1][0] + frame.step_s]
        for value, held in groupby(zip(run, ends, strict=True), key=lambda point: point[0][1]):
            spans = list(held)
            begin, end = max(spans[0][0][0], frame.start), min(spans[-1][1], frame.end)
            word, colour = words.get(value, (str(value), "text"))
            found.append(Stretch(word, colour, (begin - frame.start) * percent, (end - begin) * percent))
    return tuple(found)


@dataclass(frozen=True)
class Bar:
    name: str
    share: float
    """Share of a full bar."""
    label: str
    colour: str


def bars(named: Sequence[tuple[str, float]], unit: str, full: float | None) -> tuple[Bar, ...]:
    """Bars in the order given. ``full``: value of a full bar; None: the largest. Below 0 there is only a figure."""
    most = full or max((value for _, value in named), default=0.0)
    return tuple(
        Bar(name, min(1.0, max(0.0, value) / most) if most > 0 else 0.0, figure(value, unit), colour(place))
        for place, (name, value) in enumerate(named)
    )
