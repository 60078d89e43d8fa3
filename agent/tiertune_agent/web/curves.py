"""What each DRAM pool would have hit at other sizes and with other algorithms, by its ghosts' counters. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, isfinite, log10

from tiertune_agent.fields import Json, JsonDict, in_force, read
from tiertune_agent.records import Window, grouped
from tiertune_agent.tuners.evidence import ERRORS, Ratio, Summand, ratio
from tiertune_agent.tuners.ghosts import Tokens, Which, ghost_tokens, nearest
from tiertune_agent.web.charts import Chart, Point, Series
from tiertune_connector.units import format_size

SAME = 0.005
"""Ratios that differ by less are taken as the same, because ghosts may err by about as much."""
Counts = Mapping[int, Tokens]
"""What one ghost counted, by window."""
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


@dataclass(frozen=True)
class Counted:
    """What the ghosts of one pool counted in one window."""

    namespace: str
    model: str
    tokens: Mapping[Which, Tokens]


def counted(window: Window) -> Counted | None:
    """The window's counts; None if its ghosts were asked for nothing."""
    tokens = ghost_tokens(window)
    return Counted(window.namespace, window.model, tokens) if tokens else None


@dataclass(frozen=True)
class Curve:
    """One pool's curve, with what is in force."""

    store: str
    namespace: str
    model: str
    algorithm: str
    capacity_bytes: int | None
    """None: the store does not report it."""
    told: Mapping[Which, Counts]
    """Of the ghosts that were simulated last."""
    sentence: str
    gain: float
    """In hit ratio, by the best that was simulated."""

    @cached_property
    def lines(self) -> dict[str, list[Ghost]]:
        """The ghosts of each algorithm, smallest first; the algorithm with most sizes first."""
        told = sorted(self.told.items())
        ghosts = [Ghost(*which, sum(asked for _, asked in each.values()), _share(each)) for which, each in told]
        lines = grouped(ghosts, lambda one: one.algorithm)
        return dict(sorted(lines.items(), key=lambda line: -len(line[1])))

    @property
    def chart(self) -> Chart | None:
        """The chart of the lines; None if there are ghosts of one size only."""
        return curve_chart(self.lines, self.capacity_bytes, f"Hit ratio of {self.name} by size")

    @property
    def name(self) -> str:
        return f"{self.store} dram {self.model or self.namespace[:8]}"

    def document(self) -> JsonDict:
        """The curve as the API shows it; null: not known."""
        return {
            "store": self.store,
            "tier": "dram",
            "namespace": self.namespace,
            "model": self.model,
            "capacity_bytes": self.capacity_bytes,
            "algorithm": self.algorithm,
            "sentence": self.sentence,
            "points": [ghost.document() for line in self.lines.values() for ghost in line],
        }


def by_gain(curves: Iterable[Curve]) -> list[Curve]:
    """Those with most to gain first."""
    return sorted(curves, key=lambda one: (-one.gain, one.name))


def curves(store: Json, seen: Iterable[Counted]) -> list[Curve]:
    """Curves of every pool of one store, by namespace; ``seen``: what its windows counted, oldest first."""
    return [_curve(store, pool) for _, pool in sorted(grouped(seen, lambda one: one.namespace).items())]


def _curve(store: Json, seen: Sequence[Counted]) -> Curve:
    newest = seen[-1]
    pool = f"pools.{newest.namespace}.dram"
    held = read(store, f"{pool}.effective.capacity_bytes")
    wanted = in_force(store["tuning"], f"{pool}.eviction")
    algorithm = read(store, f"{pool}.effective.eviction") or wanted or "lru"
    told = {
        which: {at: one.tokens[which] for at, one in enumerate(seen) if which in one.tokens} for which in newest.tokens
    }
    return Curve(store["name"], newest.namespace, newest.model, algorithm, held, told, *_reading(told, algorithm, held))


def _reading(told: Mapping[Which, Counts], algorithm: str, capacity: float | None) -> tuple[str, float]:
    """What the curve says, and by how much the best that was simulated surely hits more: the smallest as good as any.

    Where nothing surely hits more, one that is smaller and surely as good is named.
    """
    held = nearest([size for name, size in told if name == algorithm], capacity) if capacity else None
    if held is None:
        return "Its ghosts tell of no size near its own, so there is nothing to set them against yet.", 0.0
    own = told[algorithm, held]
    has, gains = _share(own).value, {which: _gain(each, own) for which, each in told.items()}
    more = {which: gain.value for which, gain in gains.items() if gain.above and gain.value >= SAME}
    most = max(more.values(), default=0.0)
    alike = [which for which, gain in gains.items() if 0 < which[1] < held and gain.value - ERRORS * gain.error > -SAME]
    good = [which for which, value in more.items() if value >= most - SAME] if more else alike
    says = f"{algorithm} hits {has:.0%} at {short(held)}"
    if not good:
        return f"{says}.", 0.0
    size, name = min((size, name) for name, size in good)
    best = has + gains[name, size].value
    return f"{says}; the best simulated, {name} at {short(size)}, {best:.0%}.", more.get((name, size), 0.0)


def _share(told: Counts) -> Ratio:
    """Share of the tokens asked for that were hit."""
    return ratio([Summand(*tokens) for tokens in told.values()])


def _gain(one: Counts, than: Counts) -> Ratio:
    """Share of the tokens that one ghost hit beyond another, over the windows that both have."""
    both = [(*told, *than[at]) for at, told in one.items() if at in than]
    return ratio([Summand(hit / of * asked - had, asked) for hit, of, had, asked in both])


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
            bands.append(Series(f"band {kind}", (*above, *below[::-1])))
        points = tuple(_point(ghost, top) for ghost in line)
        curves.append(Series(kind, points, name, line=many, dots=3.5 if many else 5.0))
    return Chart(
        label=label,
        series=(*bands, *curves),
        x=(low, high),
        y=(0.0, top),
        xs=tuple((log10(size), marked if size == now else short(size)) for size in _labelled(sizes, now, high - low)),
        ys=tuple((top * part, f"{top * part:.0%}") for part in (0.0, 0.5, 1.0)),
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
