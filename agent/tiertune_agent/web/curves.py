"""What each DRAM pool would have hit at other sizes and with other algorithms, by its ghosts' counters. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from tiertune_agent.fields import Json, JsonDict, in_force, read
from tiertune_agent.records import Window, grouped
from tiertune_agent.tuners.evidence import ERRORS, Ratio, Summand, ratio
from tiertune_agent.tuners.ghosts import Tokens, Which, ghost_tokens, nearest
from tiertune_agent.web.charts import Chart
from tiertune_agent.web.over_sizes import Line, curve_chart, short

SAME = 0.005
"""Ratios that differ by less are taken as the same, because ghosts may err by about as much."""


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


class Ghosts:
    """The ghosts of one pool, at the sizes simulated last; keeps what was computed from them."""

    def __init__(self, seen: Sequence[Counted]) -> None:
        """``seen``: windows of one pool, oldest first; at least one."""
        newest = seen[-1]
        self.namespace, self.model = newest.namespace, newest.model
        self.told = {
            which: {at: one.tokens[which] for at, one in enumerate(seen) if which in one.tokens}
            for which in newest.tokens
        }
        """By window."""
        self._shares: dict[Which, Ratio] = {}
        self._gains: dict[tuple[Which, Which], Ratio] = {}

    def sizes(self, algorithm: str) -> list[int]:
        return sorted(size for name, size in self.told if name == algorithm)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms, the one with most sizes first."""
        return tuple(sorted({name for name, _ in self.told}, key=lambda name: (-len(self.sizes(name)), name)))

    def near(self, algorithm: str, size: float | None) -> Which | None:
        """The ghost of this algorithm whose size is nearest to ``size``; None if none is near, or that is not known."""
        found = nearest(self.sizes(algorithm), size) if size else None
        return None if found is None else (algorithm, found)

    def tokens(self, which: Which) -> float:
        """Tokens that were asked for."""
        return sum(asked for _, asked in self.told[which].values())

    def share(self, which: Which) -> Ratio:
        """Share of the tokens asked for that were hit."""
        if which not in self._shares:
            self._shares[which] = ratio([Summand(hit, asked) for hit, asked in self.told[which].values()])
        return self._shares[which]

    def gain(self, one: Which, than: Which) -> Ratio:
        """Share of the tokens that one ghost hit beyond another, over the windows that both have."""
        if (one, than) not in self._gains:
            other = self.told[than]
            both = [(*told, *other[at]) for at, told in self.told[one].items() if at in other]
            self._gains[one, than] = ratio([Summand(hit / of * asked - had, asked) for hit, of, had, asked in both])
        return self._gains[one, than]


def ghosts(seen: Iterable[Counted]) -> tuple[Ghosts, ...]:
    """Ghosts of every pool of one store; ``seen``: windows, oldest first."""
    pools = grouped(seen, lambda one: one.namespace)
    return tuple(Ghosts(pools[pool]) for pool in sorted(pools))


@dataclass(frozen=True)
class Curve:
    """One pool's curve, with what is in force."""

    store: str
    ghosts: Ghosts
    algorithm: str
    capacity_bytes: int | None
    """None: the store does not report it."""
    sentence: str
    gain: float
    """In hit ratio, by the best that was simulated."""

    @property
    def lines(self) -> list[Line]:
        """Of each algorithm, over the sizes that were simulated."""
        return [
            Line(
                name,
                tuple(self._point((name, size)) for size in self.ghosts.sizes(name) if size > 0),
                name == self.algorithm,
            )
            for name in self.ghosts.algorithms
        ]

    @property
    def chart(self) -> Chart | None:
        """The chart of the lines; None if there are ghosts of one size only."""
        return curve_chart(self.lines, self.capacity_bytes or None, f"Hit ratio of {self.name} by size")

    @property
    def name(self) -> str:
        pool = self.ghosts
        return f"{self.store} dram {pool.model or pool.namespace[:8]}"

    def _point(self, which: Which) -> tuple[float, float, float]:
        share = self.ghosts.share(which)
        return float(which[1]), share.value, ERRORS * share.error if isfinite(share.error) else 0.0

    def document(self) -> JsonDict:
        """The curve as the API shows it; null: not known."""
        pool = self.ghosts
        return {
            "store": self.store,
            "tier": "dram",
            "namespace": pool.namespace,
            "model": pool.model,
            "capacity_bytes": self.capacity_bytes,
            "algorithm": self.algorithm,
            "sentence": self.sentence,
            "points": [
                {
                    "algorithm": name,
                    "capacity_bytes": size,
                    **pool.share((name, size)).document("hit_ratio"),
                    "tokens": pool.tokens((name, size)),
                }
                for name in pool.algorithms
                for size in pool.sizes(name)
            ],
        }


def curves(stores: Sequence[Json], told: Mapping[str, Sequence[Ghosts]]) -> tuple[Curve, ...]:
    """Curves of all pools, those with most to gain first."""
    found = [curve(store, pool) for store in stores for pool in told.get(store["name"], ())]
    return tuple(sorted(found, key=lambda one: (-one.gain, one.name)))


def curve(store: Json, pool: Ghosts) -> Curve:
    state = store["pools"].get(pool.namespace) or {}
    held = read(state, "dram.effective.capacity_bytes")
    wanted = in_force(store["tuning"], f"pools.{pool.namespace}.dram.eviction")
    algorithm = str(read(state, "dram.effective.eviction") or wanted or "lru")
    sentence, gain = reading(pool, algorithm, held)
    return Curve(store["name"], pool, algorithm, held, sentence, gain)


def reading(pool: Ghosts, algorithm: str, capacity: float | None) -> tuple[str, float]:
    """What the curve says, and by how much the best that was simulated surely hits more: the smallest as good as any.

    Where nothing surely hits more, one that is smaller and surely as good is named.
    """
    own = pool.near(algorithm, capacity)
    if own is None:
        return "Its ghosts tell of no size near its own, so there is nothing to set them against yet.", 0.0
    has, held = pool.share(own).value, own[1]
    gains = {which: pool.gain(which, own) for which in pool.told}
    more = {which: gain.value for which, gain in gains.items() if gain.above and gain.value >= SAME}
    most = max(more.values(), default=0.0)
    alike = [which for which, gain in gains.items() if 0 < which[1] < held and gain.value - ERRORS * gain.error > -SAME]
    good = [which for which, value in more.items() if value >= most - SAME] if more else alike
    told = f"{algorithm} hits {has:.0%} at {short(held)}"
    if not good:
        return f"{told}.", 0.0
    size, name = min((size, name) for name, size in good)
    best = has + gains[name, size].value
    return f"{told}; the best simulated, {name} at {short(size)}, {best:.0%}.", more.get((name, size), 0.0)
