"""Geometry of what is drawn over sizes, and of values side by side: numbers in, coordinates out. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor, log10

from tiertune_agent.web.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Tick, path
from tiertune_connector.units import format_size

LABEL_PX = 96.0
"""Of an axis: labels that are nearer to each other run together."""


@dataclass(frozen=True)
class Line:
    """Values over bytes, smallest first; ``errors`` are what each may be off by. ``present``: what is in force."""

    name: str
    points: tuple[tuple[float, float], ...]
    errors: tuple[float, ...] = ()
    present: bool = False


@dataclass(frozen=True)
class DrawnLine:
    name: str
    line: str
    """Empty where there is one point alone."""
    dots: tuple[tuple[float, float], ...]
    band: str
    """What it may be off by, as an area; empty: not known."""
    present: bool


@dataclass(frozen=True)
class Label:
    x: float
    text: str
    anchor: str


@dataclass(frozen=True)
class Curves:
    """Lines over bytes on a logarithmic scale. ``now``: where the present size is; None: not known."""

    lines: tuple[DrawnLine, ...]
    ticks: tuple[Tick, ...]
    sizes: tuple[Label, ...]
    now: Label | None


def curve_chart(
    lines: Sequence[Line],
    now: float | None,
    *,
    most: float | None = None,
    value: Callable[[float], str] = "{:.0%}".format,
) -> Curves | None:
    """None where fewer than two sizes are known. ``most``: no value can be more; ``value`` writes one on the scale."""
    sizes = sorted({size for line in lines for size, _ in line.points})
    if len(sizes) < 2:
        return None
    low, high = log10(min(sizes[0], now or sizes[0])), log10(max(sizes[-1], now or sizes[-1]))
    top = _rounded(max(value for line in lines for _, value in line.points))
    top = min(top, most) if most else top

    def x(size: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 2 * RIGHT) * (log10(size) - low) / (high - low), 1)

    def y(share: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, share / top)), 1)

    def drawn(line: Line) -> DrawnLine:
        dots = tuple((x(size), y(share)) for size, share in line.points)
        edges = [
            [(x(size), y(share + sign * error)) for (size, share), error in zip(line.points, line.errors, strict=False)]
            for sign in (1, -1)
        ]
        band = path([*edges[0], *edges[1][::-1]]) if any(line.errors) and len(dots) > 1 else ""
        return DrawnLine(line.name, path(dots) if len(dots) > 1 else "", dots, band, line.present)

    return Curves(
        lines=tuple(drawn(line) for line in lines),
        ticks=tuple(Tick(y(top * part), value(top * part)) for part in (0.0, 0.5, 1.0)),
        sizes=_sizes(sizes, x),
        now=Label(x(now), short(now), "end" if x(now) > WIDTH / 2 else "start") if now else None,
    )


def _rounded(value: float) -> float:
    """Up to a round number."""
    power = 10.0 ** floor(log10(value)) if value > 0 else 1.0
    return (
        next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * power >= value - 1e-12) if value > 0 else 1.0
    )


def _sizes(sizes: Sequence[float], x: Callable[[float], float]) -> tuple[Label, ...]:
    """As many of them as find room, the smallest and the largest among them."""
    kept = [sizes[0]]
    for size in sizes[1:-1]:
        if x(size) - x(kept[-1]) >= LABEL_PX and x(sizes[-1]) - x(size) >= LABEL_PX:
            kept.append(size)
    ends = {sizes[0]: "start", sizes[-1]: "end"}
    return tuple(Label(x(each), short(each), ends.get(each, "middle")) for each in (*kept, sizes[-1]))


def short(nbytes: float) -> str:
    """As short as it can be: ``1 GiB``, ``1.5 GiB``."""
    return format_size(nbytes).replace(".0 ", " ")


@dataclass(frozen=True)
class Bar:
    """One value in per cent of the room; ``low`` to ``high``: what it may be. None: not known."""

    key: str
    name: str
    value: str
    width: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bars:
    """Values from the left, one below the other. ``line``: where what they are set against ends."""

    bars: tuple[Bar, ...]
    line: float | None


def bar_chart(values: Sequence[tuple[str, str, float | None, float | None]], against: float | None) -> Bars:
    """``values``: key, name, value, and what it may be off by; None: not known."""
    top = max([against or 0.0, *(value + (error or 0.0) for _, _, value, error in values if value is not None)])

    def x(value: float) -> float:
        return round(100 * min(1.0, max(0.0, value / top)), 1) if top > 0 else 0.0

    def bar(key: str, name: str, value: float | None, error: float | None) -> Bar:
        if value is None:
            return Bar(key, name, "unknown", None)
        known = Bar(key, name, f"{value:.3g}", x(value))
        return known if error is None else replace(known, low=x(value - error), high=x(value + error))

    return Bars(tuple(bar(*each) for each in values), None if against is None else x(against))
