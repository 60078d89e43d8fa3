"""How large should a tier be? Weighs seconds of requests, from the fleet's miniature simulations, against the rent."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import groupby
from math import ceil, floor, inf, sqrt
from operator import mul
from typing import ClassVar

from pydantic import Field, model_validator

from tiertune_agent.fields import REMOTE_CAPACITY, capacity_field, capacity_of
from tiertune_agent.records import GIB, Prospect, Rates, Windows, ended
from tiertune_agent.tuners.base import REMNANT, Answer, Current, NoChange, Period, Proposal, Tuner, TunerSettings
from tiertune_connector.documents import Document
from tiertune_connector.tuning import LOCAL, TIERS
from tiertune_connector.units import Size, format_size
from tiertune_connector.whatif.chain import Shape

ENOUGH = 0.5
"""Periods that samples must cover before a size is changed; what the present size costs meanwhile is lost."""
ERRORS = 0.25
"""Standard errors that a gain must exceed: waiting for certainty costs more than an error. The soak judges by two."""
BINS = 5
"""Parts of a period; the standard error comes from the difference between two shapes in each part."""


class TierSizes(Document):
    """Bytes by tier; None: no bound."""

    dram: Size | None = None
    """For a store; None: no bound."""
    disk: Size | None = None
    """For a store; None: no bound."""
    remote: Size | None = None
    """For the Redis, if ``remote.manage`` is on; None: no bound."""


class TierSizeSettings(TunerSettings):
    looks: ClassVar[int] = 10

    period: Period = 300.0
    min: TierSizes = TierSizes()
    """Per store."""
    max: TierSizes = TierSizes()
    """Per store."""
    max_step: float = Field(default=0.5, gt=0.0, le=1.0)
    """Largest change at a time: a tier shrinks by at most this share of its size."""
    min_gain: float = Field(default=0.01, ge=0.0, le=1.0)
    """Least share of the present cost that another size must save. For less, DRAM takes what a budget leaves unused."""

    @model_validator(mode="after")
    def _ordered(self) -> "TierSizeSettings":
        for tier in TIERS:
            low, high = getattr(self.min, tier), getattr(self.max, tier)
            if low is not None and high is not None and low > high:
                raise ValueError(f"{tier}: min {format_size(low)} is above max {format_size(high)}")
        return self


@dataclass(frozen=True)
class Choice:
    """The best of some shapes against the present one."""

    shape: Shape
    before: float
    """Cost per hour of the present shape: money where prices are given, else engine seconds."""
    after: float
    error: float
    """Standard error of the difference."""
    seconds_before: float
    """To the first token, mean per request."""
    seconds_after: float
    requests: int
    spells: int
    """Parts of periods in which the difference was seen; a single one may be chance."""

    @property
    def gain(self) -> float:
        """Share of the present cost that is saved."""
        return 1 - self.after / self.before if self.before else 0.0


class TierSize(Tuner):
    name = "tier_size"
    key = "tier_size"
    scope = "size"
    tiers = LOCAL
    settings: TierSizeSettings

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (prospects are enough)
        tier, now, shapes = current.target.tier, present_shape(current), candidates(current)
        stays = f"{tier} stays at {format_size(size_of(now, tier))}"
        prospects, seconds = _telling(current.prospects, shapes)
        if len(shapes) < 2 or seconds < ENOUGH * self.settings.period - self.settings.look_s / 2:
            return NoChange(f"{stays}: no samples of half a period tell of another size yet")
        splits = current.budget_bytes is not None
        rates = Rates() if splits else current.rates
        if not rates.gpu_hour and rates.gib_hour.get(tier):
            return NoChange(f"{stays}: prices.gpu_hour is 0, so its rent cannot be weighed against seconds of requests")
        prospects, shapes = _with_bounds(prospects, shapes, current)
        stands = standing(shapes, now, splits=splits)
        least, most = current.least_bytes or 0, inf if current.most_bytes is None else current.most_bytes
        allowed = [shape for shape in shapes if shape == stands or least <= size_of(shape, tier) <= most]
        best = choose(prospects, stands, allowed, period_s=self.settings.period, rates=rates, hosts=current.hosts)
        if best is None:
            return NoChange(f"{stays}: no request came")
        told = _told(tier, now, best, splits=splits, money=bool(rates.gpu_hour))
        if size_of(best.shape, tier) == size_of(now, tier):
            other = "other size of it" if allowed == shapes else "other size within its bounds"
            return NoChange(f"{stays}: no {other} costs less; {told}")
        at = now if splits else stands._replace(**{tier: size_of(now, tier)})  # other tiers have their simulated sizes
        return self._step(at, best, told, current)

    def _step(self, at: Shape, best: Choice, told: str, current: Current) -> Answer:
        """The step from the present shape, ``at``, towards the best one; none if it is not sure to pay."""
        tier, budget, doubt = current.target.tier, current.budget_bytes, self._doubt(best)
        size, goal = size_of(at, tier), size_of(best.shape, tier)
        remnant = REMNANT * (budget or 0)
        unused = max(0, (budget or 0) - current.hosts * at.dram - current.remote_bytes)  # paid for already
        spare = unused > remnant and goal > size
        if doubt and not spare:
            return NoChange(f"{tier} stays: {doubt}; {told}")
        wanted, evidence = goal, {**asdict(best), "shape": str(at), "best": str(best.shape)}
        if budget is not None and goal > size:
            rest = current.remote_bytes
            step = int(self.settings.max_step * rest)
            given = rest if rest - step <= remnant else step  # of the remote: a step, or all if little would be left
            wanted = min(goal, size + (unused + (0 if doubt else given)) // current.hosts)
        if wanted != goal:
            evidence["goal"] = goal
        if spare:
            told += f"; {format_size(unused)} of the budget are unused"
        field = REMOTE_CAPACITY if tier == "remote" else capacity_field(tier)
        return Proposal(field, size, wanted, told, evidence, best.requests)

    def _doubt(self, best: Choice) -> str:
        """Why the change is not sure to pay; empty: it is."""
        if best.gain < self.settings.min_gain:
            return f"under {self.settings.min_gain:.1%}"
        certain = best.spells > 1 and best.before - best.after > ERRORS * best.error
        return "" if certain else "the samples do not tell it from chance"


def present_shape(current: Current) -> Shape:
    """The present sizes: DRAM and disk per host, and the remote tier."""
    dram, disk = (capacity_of(current.tuning, tier) for tier in LOCAL)
    return Shape(dram, disk, current.remote_bytes)


def candidates(current: Current) -> list[Shape]:
    """The shapes simulated last for all namespaces that differ from the present one in the target's tier alone.

    If one budget is split: those with the present disk whose DRAM and remote fit into it.
    """
    known = _known_of_all(current.prospects)
    if not known:
        return []
    tier, within = current.target.tier, current.budget_bytes
    now = standing(known, present_shape(current), splits=within is not None)
    if within is not None:
        return [s for s in known if s.disk == now.disk and current.hosts * s.dram + s.remote <= within]
    return [shape for shape in known if shape._replace(**{tier: size_of(now, tier)}) == now]


def _known_of_all(prospects: Sequence[Prospect]) -> list[Shape]:
    """What the newest prospects of all present namespaces have costs of: one may be simulated too coarsely for some."""
    newest = {prospect.namespace: prospect for prospect in prospects}.values()
    if not newest:
        return []
    since = max(prospect.start - timedelta(seconds=prospect.seconds) for prospect in newest)
    told = [set(simulated(prospect)) for prospect in newest if ended(prospect) >= since]
    return sorted(set.intersection(*told))


def simulated(prospect: Prospect) -> list[Shape]:
    """The shapes that it has costs of, not counting those under prefix routing."""
    return [Shape.parse(key) for key in prospect.costs if "@" not in key]


def _with_bounds(
    prospects: Sequence[Prospect], shapes: list[Shape], current: Current
) -> tuple[Sequence[Prospect], list[Shape]]:
    """Add shapes at the target's bounds, with costs interpolated between the simulated shapes around them."""
    tier, spent = current.target.tier, current.budget_bytes
    for bound in (ceil(current.least_bytes or 0), floor(current.most_bytes or 0)):
        line = [s for s in shapes if spent is None or current.hosts * s.dram + s.remote == spent]
        below = [shape for shape in line if size_of(shape, tier) < bound]
        above = [shape for shape in line if size_of(shape, tier) > bound]
        if not below or not above or len(below) + len(above) < len(line):
            continue
        low, high = below[-1], above[0]
        part = (bound - size_of(low, tier)) / (size_of(high, tier) - size_of(low, tier))
        at = Shape(*(round(a + part * (b - a)) for a, b in zip(low, high, strict=True)))
        prospects = [
            replace(one, costs={**one.costs, str(at): (1 - part) * one.costs[str(low)] + part * one.costs[str(high)]})
            for one in prospects
        ]
        shapes = sorted([*shapes, at])
    return prospects, shapes


def standing(shapes: Sequence[Shape], now: Shape, *, splits: bool) -> Shape:
    """The simulated shape that stands for the present one.

    If each host is sized by itself, one with the same local tiers, where there is one: a host may be far smaller than
    the others, around whose sizes the shapes were chosen.
    """
    alike = shapes if splits else [shape for shape in shapes if _local(shape) == _local(now)]
    return nearest(alike or shapes, now)


def _local(shape: Shape) -> tuple[bool, bool]:
    """Whether it has DRAM, and a disk."""
    return bool(shape.dram), bool(shape.disk)


def nearest(shapes: Iterable[Shape], to: Shape) -> Shape:
    """The shape whose sizes differ least."""
    return min(shapes, key=lambda shape: sum(abs(a - b) for a, b in zip(shape, to, strict=True)))


def choose(
    prospects: Sequence[Prospect],
    now: Shape,
    shapes: Sequence[Shape],
    *,
    period_s: float,
    rates: Rates,
    hosts: int,
) -> Choice | None:
    """The cheapest shape over the prospects, of which the newest weigh most; None if no request came.

    Every prospect has costs of all the shapes. Their seconds are summed, not averaged per request: a busy or dear hour
    says more than a quiet one. The standard error is that of the weighted sum of paired differences between two shapes
    over parts of periods.
    """
    spells = _spells(prospects, [str(shape) for shape in shapes], period_s)
    weights = [weight_at(spell.age) for spell in spells]
    hours = _sum(weights, [spell.seconds for spell in spells]) / 3600
    requests = sum(spell.requests for spell in spells)
    if not requests or not hours:
        return None
    seconds = [_sum(weights, costs) for costs in zip(*(spell.costs for spell in spells), strict=True)]
    weighted = _sum(weights, [spell.requests for spell in spells])
    price = rates.gpu_hour / 3600 if rates.gpu_hour else 1.0
    hourly = [price * (each / hours + rent_s(shape, rates, hosts)) for shape, each in zip(shapes, seconds, strict=True)]
    mine = list(shapes).index(now)
    best = min(range(len(shapes)), key=lambda index: (hourly[index], index != mine))
    differences = [spell.costs[mine] - spell.costs[best] for spell in spells]
    return Choice(
        shape=shapes[best],
        before=hourly[mine],
        after=hourly[best],
        error=price * _error(weights, differences) / hours,
        seconds_before=seconds[mine] / weighted,
        seconds_after=seconds[best] / weighted,
        requests=requests,
        spells=len(spells),
    )


def size_of(shape: Shape, tier: str) -> int:
    return int(getattr(shape, tier))


@dataclass
class _Spell:
    """Prospects of all namespaces in one part of a period."""

    age: float
    """Periods from its start to the start of the newest prospect."""
    costs: list[float]
    """Seconds of all requests, by shape."""
    requests: int = 0
    seconds: float = 0.0


def _spells(prospects: Sequence[Prospect], keys: Sequence[str], period_s: float) -> list[_Spell]:
    """The prospects, added up by parts of periods."""
    if not prospects:
        return []
    told = sorted(prospects, key=lambda prospect: prospect.start)
    spells: dict[int, _Spell] = {}
    for prospect, seconds in zip(told, new_seconds(told), strict=True):
        age_s = (told[-1].start - prospect.start).total_seconds()
        part = int(BINS * age_s / period_s)
        spell = spells.setdefault(part, _Spell(age_s / period_s, [0.0] * len(keys)))
        spell.requests += prospect.requests
        spell.seconds += seconds
        for index, key in enumerate(keys):
            spell.costs[index] += prospect.requests * prospect.costs[key]
    return list(spells.values())


def new_seconds(prospects: Sequence[Prospect]) -> Iterator[float]:
    """Seconds of each prospect, oldest first, that none before it tells of: namespaces report at different times."""
    until = prospects[0].start
    for prospect in prospects:
        end = ended(prospect)
        yield max(0.0, (end - max(prospect.start, until)).total_seconds())
        until = max(until, end)


def _telling(prospects: Sequence[Prospect], shapes: Sequence[Shape]) -> tuple[Sequence[Prospect], float]:
    """Prospects with costs of all the shapes, and the seconds that their unbroken runs cover in sum."""
    keys = [str(shape) for shape in shapes]
    telling: list[Prospect] = []
    seconds = 0.0
    for tells, row in groupby(sorted(prospects, key=ended), lambda one: all(key in one.costs for key in keys)):
        if tells:
            unbroken = list(row)
            telling += unbroken
            seconds += (ended(unbroken[-1]) - min(one.start for one in unbroken)).total_seconds()
    return telling, seconds


def weight_at(age: float) -> float:
    """Weight of what was seen ``age`` periods ago: hyperbolic, so the newest counts most and no burst is forgotten."""
    return 1 / (1 + age)


def _error(weights: Sequence[float], differences: Sequence[float]) -> float:
    """Standard error of a weighted sum."""
    mean = _sum(weights, differences) / sum(weights)
    return sqrt(sum((weight * (value - mean)) ** 2 for weight, value in zip(weights, differences, strict=True)))


def _sum(weights: Sequence[float], values: Sequence[float]) -> float:
    return float(sum(map(mul, weights, values)))


def rent_s(shape: Shape, rates: Rates, hosts: int) -> float:
    """Engine seconds that an hour of a shape is worth; 0 where either has no price."""
    if not rates.gpu_hour:
        return 0.0
    held = {"dram": hosts * shape.dram, "disk": hosts * shape.disk, "remote": shape.remote}
    return 3600 * sum(rates.gib_hour.get(tier, 0.0) * size / GIB for tier, size in held.items()) / rates.gpu_hour


def _told(tier: str, now: Shape, best: Choice, *, splits: bool, money: bool) -> str:
    what = f"{format_size(size_of(best.shape, tier))} of {tier} instead of {format_size(size_of(now, tier))}"
    if splits:
        what += f" per host, and {format_size(best.shape.remote)} instead of {format_size(now.remote)} of remote,"
    unit = "money per hour" if money else "engine seconds per hour"
    error = best.error / best.before if best.before else 0.0
    return (
        f"{what} would take {1000 * best.seconds_after:.4g} ms to the first token instead of "
        f"{1000 * best.seconds_before:.4g}, and {best.after:.4g} instead of {best.before:.4g} {unit} "
        f"({best.gain:.1%} less, standard error {error:.1%}, {best.requests} requests)"
    )


def horizon(period_s: float) -> timedelta:
    """How far back prospects count: older ones weigh less than a fiftieth."""
    return timedelta(seconds=50 * period_s)
