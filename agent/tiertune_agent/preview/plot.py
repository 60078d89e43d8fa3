"""Geometry of the drawings: series in, coordinates out. The templates draw. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from tiertune_agent.preview.prometheus import Series
from tiertune_agent.preview.units import figure, moments, ticks

LEFT, RIGHT, TOP, BOTTOM = 64.0, 10.0, 8.0, 22.0
TICK_PX = 90.0
GAP_STEPS = 1.5
"""Of points that lie further apart something is missing between: the line breaks there."""
ROW_LEFT, ROW_MOST = 190.0, 34.0
BAR_LEFT, BAR_RIGHT, BAR_MOST = 210.0, 78.0, 40.0
LETTER_PX = 6.6
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """Time over which is drawn, and the size in pixels."""

    start: float
    end: float
    step_s: float
    width: float
    height: float

    def x(self, at: float, left: float = LEFT) -> float:
        share = (at - self.start) / (self.end - self.start)
        return round(left + (self.width - left - RIGHT) * min(1.0, max(0.0, share)), 1)

    def holds(self, at: float) -> bool:
        return self.start <= at <= self.end


@dataclass(frozen=True)
class Tick:
    at: float
    """Pixels along its axis."""
    label: str


@dataclass(frozen=True)
class Line:
    """Unbroken runs, as points of polylines; single points as dots; areas under the runs where they are stacked."""

    name: str
    colour: int
    runs: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    areas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lines:
    lines: tuple[Line, ...]
    ys: tuple[Tick, ...]
    xs: tuple[Tick, ...]
    zero: float | None
    """Where zero is, if it is within the drawing and not at its foot."""


class _Scale:
    """Values to pixels, over round ticks that hold all values and zero."""

    def __init__(self, values: Iterable[float], unit: str, height: float) -> None:
        known = [0.0, *values]
        low, high = min(known), max(known)
        marks = ticks(low, high if high > low else low + 1.0, unit)
        self._low, self._high, self._height = marks[0], marks[-1], height
        self.ticks = tuple(Tick(self.y(mark), figure(mark, unit)) for mark in marks)
        self.zero = self.y(0.0) if self._low < 0 < self._high else None

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._height - BOTTOM - (self._height - TOP - BOTTOM) * share, 1)


def lines(named: Sequence[tuple[str, Series]], frame: Frame, unit: str, *, stacked: bool, steps: bool) -> Lines:
    """Lines over time. Of stacked ones each begins where the one before it ends."""
    drawn = _stack([series.points for _, series in named]) if stacked else [(s.points, ()) for _, s in named]
    scale = _Scale((value for points, _ in drawn for _, value in points), unit, frame.height)

    def path(points: Points) -> str:
        corners = [(frame.x(at), scale.y(value)) for at, value in points]
        if steps:
            corners = corners[:1] + [c for a, b in pairwise(corners) for c in ((b[0], a[1]), b)]
        return polyline(corners)

    made = []
    for place, ((name, _), (points, floor)) in enumerate(zip(named, drawn, strict=True)):
        runs = broken(points, frame.step_s)
        below = dict(floor)
        foot = [[(at, below.get(at, 0.0)) for at, _ in reversed(run)] for run in runs] if stacked else []
        made.append(
            Line(
                name,
                place,
                tuple(path(run) for run in runs if len(run) > 1),
                tuple((frame.x(run[0][0]), scale.y(run[0][1])) for run in runs if len(run) == 1),
                tuple(
                    polyline([(frame.x(at), scale.y(value)) for at, value in [*run, *under]])
                    for run, under in zip(runs, foot, strict=False)
                    if len(run) > 1
                ),
            )
        )
    return Lines(tuple(made), scale.ticks, time_ticks(frame), scale.zero)


def _stack(columns: Sequence[Points]) -> list[tuple[Points, Points]]:
    """Each column on those before it, and what it stands on."""
    height: dict[float, float] = {}
    stacked: list[tuple[Points, Points]] = []
    for points in columns:
        foot = [(at, height.get(at, 0.0)) for at, _ in points]
        top = [(at, value + under) for (at, value), (_, under) in zip(points, foot, strict=True)]
        height.update(top)
        stacked.append((top, foot))
    return stacked


def broken(points: Points, step_s: float) -> list[list[tuple[float, float]]]:
    """Runs without a gap."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= GAP_STEPS * step_s:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def time_ticks(frame: Frame, left: float = LEFT) -> tuple[Tick, ...]:
    count = max(2, int((frame.width - left) / TICK_PX))
    return tuple(Tick(frame.x(at, left), label) for at, label in moments(frame.start, frame.end, count))


@dataclass(frozen=True)
class Cell:
    """A value that held for a while."""

    x: float
    width: float
    value: float
    until: float
    """Unix seconds."""


@dataclass(frozen=True)
class Row:
    name: str
    y: float
    height: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class States:
    rows: tuple[Row, ...]
    xs: tuple[Tick, ...]


def states(named: Sequence[tuple[str, Series]], frame: Frame) -> States:
    """A row per series, a cell per stretch of one value: each lasts a step beyond its last point."""
    height = min(ROW_MOST, (frame.height - TOP - BOTTOM) / max(1, len(named)))
    rows = []
    for place, (name, series) in enumerate(named):
        cells = []
        for run in broken(series.points, frame.step_s):
            ends = [at for at, _ in run[1:]] + [run[-1][0] + frame.step_s]
            for value, held in groupby(zip(run, ends, strict=True), key=lambda point: point[0][1]):
                spans = list(held)
                begin, until = spans[0][0][0], spans[-1][1]
                x = frame.x(begin, ROW_LEFT)
                cells.append(Cell(x, round(frame.x(until, ROW_LEFT) - x, 1), value, until))
        rows.append(Row(name, round(TOP + place * height, 1), round(height - 3, 1), tuple(cells)))
    return States(tuple(rows), time_ticks(frame, ROW_LEFT))


@dataclass(frozen=True)
class Bar:
    name: str
    y: float
    height: float
    width: float
    track: float
    """Width of a full bar."""
    label: str
    colour: int


def bars(named: Sequence[tuple[str, float]], frame: Frame, unit: str, full: float | None = None) -> tuple[Bar, ...]:
    """Horizontal, in the order given. ``full``: of a full bar, else the longest is. Below 0 there is only a figure."""
    width, height = frame.width, frame.height
    most = full or max((value for _, value in named), default=0.0)
    track = width - BAR_LEFT - BAR_RIGHT
    each = min(BAR_MOST, (height - 2 * TOP) / max(1, len(named)))
    return tuple(
        Bar(
            name,
            round(TOP + place * each, 1),
            round(each - 6, 1),
            round(track * min(1.0, max(0.0, value) / most), 1) if most > 0 else 0.0,
            track,
            figure(value, unit),
            place,
        )
        for place, (name, value) in enumerate(named)
    )


@dataclass(frozen=True)
class Curve:
    line: str
    dots: tuple[tuple[float, float], ...]
    ys: tuple[Tick, ...]
    xs: tuple[Tick, ...]


def curve(points: Points, frame: Frame, unit: str, x_unit: str) -> Curve:
    """A line over numbers, from 0 on."""
    points = sorted(points)
    scale = _Scale((y for _, y in points), unit, frame.height)
    marks = ticks(0.0, max((x for x, _ in points), default=1.0), x_unit)

    def x(value: float) -> float:
        return round(LEFT + (frame.width - LEFT - 3 * RIGHT) * value / marks[-1], 1)

    dots = tuple((x(at), scale.y(value)) for at, value in points)
    return Curve(polyline(dots), dots, scale.ticks, tuple(Tick(x(mark), figure(mark, x_unit)) for mark in marks))


@dataclass(frozen=True)
class Spark:
    """The course of a figure, over the whole width and without axes."""

    line: str
    area: str


def spark(points: Points, frame: Frame) -> Spark | None:
    """None where there is nothing to see."""
    values = [value for _, value in points]
    if len(values) < 2:
        return None
    low, high = min(0.0, *values), max(0.0, *values)
    span = (high - low) or 1.0

    def place(at: float, value: float) -> tuple[float, float]:
        x = frame.width * (at - frame.start) / (frame.end - frame.start)
        return round(x, 1), round(1 + (frame.height - 2) * (1 - (value - low) / span), 1)

    corners = [place(*point) for point in points]
    foot = [(corners[-1][0], frame.height), (corners[0][0], frame.height)]
    return Spark(polyline(corners), polyline([*corners, *foot]))


def polyline(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def shortened(name: str, pixels: float) -> str:
    """A name that has so much room."""
    most = max(3, int(pixels / LETTER_PX))
    return name if len(name) <= most else f"{name[: most - 1]}…"
