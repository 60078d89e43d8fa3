"""What each DRAM pool would have hit at other sizes and with other algorithms, by its ghosts' counters. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite, log

from tiertune_agent.fields import Json, JsonDict, in_force, read
from tiertune_agent.records import Window, grouped
from tiertune_agent.tuners.evidence import ERRORS, Ratio, Summand, ratio
from tiertune_agent.tuners.ghosts import Which, ghost_tokens, nearest
from tiertune_agent.web.charts import Chart
from tiertune_agent.web.over_sizes import Line, curve_chart, short

SAME = 0.005
"""Ratios that differ by less are reported as the same, because ghosts may err by about as much."""
MOST_OF_IT = 0.9
"""The size to name is one that brings this share of what the largest would bring."""
TOLD = 8
"""Pools that the page draws; the API has all."""


Told = tuple[datetime, float, float]
"""When, tokens hit, tokens asked for."""


@dataclass(frozen=True)
class Counted:
    """What the ghosts of one pool counted in one window."""

    namespace: str
    model: str
    tokens: Mapping[Which, Told]


def counted(window: Window) -> Counted | None:
    """The window's counts; None if its ghosts were asked for nothing."""
    tokens = ghost_tokens(window)
    told = {which: (window.start, *counts) for which, counts in tokens.items()}
    return Counted(window.namespace, window.model, told) if told else None


class Ghosts:
    """The ghosts of one pool, at the sizes simulated last; keeps what was computed from them."""

    def __init__(self, seen: Sequence[Counted]) -> None:
        """``seen``: windows of one pool, oldest first; at least one."""
        newest = seen[-1]
        self.namespace, self.model = newest.namespace, newest.model
        self.told = {which: [one.tokens[which] for one in seen if which in one.tokens] for which in newest.tokens}
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
        return sum(asked for _, _, asked in self.told[which])

    def share(self, which: Which) -> Ratio:
        """Share of the tokens asked for that were hit."""
        if which not in self._shares:
            self._shares[which] = ratio([Summand(hit, asked) for _, hit, asked in self.told[which]])
        return self._shares[which]

    def gain(self, one: Which, than: Which) -> Ratio:
        """Share of the tokens that one ghost hit beyond another."""
        if (one, than) not in self._gains:
            self._gains[one, than] = ratio([Summand(more, of) for _, more, of in self.more(one, than)])
        return self._gains[one, than]

    def more(self, one: Which, than: Which) -> list[tuple[datetime, float, float]]:
        """Per window: when, tokens that one ghost hit beyond another, of how many; both saw the same requests."""
        other = {at: (hit, asked) for at, hit, asked in self.told[than]}
        return [
            (at, hit / asked * other[at][1] - other[at][0], other[at][1])
            for at, hit, asked in self.told[one]
            if at in other
        ]


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
    """Gain in hit ratio by the best that was simulated."""

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
    """What the curve says, and the most by which the hit ratio would have been higher."""
    drawn = algorithm if len(pool.sizes(algorithm)) > 1 else pool.algorithms[0]
    own = pool.near(drawn, capacity)
    if own is None:
        return "Its ghosts tell of no size near its own, so there is nothing to set them against yet.", 0.0
    has, held = pool.share(own).value, own[1]
    steps = [(size, pool.gain((drawn, size), own)) for size in pool.sizes(drawn)]
    larger, smaller = [step for step in steps if step[0] > held], [step for step in steps if step[0] < held]
    sentences = [_larger(drawn, has, held, larger), _smaller(has, held, smaller)]
    best = max((step.value for _, step in larger), default=0.0)
    now = pool.near(algorithm, capacity)
    if now is not None:
        rivals = [pool.near(name, now[1]) for name in pool.algorithms if name != algorithm]
        more = {rival[0]: pool.gain(rival, now) for rival in rivals if rival}
        sentences.append(_rival(algorithm, pool.share(now).value, more))
        best = max([best, *(each.value for each in more.values())])
    return " ".join(filter(None, sentences)), best


def _larger(name: str, has: float, own: int, larger: Sequence[tuple[int, Ratio]]) -> str:
    if not larger:
        return f"{name} hits {has:.0%} at {short(own)}; no larger size was simulated."
    most, gain = larger[-1]
    if surely_same(gain):
        return f"More DRAM would have brought nothing: {short(most)} would have hit {has + gain.value:.0%} too."
    if gain.value < SAME:
        before = f"Whether more DRAM would have brought something cannot be told yet: {short(most)} "
        told = f"would have hit {has + gain.value:.0%} instead of {has:.0%}{doubt(gain)}."
        return before + told
    size, gain = next(step for step in larger if step[1].value >= MOST_OF_IT * gain.value)
    return f"At {short(size)} {name} would have hit {has + gain.value:.0%} instead of {has:.0%}{doubt(gain)}."


def _smaller(has: float, own: int, smaller: Sequence[tuple[int, Ratio]]) -> str:
    enough = [size for size, gain in smaller if gain.value - ERRORS * gain.error > -SAME]
    if enough:
        return f"{short(enough[0])} would have done as well."
    if not smaller:
        return ""
    half, gain = min(smaller, key=lambda step: abs(log(2 * step[0] / own)))
    return f"At {short(half)} it would have hit {has + gain.value:.0%}."


def _rival(present: str, has: float, more: Mapping[str, Ratio]) -> str:
    if not more:
        return ""
    name, gain = max(more.items(), key=lambda item: item[1].value)
    if all(map(surely_same, more.values())):
        return f"No other algorithm would have hit more than {present} at the present size."
    if gain.value < SAME:
        return f"Whether another algorithm would have hit more than {present} cannot be told yet."
    return f"At the present size {name} would have hit {has + gain.value:.0%} instead of {has:.0%}{doubt(gain)}."


def surely_same(gain: Ratio) -> bool:
    """Whether it certainly is no gain."""
    return gain.value + ERRORS * gain.error < SAME


def doubt(gain: Ratio) -> str:
    """Two standard errors of a difference of shares."""
    if not isfinite(gain.error):
        return " (too few windows to say how sure)"
    points = ERRORS * gain.error * 100
    return f" (± {points:.1f} points)" if points >= 0.05 else " (± less than 0.1 points)"
