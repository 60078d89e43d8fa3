"""What each DRAM pool would have hit at other sizes and with other algorithms, by its ghosts' counters. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tiertune_agent.fields import Json, JsonDict, in_force, read
from tiertune_agent.records import Window, grouped
from tiertune_agent.tuners.evidence import ERRORS, Ratio, Summand, ratio
from tiertune_agent.tuners.ghosts import Tokens, Which, ghost_tokens, nearest
from tiertune_agent.web.charts import Chart
from tiertune_agent.web.over_sizes import Ghost, curve_chart, short

SAME = 0.005
"""Ratios that differ by less are taken as the same, because ghosts may err by about as much."""
Counts = Mapping[int, Tokens]
"""What one ghost counted, by window."""


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
