"""Geometry of the page's charts: numbers in, coordinates out. The templates draw. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

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

    bands = (Band(x(span.start), round(x(span.end) - x(span.start), 1)) for span in off)
    return CostChart(
        fetch=_path([(x(point.at), y(point.fetch_s)) for point in known]),
        recompute=_path([(x(point.at), y(point.recompute_s)) for point in known]),
        ticks=tuple(Tick(y(10.0**power), _power(power)) for power in range(low, high + 1)),
        off=tuple(band for band in bands if band.width > 0),
        since_s=-start,
    )


def sparkline(values: Sequence[float]) -> str:
    """Points of a line from the left edge to the right one; empty where there is nothing to see."""
    top = max(values, default=0.0)
    if len(values) < 2 or top <= 0:
        return ""
    step = SPARK_WIDTH / (len(values) - 1)
    height = SPARK_HEIGHT - 2
    return _path([(round(i * step, 1), round(1 + height * (1 - value / top), 1)) for i, value in enumerate(values)])


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def _power(power: int) -> str:
    """``10 µs``, ``1 ms``, ``100 s``."""
    for exponent, unit in ((0, "s"), (-3, "ms"), (-6, "µs")):
        if power >= exponent:
            return f"{10 ** (power - exponent)} {unit}"
    return f"1e{power} s"
