"""What the page draws over sizes: what other sizes would have hit. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from tiertune_agent.web.charts import Chart, Series, Tick
from tiertune_connector.units import format_size

LABEL_SHARE = 0.19
"""Share of an axis; labels nearer to each other run together."""
KINDS = 3
"""Looks of lines and dots that can be told apart even without colours."""


@dataclass(frozen=True)
class Line:
    """Bytes, smallest first, with a value and what it may be off by. ``present``: what is in force."""

    name: str
    points: tuple[tuple[float, float, float], ...]
    present: bool = False

    @property
    def doubted(self) -> bool:
        """Whether its errors can be drawn."""
        return any(error for *_, error in self.points) and len(self.points) > 1


def curve_chart(lines: Sequence[Line], now: float | None, label: str) -> Chart | None:
    """The chart of shares; None if fewer than two sizes are known. ``now``: the present size, None: not known."""
    sizes = sorted({size for line in lines for size, *_ in line.points})
    if len(sizes) < 2:
        return None
    low, high = log10(min(sizes[0], now or sizes[0])), log10(max(sizes[-1], now or sizes[-1]))
    top = min(1.0, _rounded(max(share for line in lines for _, share, _ in line.points)))
    marked = f"now {short(now)}" if now else ""
    return Chart(
        label=label,
        series=(
            *(_band(line, place, top) for place, line in enumerate(lines) if line.doubted),
            *(_line(line, place, top) for place, line in enumerate(lines)),
        ),
        x=(low, high),
        y=(0.0, top),
        xs=tuple(
            Tick(log10(size), marked if size == now else short(size)) for size in _labelled(sizes, now, high - low)
        ),
        ys=tuple(Tick(top * part, f"{top * part:.0%}") for part in (0.0, 0.5, 1.0)),
        marked=marked,
    )


def _band(line: Line, place: int, top: float) -> Series:
    """The area that the line may be off by."""
    edges = [
        [(log10(size), min(top, max(0.0, share + sign * error))) for size, share, error in line.points]
        for sign in (1, -1)
    ]
    return Series(f"band c{place % KINDS}", (*edges[0], *edges[1][::-1]), filled=True)


def _line(line: Line, place: int, top: float) -> Series:
    points = tuple((log10(size), min(top, share)) for size, share, _ in line.points)
    alone = len(points) == 1
    return Series(f"c{place % KINDS}", points, line.name, line=not alone, dots=5.0 if alone else 3.5)


def _rounded(value: float) -> float:
    """Up to a round number."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * power >= value - 1e-12)


def _labelled(sizes: Sequence[float], now: float | None, length: float) -> list[float]:
    """As many sizes as there is room for: the present one first, then the largest and the smallest."""
    kept: list[float] = []
    for size in (*([now] if now else []), sizes[-1], *sizes[:-1]):
        if all(abs(log10(size / one)) >= LABEL_SHARE * length for one in kept):
            kept.append(size)
    return sorted(kept)


def short(nbytes: float) -> str:
    """As short as it can be: ``1 GiB``, ``1.5 GiB``."""
    return format_size(nbytes).replace(".0 ", " ")
