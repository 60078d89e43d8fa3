"""What a change is judged by: the old and the new setting on the same samples, where possible. Pure.

Nobody simulates what a tier would have held under another admission: there the windows before a change are compared
with those after it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from statistics import fmean

from tiertune_agent.records import GIB, Decision, Prospect, Rates, State, Window, Windows
from tiertune_agent.tuners import gate_settings, remote_fetch
from tiertune_agent.tuners.admission import Passage, passed
from tiertune_agent.tuners.base import Proposal, TypicalCandidate
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, Summand
from tiertune_agent.tuners.ghosts import ghost_tokens, nearest
from tiertune_agent.tuners.lengths import between
from tiertune_agent.tuners.remote_fetch import asked, estimated
from tiertune_agent.tuners.tier_size import new_seconds, rent_s, size_of
from tiertune_agent.verdicts.holdout import GROUPS, sums
from tiertune_agent.verdicts.verdict import Groups, Pair, Spells, Trial, Verdict
from tiertune_connector.whatif.chain import Shape

NO_PRICES = Rates()
"""Seconds alone are weighed."""
HELD_OUT = "seconds per token, measured by holdout"
"""What the values of a trial by holdout are."""


def measure(decision: Decision | Proposal) -> str:
    """What to judge a change by: fetch, floor (a lowered one), admission, eviction, size; empty: nothing."""
    if decision.field == remote_fetch.FIELD:
        return "fetch"
    if decision.field == gate_settings.FLOOR:
        return "floor" if decision.after < (decision.before or 0) else ""
    if decision.field.startswith("admission."):
        return "admission"
    last = decision.field.rpartition(".")[2]
    if last == "eviction":
        return "eviction"
    return "size" if last == "capacity_bytes" and "shape" in decision.evidence else ""


def unweighed(decision: Decision | Proposal) -> Verdict:
    """The verdict on a change that nothing measures."""
    if decision.field == gate_settings.HOLDOUT:
        told = (
            f"an experiment, and no setting with a better value: {decision.after:.1%} of the requests are held out, as "
            "the policy says; what fetching saves by it is in the ledger"
        )
    elif decision.field == gate_settings.FLOOR:
        told = "what is not fetched cannot be seen to pay: unless the policy says so, it is tried again after a day"
    else:
        return Verdict(State.INCONCLUSIVE, f"there is nothing to weigh {decision.field} by", {})
    return Verdict(State.KEPT, told, {})


def fetch_trial(after: str, windows: Windows, typical: TypicalCandidate | None) -> Trial:
    """Fetching against recomputing, when fetching was switched to ``after`` (on, off).

    On is measured by a holdout if there is one, else by outcomes (what the gate refuses costs as much as recomputing).
    Off is judged by estimates: then requests that are not held out do not fetch either.
    """
    on = after == "on"
    if on and (measured := _measured(windows)).windows >= ENOUGH_WINDOWS:
        return measured
    pairs = []
    for window in windows:
        evidence = asked(window) if on else estimated(window, typical)
        if evidence and evidence.recompute_s > 0:
            gain_s = evidence.saved_s - evidence.lost_s if on else evidence.gain_s
            fetched = 1 - gain_s / evidence.recompute_s
            pairs.append(Pair(1.0, fetched, evidence.recompute_s) if on else Pair(fetched, 1.0, evidence.recompute_s))
    return Trial(pairs, "cost of what could be fetched, recomputing being 1")


def floor_trial(before: int, after: int, windows: Iterable[Window]) -> Trial:
    """Recomputing lengths between two floors, the second lower, against fetching them, by outcomes since.

    A length class counts if it begins between the floors.
    """
    pairs = []
    for window in windows:
        evidence, gained = asked(window), between(window, after, before)
        if evidence and evidence.recompute_s > 0 and gained.per:
            pairs.append(Pair(1.0, 1 - gained.of / evidence.recompute_s, evidence.recompute_s))
    return Trial(pairs, f"cost of what could be fetched, recomputing from {after} to {before} tokens being 1")


def admission_trial(windows: Windows, tier: str, rates: Rates, *, changed_at: datetime, filled_at: datetime) -> Spells:
    """Prompts before a change of a tier's admission against those from ``filled_at`` on; windows of the whole store.

    A prompt costs what computing all of it would, minus the worth of what was found in the tier, plus what the network
    cost. A byte found is worth the same in both spells, so that a faster link or a longer backlog does not pass for a
    better admission.
    """
    before = passed([window for window in windows if window.start < changed_at], tier)
    after = passed([window for window in windows if window.start >= filled_at], tier)
    both = (*before, *after)
    tokens, nbytes = sum(seen.asked_tokens for seen in both), sum(seen.asked_bytes for seen in both)
    token_s = sum(seen.recompute_s for seen in both) / tokens if tokens else 0.0
    byte_s = sum(seen.saved_s for seen in both) / nbytes if nbytes else 0.0
    gib_s = rates.network_gib * 3600 / rates.gpu_hour if tier == "remote" and rates.gpu_hour else 0.0

    def parts(spell: Sequence[Passage]) -> list[Summand]:
        return [
            Summand(prompts_s - seen.asked_bytes * byte_s + gib_s * seen.sent_bytes / GIB, prompts_s)
            for seen in spell
            if seen.readable and (prompts_s := seen.prompt_tokens * token_s) > 0
        ]

    return Spells(parts(before), parts(after), f"cost of the prompts, without {tier} being 1")


def eviction_trial(windows: Iterable[Window], before: str, after: str, capacity: float | None) -> Trial:
    """Ghosts of two algorithms at about the pool's size (``capacity`` in bytes)."""
    told = [missed for window in windows if (missed := _missed(window, before, after, capacity))]
    return Trial(told, "missed share of the prompts")


def size_trial(
    prospects: Iterable[Prospect], before: Shape, after: Shape, *, rates: Rates = NO_PRICES, hosts: int = 1
) -> Trial:
    """Two shapes on the same requests; namespaces seen at about the same time are added up.

    A size that was taken for its rent may lose seconds that are worth less: each request bears as much of what the new
    shape's rent is more or less, in seconds, so that this adds nothing to the doubt.
    """
    told = sorted((prospect for prospect in prospects if prospect.requests), key=lambda prospect: prospect.start)
    part_s = min((prospect.seconds for prospect in told), default=0.0) or 1.0  # namespaces report at different times
    parts: dict[int, list[tuple[int, float, float]]] = {}
    weighed = []
    for prospect in told:
        old, new = cost_of(prospect, before), cost_of(prospect, after)
        if old is not None and new is not None:
            part = int((prospect.start - told[0].start).total_seconds() / part_s + 0.5)
            parts.setdefault(part, []).append((prospect.requests, prospect.requests * old, prospect.requests * new))
            weighed.append(prospect)
    rent_each_s = 0.0
    if weighed:
        more_s = rent_s(after, rates, hosts) - rent_s(before, rates, hosts)
        rent_each_s = more_s * sum(new_seconds(weighed)) / 3600 / sum(one.requests for one in weighed)
    summed = [[sum(column) for column in zip(*rows, strict=True)] for rows in parts.values()]
    pairs = [Pair(old_s / asked, new_s / asked + rent_each_s, float(asked)) for asked, old_s, new_s in summed]
    rented = ", with the difference in rent" if rent_each_s else ""
    return Trial(pairs, f"seconds to the first token per request{rented}")


def shapes(decision: Decision) -> tuple[Shape, Shape]:
    """Shapes before and after a change of a tier's size.

    In the decision's evidence, ``shape`` is what stood when it was decided, ``best`` where it was to go. A step of the
    way there goes the same part of the way in every tier.
    """
    told, tier = decision.evidence, decision.target.tier
    before, best = Shape.parse(told["shape"]), Shape.parse(told.get("best", told["shape"]))
    began = size_of(before, tier)
    way = size_of(best, tier) - began
    part = min(1.0, max(0.0, (decision.after - began) / way)) if way else 0.0  # the host may be unlike the others
    after = Shape(*(round(size + part * (goal - size)) for size, goal in zip(before, best, strict=True)))
    return before, after._replace(**{tier: int(decision.after)})


def cost_of(prospect: Prospect, shape: Shape) -> float | None:
    """What requests would have cost under a shape: as simulated, or interpolated between the two nearest; or None.

    Half and double a size are equally far: of such the cheaper counts, whichever shape is asked for.
    """
    exact = prospect.costs.get(str(shape))
    if exact is not None:
        return exact
    near = sorted((apart, prospect.costs[key]) for apart, key in _nearest(tuple(prospect.costs), shape))[:2]
    if len(near) < 2:
        return None
    (one, cost), (other, further) = near
    return (cost * other + further * one) / (one + other)


@lru_cache(maxsize=64)
def _nearest(told: tuple[str, ...], shape: Shape) -> list[tuple[float, str]]:
    """The two nearest of the shapes told of, and all as near as they are; cached: a week of prospects tells of few."""
    apart = sorted((_distance(Shape.parse(key), shape), key) for key in told if "@" not in key)
    return [one for one in apart if one[0] <= apart[:2][-1][0]]


def coarse(trial: Trial, parts: int) -> Trial:
    """The trial as at most ``parts`` means of neighbouring windows, which depend less on each other."""
    size = -(-trial.windows // parts) or 1
    pairs = []
    for start in range(0, trial.windows, size):
        before, after, weights = zip(*trial.pairs[start : start + size], strict=True)
        pairs.append(Pair(fmean(before, weights), fmean(after, weights), sum(weights)))
    return replace(trial, pairs=pairs)


def _measured(windows: Windows) -> Groups:
    """Requests held out against those that fetch, where a window has both.

    Weighed as Mantel and Haenszel weigh strata (1959): unbiased in windows of a request each, where a mean of ratios is
    not, and whatever traffic and the share held out were in each.
    """
    groups = ([sums(window, group) for group in GROUPS] for window in windows)
    both = [(held, fetched) for held, fetched in groups if held.tokens > 0 and fetched.tokens > 0]
    pairs = [
        Pair(held.per_token, fetched.per_token, held.tokens * fetched.tokens / (held.tokens + fetched.tokens))
        for held, fetched in both
    ]
    return Groups(pairs, HELD_OUT)


def _missed(window: Window, before: str, after: str, capacity: float | None) -> Pair | None:
    """Missed shares of both algorithms at a size near ``capacity``, by tokens; None if they share no such size."""
    told = ghost_tokens(window)
    size = nearest([size for name, size in told if name == before and (after, size) in told], capacity)
    if size is None:
        return None
    (had, of), (hit, asked) = told[before, size], told[after, size]
    return Pair((of - had) / of, (asked - hit) / asked, of)


def _distance(one: Shape, other: Shape) -> float:
    """Sum over the tiers of the difference relative to the larger size."""
    return sum((abs(a - b) / max(a, b) for a, b in zip(one, other, strict=True) if a != b), 0.0)
