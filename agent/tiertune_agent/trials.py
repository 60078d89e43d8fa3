"""What a change is judged by: the old and the new setting on the same samples. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from tiertune_agent.holdout import sums
from tiertune_agent.records import Decision, Prospect, Window
from tiertune_agent.tuners.base import Candidate
from tiertune_agent.tuners.remote_fetch import FIELD, asked, estimated
from tiertune_agent.verdict import ENOUGH_WINDOWS, Trial
from tiertune_connector.whatif.chain import Shape


def measure(decision: Decision) -> str:
    """What tells whether the change was right: fetch, eviction, size; empty: nothing does."""
    if decision.field == FIELD:
        return "fetch"
    last = decision.field.rpartition(".")[2]
    if last == "eviction":
        return "eviction"
    return "size" if last == "capacity_bytes" and "shape" in decision.evidence else ""


def fetch_trial(decision: Decision, windows: Sequence[Window], typical: Candidate | None) -> Trial:
    """Fetching against recomputing: by a holdout where there is one, else by outcomes, or estimates while it is off."""
    fetched, recomputed = _held_out(windows)
    of = "seconds per token, measured by holdout"
    if len(fetched) < ENOUGH_WINDOWS:
        look = asked if decision.after == "on" else lambda window: estimated(window, typical)
        seen = [evidence for window in windows if (evidence := look(window)) and evidence.recompute_s > 0]
        fetched = [1 - evidence.gain_s / evidence.recompute_s for evidence in seen]
        recomputed, of = [1.0] * len(fetched), "cost of what could be fetched, recomputing being 1"
    before, after = (recomputed, fetched) if decision.after == "on" else (fetched, recomputed)
    return Trial(tuple(before), tuple(after), of)


def eviction_trial(windows: Iterable[Window], before: str, after: str, capacity: float | None) -> Trial:
    """Two algorithms' ghosts at the pool's size (``capacity`` in bytes; None: whichever both have most of)."""
    pairs = [pair for window in windows if (pair := _missed(window, before, after, capacity))]
    return Trial(tuple(old for old, _ in pairs), tuple(new for _, new in pairs), "missed share of the prompts")


def size_trial(prospects: Iterable[Prospect], before: Shape, after: Shape) -> Trial:
    """Two shapes on the same requests, of all namespaces that were seen at a time together."""
    periods: dict[Any, list[tuple[int, float, float]]] = {}
    for prospect in prospects:
        old, new = cost_of(prospect, before), cost_of(prospect, after)
        if prospect.requests and old is not None and new is not None:
            periods.setdefault(prospect.start, []).append((prospect.requests, old, new))
    before_s, after_s = [], []
    for seen in periods.values():
        weights = [requests for requests, _, _ in seen]
        before_s.append(fmean([cost for _, cost, _ in seen], weights))
        after_s.append(fmean([cost for _, _, cost in seen], weights))
    return Trial(tuple(before_s), tuple(after_s), "seconds to the first token per request")


def shapes(decision: Decision) -> tuple[Shape, Shape]:
    """Before and after a change of a tier's size: ``shape`` in its evidence is what stood when it was decided.

    ``best`` is where it was to go; a step of the way there takes as much of the way in every tier.
    """
    before, tier = Shape.parse(decision.evidence["shape"]), decision.target.tier
    best = Shape.parse(decision.evidence["best"]) if "best" in decision.evidence else before
    way = vars(best)[tier] - vars(before)[tier]
    part = (decision.after - vars(before)[tier]) / way if way else 0.0
    part = min(1.0, max(0.0, part))  # the host may be unlike the others
    sizes = {name: round(size + part * (vars(best)[name] - size)) for name, size in vars(before).items()}
    return before, Shape(**{**sizes, tier: int(decision.after)})


def cost_of(prospect: Prospect, shape: Shape) -> float | None:
    """What requests would have cost under a shape: simulated, or between the two nearest that were."""
    exact = prospect.costs.get(str(shape))
    if exact is not None:
        return exact
    simulated = [(Shape.parse(text), cost) for text, cost in prospect.costs.items() if "@" not in text]
    near = sorted((_distance(each, shape), cost) for each, cost in simulated)[:2]
    if len(near) < 2:
        return None
    (one, cost), (other, further) = near
    return (cost * other + further * one) / (one + other)


def coarse(trial: Trial, parts: int) -> Trial:
    """The same in at most ``parts`` means of neighbouring windows, which depend less on each other."""
    size = -(-len(trial.before) // parts) or 1
    cuts = range(0, len(trial.before), size)
    before, after = (tuple(fmean(side[cut : cut + size]) for cut in cuts) for side in (trial.before, trial.after))
    return Trial(before, after, trial.of)


def _held_out(windows: Iterable[Window]) -> tuple[list[float], list[float]]:
    fetched, held = [], []
    for window in windows:
        groups = [sums(window, group) for group in ("fetched", "held")]
        if all(group.tokens > 0 for group in groups):
            fetched.append(groups[0].per_token)
            held.append(groups[1].per_token)
    return fetched, held


def _missed(window: Window, before: str, after: str, capacity: float | None) -> tuple[float, float] | None:
    """Of both algorithms at the size nearest to ``capacity`` that both were simulated at."""
    sizes = set(_ghosts(window, before)) & set(_ghosts(window, after))
    if not sizes:
        return None
    size = min(sizes, key=lambda each: abs(each - capacity)) if capacity is not None else max(sizes)
    old, new = _ghosts(window, before)[size], _ghosts(window, after)[size]
    return (old, new) if old is not None and new is not None else None


def _ghosts(window: Window, algorithm: str) -> dict[int, float]:
    """Missed share of the tokens by size in bytes."""
    counts: dict[int, dict[str, float]] = {}
    for labels, value in window.labelled("whatif_tokens_total"):
        if labels.get("algorithm") == algorithm:
            counts.setdefault(int(labels["capacity_bytes"]), {})[labels["result"]] = value
    return {
        size: results.get("miss", 0.0) / asked_for
        for size, results in counts.items()
        if (asked_for := sum(results.values())) > 0
    }


def _distance(one: Shape, other: Shape) -> float:
    """Relative to the larger of the two, tier by tier."""
    pairs = ((one.dram, other.dram), (one.disk, other.disk), (one.remote, other.remote))
    return sum((abs(a - b) / max(a, b) for a, b in pairs if a != b), 0.0)
