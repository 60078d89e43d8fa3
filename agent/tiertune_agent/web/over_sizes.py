"""What the page draws over sizes: what other sizes would have hit. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

from tiertune_agent.fields import JsonDict
from tiertune_agent.tuners.evidence import ERRORS, Ratio
from tiertune_agent.web.charts import Chart, Point, Series, Tick
from tiertune_connector.units import format_size

LABEL_SHARE = 0.19
"""Share of an axis; labels nearer to each other run together."""
KINDS = 3
"""Looks of lines and dots that can be told apart even without colours."""


@dataclass(frozen=True)
class Ghost:
    """What one simulated cache hit."""

    algorithm: str
    size: int
    """In bytes."""
    tokens: float
    """That it was asked for."""
    share: Ratio
    """Of these, what it hit."""

    @property
    def doubt(self) -> float:
        """What the share may be off by; 0: not known."""
        return ERRORS * self.share.error if isfinite(self.share.error) else 0.0

    def document(self) -> JsonDict:
        """As the API shows it."""
        share = self.share.document("hit_ratio")
        return {"algorithm": self.algorithm, "capacity_bytes": self.size, **share, "tokens": self.tokens}


def curve_chart(lines: Mapping[str, Sequence[Ghost]], now: float | None, label: str) -> Chart | None:
    """The chart of shares, of lines by name, smallest ghosts first; None if fewer than two sizes are known.

    ``now``: the present size; none or 0: not known.
    """
    drawn = {name: [ghost for ghost in line if ghost.size] for name, line in lines.items()}
    sizes = sorted({ghost.size for line in drawn.values() for ghost in line})
    if len(sizes) < 2:
        return None
    among = [*sizes, now or sizes[0]]
    low, high = log10(min(among)), log10(max(among))
    top = min(1.0, _rounded(max(ghost.share.value for line in drawn.values() for ghost in line)))
    marked = f"now {short(now)}" if now else ""
    bands, curves = [], []
    for place, (name, line) in enumerate(drawn.items()):
        kind, many = f"c{place % KINDS}", len(line) > 1
        if many and any(ghost.doubt for ghost in line):
            above, below = ([_point(ghost, top, sign) for ghost in line] for sign in (1, -1))
            bands.append(Series(f"band {kind}", (*above, *below[::-1]), filled=True))
        points = tuple(_point(ghost, top) for ghost in line)
        curves.append(Series(kind, points, name, line=many, dots=3.5 if many else 5.0))
    return Chart(
        label=label,
        series=(*bands, *curves),
        x=(low, high),
        y=(0.0, top),
        xs=tuple(
            Tick(log10(size), marked if size == now else short(size)) for size in _labelled(sizes, now, high - low)
        ),
        ys=tuple(Tick(top * part, f"{top * part:.0%}") for part in (0.0, 0.5, 1.0)),
        marked=marked,
    )


def _point(ghost: Ghost, top: float, sign: int = 0) -> Point:
    """Where its share is drawn; with a ``sign``, an edge of the band that it may be off by."""
    return log10(ghost.size), min(top, max(0.0, ghost.share.value + sign * ghost.doubt))


def _rounded(value: float) -> float:
    """Up to a round number."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * power >= value - 1e-12)


def _labelled(sizes: Sequence[int], now: float | None, length: float) -> list[float]:
    """As many sizes as there is room for: the present one first, then the largest and the smallest."""
    kept: list[float] = []
    for size in (*([now] if now else []), sizes[-1], *sizes[:-1]):
        if all(abs(log10(size / one)) >= LABEL_SHARE * length for one in kept):
            kept.append(size)
    return sorted(kept)


def short(nbytes: float) -> str:
    """As short as it can be: ``1 GiB``, ``1.5 GiB``."""
    return format_size(nbytes).replace(".0 ", " ")
