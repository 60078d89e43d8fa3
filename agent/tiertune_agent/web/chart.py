"""Geometry of the page's charts: numbers in, coordinates out. The templates draw. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from tiertune_agent.web.text import span

WIDTH, HEIGHT = 520.0, 150.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 6.0, 8.0, 20.0
SPARK_WIDTH, SPARK_HEIGHT = 100.0, 24.0


@dataclass(frozen=True)
class CostPoint:
    """Seconds of a typical request ``at`` some seconds before now (negative)."""

    at: float
    fetch_s: float
    recompute_s: float


@dataclass(frozen=True)
class Span:
    """From when until when, in seconds before now (negative)."""

    start: float
    end: float


@dataclass(frozen=True)
class Tick:
    y: float
    label: str


@dataclass(frozen=True)
class Band:
    x: float
    width: float


@dataclass(frozen=True)
class CostChart:
    """Two lines over the same time, seconds on a logarithmic scale. ``off``: while the tier was not fetched from."""

    fetch: str
    recompute: str
    ticks: tuple[Tick, ...]
    off: tuple[Band, ...]
    since_s: float


def cost_chart(points: Sequence[CostPoint], off: Sequence[Span]) -> CostChart | None:
    """None with fewer than two points: there is no line to draw."""
    known = [point for point in points if point.fetch_s > 0 and point.recompute_s > 0]
    if len(known) < 2:
        return None
    values = [value for point in known for value in (point.fetch_s, point.recompute_s)]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    high = max(high, low + 1)
    start = known[0].at

    def x(at: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, 1 - at / start)), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (log10(value) - low) / (high - low), 1)

    places = [x(point.at) for point in known]
    bands = (Band(x(span.start), round(x(span.end) - x(span.start), 1)) for span in off)
    return CostChart(
        fetch=path([(at, y(point.fetch_s)) for at, point in zip(places, known, strict=True)]),
        recompute=path([(at, y(point.recompute_s)) for at, point in zip(places, known, strict=True)]),
        ticks=tuple(Tick(y(10.0**power), _power(power)) for power in range(low, high + 1)),
        off=tuple(band for band in bands if band.width > 0),
        since_s=-start,
    )


@dataclass(frozen=True)
class Mark:
    """Something that happened: a place on the line of a StepChart."""

    x: float
    y: float
    name: str


@dataclass(frozen=True)
class StepChart:
    """A share (0 to 1) that holds until its next value; times in seconds from the left edge to ``until_s``."""

    line: str
    area: str
    ticks: tuple[Tick, ...]
    times: tuple[Mark, ...]
    marks: tuple[Mark, ...]


def step_chart(steps: Sequence[tuple[float, float]], until_s: float, marks: Sequence[tuple[float, str]]) -> StepChart:
    """``steps``: from when on, which share; ``marks``: when, and what."""
    until_s = max(until_s, *(at for at, _ in steps), *(at for at, _ in marks), 1.0)

    def x(at: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * at / until_s, 1)

    def y(share: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)

    corners = [(x(steps[0][0]), y(steps[0][1]))]
    for at, share in steps[1:]:
        corners += [(x(at), corners[-1][1]), (x(at), y(share))]
    corners.append((x(until_s), corners[-1][1]))
    floor_y = y(0.0)
    return StepChart(
        line=path(corners),
        area=path([(corners[0][0], floor_y), *corners, (corners[-1][0], floor_y)]),
        ticks=tuple(Tick(y(share), f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)),
        times=tuple(Mark(x(until_s * part), HEIGHT - 4, span(until_s * part)) for part in (0.25, 0.5, 0.75, 1.0)),
        marks=tuple(Mark(x(at), y(_held(steps, at)), name) for at, name in marks),
    )


def _held(steps: Sequence[tuple[float, float]], at: float) -> float:
    """The share that holds at a time."""
    return [share for start, share in steps if start <= at or start == steps[0][0]][-1]


def sparkline(values: Sequence[float]) -> str:
    """Points of a line from the left edge to the right one; empty where there is nothing to see."""
    top = max(values, default=0.0)
    if len(values) < 2 or top <= 0:
        return ""
    step = SPARK_WIDTH / (len(values) - 1)
    height = SPARK_HEIGHT - 2
    return path([(round(i * step, 1), round(1 + height * (1 - value / top), 1)) for i, value in enumerate(values)])


def path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def _power(power: int) -> str:
    """``10 µs``, ``1 ms``, ``100 s``."""
    for exponent, unit in ((0, "s"), (-3, "ms"), (-6, "µs")):
        if power >= exponent:
            return f"{10 ** (power - exponent)} {unit}"
    return f"1e{power} s"
