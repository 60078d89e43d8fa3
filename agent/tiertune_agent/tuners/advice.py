"""Advice on what no knob of ours sets: routing, sharing as such, prefill against decode, loading at other engines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import ClassVar

from pydantic import Field

from tiertune_agent.fields import Json
from tiertune_agent.records import FLEET, OBSERVED, StageWindow, Target, Windows, grouped, total
from tiertune_agent.tuners.base import (
    Answer,
    Current,
    NoChange,
    Period,
    Proposal,
    Scope,
    Tuner,
    TunerSettings,
    pool_targets,
)
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, ERRORS, Ratio, Summand, ratio
from tiertune_agent.tuners.tier_size import nearest, present_shape, simulated
from tiertune_connector.units import Duration
from tiertune_connector.whatif.chain import PREFIX_ROUTING, Shape

ADVICE = "advice."
"""Prefix of fields that are in no tuning document: only people can apply them."""
DECAY = 0.9
"""Weight of what was seen a period earlier."""
MIXED = "mixed"
COMPUTES = ("prefill", "decode", MIXED)
"""Phases in which a GPU works; in the others it waits."""
OBSERVED_S = 600.0
"""Fewer seconds of a GPU may be chance: in a few windows one stage is often the busier."""
BUSY = 0.7
"""Below this share, another GPU hardly shortens a queue: waits grow as 1 / (1 - busy)."""
WAIT_S, LOADED = "observed_wait_seconds_total", "observed_loaded_tokens_total"
PREFILL_S, COMPUTED = "observed_prefill_seconds_total", "observed_prefill_tokens_total"
REQUESTS = "requests_total"


class AdviceSettings(TunerSettings):
    advisory: ClassVar = True

    period: Period = 3600.0
    hold_off: Duration = 21600.0
    """What was rejected waits at least twice as long."""
    min_gain: float = Field(default=0.03, ge=0.0, le=1.0)
    """Least share of the mean time to the first token that following it must save."""


class Advice(Tuner):
    """What all advice has in common. Unless it says otherwise, it is for the fleet, or for each of its namespaces."""

    key = "advice"
    scope: ClassVar[Scope] = "fleet"
    settings: AdviceSettings

    def _against(
        self, current: Current, other: Callable[[Shape], str], way: str, unknown: str, *, now: str, after: str
    ) -> Answer:
        """Whether the ``way`` that ``other`` names is better than the present one, from ``now`` to ``after``."""
        found, least = compared(current, self.settings.period, other), self.settings.min_gain
        if found is None:
            return NoChange(f"{self.name} stays, not enough data: no samples tell yet what {unknown}")
        now_s, gain, requests = found
        change = "cut" if gain.value > 0 else "raise"
        told = (
            f"{way} would {change} the mean time to the first token by {abs(gain.value):.1%} (standard error "
            f"{gain.error:.1%}), from {1000 * now_s:.4g} to {1000 * now_s * (1 - gain.value):.4g} ms, "
            f"{requests} requests"
        )
        evidence = {"now_s": now_s, "requests": requests, **gain.document("gain")}
        if not gain.above or gain.value < least:
            return NoChange(f"{self.name} stays: {told}; advice takes {least:.1%}", evidence)
        return Proposal(f"{ADVICE}{self.name}", now, after, told, evidence, requests)


class Routing(Advice):
    """Whether requests would wait less if each went to the host that last had most of its prompt."""

    name = "routing"

    def targets(self, store: str, status: Json) -> list[Target]:  # noqa: ARG002 (the fleet's)
        return pool_targets(FLEET, "dram", status)

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (prospects are enough)
        if current.hosts < 2:
            return NoChange("routing stays: there is one host, and nothing to route between")
        way = "routing each request to the host that has most of its prompt"
        unknown = "routing by prefix would do"
        return self._against(
            current, lambda shape: f"{shape}{PREFIX_ROUTING}", way, unknown, now="as it is", after="by prefix"
        )


class Sharing(Advice):
    """Whether requests would wait less if nothing came from the remote tier."""

    name = "sharing"

    def targets(self, store: str, status: Json) -> list[Target]:  # noqa: ARG002 (the fleet's)
        return pool_targets(FLEET, "remote", status)

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (prospects are enough)
        if not current.remote_bytes:
            return NoChange("nothing is shared: there is no remote tier")
        return self._against(
            current,
            lambda shape: str(Shape(shape.dram, shape.disk, 0)),
            "not sharing",
            "no remote tier would cost",
            now="shared",
            after="not shared",
        )


class Balance(Advice):
    """Whether the GPUs of one stage are busy while those of the other wait."""

    name = "balance"

    def targets(self, store: str, status: Json) -> list[Target]:  # noqa: ARG002 (the fleet's)
        return [Target(FLEET, "gpu")]

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (stages are enough)
        stages = demand(current.stages)
        if not {"prefill", "decode"} <= set(stages):
            return NoChange(f"the stages stay as they are: {_apart(stages)}")
        prefill, decode = stages["prefill"], stages["decode"]
        told = f"prefill GPUs are busy {prefill.busy:.0%} ({prefill.gpus}), decode {decode.busy:.0%} ({decode.gpus})"
        evidence = {name: vars(each) for name, each in stages.items()}
        after = evened(prefill, decode, self.settings.min_gain)
        if after is None:
            return NoChange(f"the stages stay as they are: {told}", evidence)
        before = {"prefill": prefill.gpus, "decode": decode.gpus}
        busiest = max(prefill.share(after["prefill"]), decode.share(after["decode"]))
        reason = f"{told}: move one, and the busier are at {busiest:.0%}"
        return Proposal(f"{ADVICE}balance", before, after, reason, evidence)


class Loading(Advice):
    """Compares seconds of requests: waiting for loaded tokens against the prefill of computed ones.

    Loaded tokens are the first of their prompts, which are the cheapest to compute: if loading loses against the mean
    computed token, it loses all the more against computing the loaded ones.
    """

    name = "loading"
    scope = "store"

    def targets(self, store: str, status: Json) -> list[Target]:
        """The first tier beyond the GPU of an observed source; our own stores have a gate instead."""
        tiers = [tier for tier in status.get("tiers") or {} if tier != "gpu"]
        models = tuple(status.get("models") or ())
        return [Target(store, tiers[0], models=models)] if status.get(OBSERVED) and tiers else []

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (windows are enough)
        whole = [window for window in history if not window.tier and window.observed]
        wait, compute = _per_token(whole, WAIT_S, LOADED), _per_token(whole, PREFILL_S, COMPUTED)
        if wait is None or compute is None:
            return NoChange("not enough data: it is not told what loading and computing take, or too little happened")
        requests = int(total(whole, REQUESTS))
        gain, error = compute.value - wait.value, hypot(wait.error, compute.error)
        evidence = {
            **wait.document("loaded_token_s"),
            **compute.document("computed_token_s"),
            "requests": requests,
        }
        told = (
            f"requests waited {1e6 * wait.value:,.0f} ms for 1000 loaded tokens, and {1e6 * compute.value:,.0f} ms for "
            f"1000 computed ones (standard error of the difference {1e6 * error:,.0f} ms)"
        )
        if -gain > ERRORS * error and -gain >= self.settings.min_gain * compute.value:
            return Proposal(f"{ADVICE}loading", "load", "recompute", told, evidence, requests)
        return NoChange(f"{'loading pays' if gain > ERRORS * error else 'loading stays'}: {told}", evidence)


def compared(current: Current, period_s: float, other: Callable[[Shape], str]) -> tuple[float, Ratio, int] | None:
    """The present shape against the one that ``other`` names; None if too few prospects have costs of both.

    Mean seconds to the first token now, the share of them that the other saves (negative if it costs), and requests.
    """
    now, rows = present_shape(current), []
    for prospect in current.prospects:
        both = [shape for shape in simulated(prospect) if other(shape) in prospect.costs and other(shape) != str(shape)]
        if both and prospect.requests and current.target.namespace in ("", prospect.namespace):
            shape = nearest(both, now)
            rows.append((prospect, prospect.costs[str(shape)], prospect.costs[other(shape)]))
    if len(rows) < ENOUGH_WINDOWS:
        return None
    newest = max(prospect.start for prospect, *_ in rows)
    parts, asked = [], 0.0
    for prospect, now_s, other_s in rows:
        weight = DECAY ** ((newest - prospect.start).total_seconds() / period_s)
        parts.append(Summand(prospect.requests * (now_s - other_s), prospect.requests * now_s, weight))
        asked += weight * prospect.requests
    mean_s = sum(part.weight * part.per for part in parts) / asked
    return (mean_s, ratio(parts), sum(prospect.requests for prospect, *_ in rows)) if mean_s > 0 else None


@dataclass(frozen=True)
class Demand:
    """The GPUs of one stage, and the share of time in which they work."""

    gpus: int
    busy: float

    def share(self, gpus: int) -> float:
        """How busy ``gpus`` GPUs would be with the same work."""
        return self.busy * self.gpus / gpus


def demand(windows: Sequence[StageWindow]) -> dict[str, Demand]:
    """Demand by stage, for stages whose GPUs were observed for long enough: the steps' GPU seconds of all that passed.

    Where no steps are known, by the GPUs' own utilisation.
    """
    found = {}
    for stage, mine in sorted(grouped(windows, lambda window: window.stage).items()):
        observed = [window for window in mine if window.gpu]
        gpus, passed_s = len({(window.store, window.gpu) for window in observed}), sum(one.seconds for one in observed)
        phases = {window.phase for window in mine}.intersection(COMPUTES)
        if phases == {MIXED}:  # no engine's steps but a profiled module's, which may be a part of what its GPUs do
            phases = set()
        steps = [window.gpu_seconds for window in mine if window.phase in phases]
        if gpus and passed_s >= OBSERVED_S * gpus:
            work = steps or [(window.utilization or 0.0) * window.seconds for window in observed]
            found[stage] = Demand(gpus, sum(work) / passed_s)
    return found


def evened(prefill: Demand, decode: Demand, least: float) -> dict[str, int] | None:
    """The GPUs of each stage after one was moved; None if that would not help, or no stage needs help."""
    busier, other = (prefill, decode) if prefill.busy > decode.busy else (decode, prefill)
    if busier.busy < BUSY or other.gpus < 2:
        return None
    if max(busier.share(busier.gpus + 1), other.share(other.gpus - 1)) >= busier.busy * (1 - least):
        return None
    more = 1 if busier is prefill else -1
    return {"prefill": prefill.gpus + more, "decode": decode.gpus - more}


def _per_token(windows: Windows, seconds: str, tokens: str) -> Ratio | None:
    """Seconds per token; None if unknown, or if too few windows had any."""
    told = [
        Summand(spent, count)
        for window in windows
        if (spent := window.known(seconds)) is not None and (count := window.known(tokens)) is not None
        if spent or count
    ]
    found = ratio(told)
    return found if found.windows >= ENOUGH_WINDOWS else None


def _apart(stages: Mapping[str, Demand]) -> str:
    if not stages:
        return "not enough data, no GPU has told how long it was busy"
    told = ", ".join(f"{name} {each.busy:.0%} ({each.gpus})" for name, each in sorted(stages.items()))
    return f"prefill and decode have no GPUs of their own; busy are {told}"
