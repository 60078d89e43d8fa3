"""Advice on what no knob of ours sets: routing, sharing as such, prefill against decode. It only ever recommends."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from pydantic import Field

from tiertune_agent.fields import Json
from tiertune_agent.records import FLEET, Prospect, Target, Windows
from tiertune_agent.tuners.balance import Demand, demand, evened
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
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, Ratio, Summand, ratio
from tiertune_agent.tuners.tier_size import nearest, present_shape, simulated
from tiertune_connector.units import Duration
from tiertune_connector.whatif.chain import PREFIX_ROUTING, Shape

ADVICE = "advice."
"""Prefix of fields that are in no tuning document: only people can apply them."""
DECAY = 0.9
"""Weight of what was seen a period earlier."""


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


def compared(current: Current, period_s: float, other: Callable[[Shape], str]) -> tuple[float, Ratio, int] | None:
    """The present shape against the one that ``other`` names; None if too few prospects have costs of both.

    Mean seconds to the first token now, the share of them that the other saves (negative if it costs), and requests.
    """
    pairs = [
        (prospect, pair)
        for prospect in current.prospects
        if prospect.requests and current.target.namespace in ("", prospect.namespace)
        if (pair := _pair(prospect, present_shape(current), other))
    ]
    if len(pairs) < ENOUGH_WINDOWS:
        return None
    newest = max(prospect.start for prospect, _ in pairs)
    parts = []
    for prospect, (now_s, other_s) in pairs:
        weight = DECAY ** ((newest - prospect.start).total_seconds() / period_s)
        parts.append(Summand(prospect.requests * (now_s - other_s), prospect.requests * now_s, weight))
    requests = sum(part.weight * prospect.requests for part, (prospect, _) in zip(parts, pairs, strict=True))
    now_s = sum(part.weight * part.per for part in parts) / requests
    return (now_s, ratio(parts), sum(prospect.requests for prospect, _ in pairs)) if now_s > 0 else None


def _pair(prospect: Prospect, now: Shape, other: Callable[[Shape], str]) -> tuple[float, float] | None:
    """Seconds of a shape and of its ``other``, for the shape nearest to the present one that has both costs."""
    both = [shape for shape in simulated(prospect) if other(shape) in prospect.costs and other(shape) != str(shape)]
    if not both:
        return None
    shape = nearest(both, now)
    return prospect.costs[str(shape)], prospect.costs[other(shape)]


def _apart(stages: Mapping[str, Demand]) -> str:
    if not stages:
        return "not enough data, no GPU has told how long it was busy"
    told = ", ".join(f"{name} {each.busy:.0%} ({each.gpus})" for name, each in sorted(stages.items()))
    return f"prefill and decode have no GPUs of their own; busy are {told}"
