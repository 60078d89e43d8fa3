"""Has a local tier the right size? A first version that reads what passed through it, and only recommends."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tiertune_agent.fields import read
from tiertune_agent.records import Target, Window, median
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, Scope, TunerSettings, models, present
from tiertune_connector.units import Duration, Size, format_duration, format_size

HEADROOM = 1.25
"""A tier that evicts nothing keeps a quarter more than it ever held."""
BELOW = {"dram": ("disk", "remote"), "disk": ("remote",)}
MIB = 2**20


class TierSizes(BaseModel):
    """Bytes by tier; None: no bound."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dram: Size | None = None
    disk: Size | None = None
    remote: Size | None = None


class TierSizeSettings(TunerSettings):
    period: Duration = 300.0
    hold_off: Duration = 900.0
    min: TierSizes = TierSizes()
    """Per store."""
    max: TierSizes = TierSizes()
    """Per store."""
    max_step: float = Field(default=0.5, gt=0.0, le=1.0)
    """Largest change at a time, as a share of the capacity."""
    min_gain: float = Field(default=0.03, ge=0.0, le=1.0)
    """Share of prompt tokens that a larger tier must promise to serve itself."""

    @model_validator(mode="after")
    def _ordered(self) -> "TierSizeSettings":
        for tier in ("dram", "disk", "remote"):
            low, high = getattr(self.min, tier), getattr(self.max, tier)
            if low is not None and high is not None and low > high:
                raise ValueError(f"{tier}: min {format_size(low)} is above max {format_size(high)}")
        return self


@dataclass(frozen=True)
class Passage:
    """What passed through a tier in some windows."""

    seconds: float
    prompt_tokens: float
    hit_tokens: float
    below_tokens: float
    """Hits in the tiers below: an upper bound of what a larger tier could serve itself."""
    evictions: float
    idle_s: float | None
    """Median seconds that evicted chunks had lain unused."""
    first_bytes: float
    most_bytes: float
    last_bytes: float


class TierSize:
    name: ClassVar = "tier_size"
    scope: ClassVar[Scope] = "store"
    advisory: ClassVar = True

    def __init__(self, settings: TierSizeSettings) -> None:
        self.settings = settings

    def targets(self, store: str, status: Mapping[str, Any]) -> list[Target]:
        return [Target(store, tier, models=models(status)) for tier in BELOW if present(status, tier)]

    def evaluate(self, history: Sequence[Window], current: Current) -> Answer:
        tier, since = current.target.tier, current.changed_at
        capacity = read(current.tuning, f"tiers.{tier}.capacity_bytes") or 0
        seen = passage([window for window in history if since is None or window.start >= since], tier)
        if seen.seconds < self.settings.period:
            have, need = format_duration(seen.seconds), format_duration(self.settings.period)
            return NoChange(f"not enough data: {have} of windows, a period is {need}")
        if not capacity or not seen.prompt_tokens:
            return NoChange("the tier has no capacity" if not capacity else "no prompt token was looked up")
        return self._shrink(tier, capacity, seen) if not seen.evictions else self._grow(tier, capacity, seen)

    def _shrink(self, tier: str, capacity: int, seen: Passage) -> Answer:
        enough = -int(-seen.most_bytes * HEADROOM // MIB) * MIB
        told = f"{tier} evicted nothing and held at most {format_size(seen.most_bytes)} of {format_size(capacity)}"
        if enough >= capacity:
            return NoChange(f"{told}: the size fits", asdict(seen))
        if seen.last_bytes - seen.first_bytes > 0.01 * capacity:
            return NoChange(f"{told}, and still fills", asdict(seen))
        reason = f"{told} in {format_duration(seen.seconds)}: {format_size(enough)} would do"
        return Proposal(f"tiers.{tier}.capacity_bytes", capacity, enough, reason, asdict(seen))

    def _grow(self, tier: str, capacity: int, seen: Passage) -> Answer:
        share = seen.below_tokens / seen.prompt_tokens
        idle = f", unused for {format_duration(seen.idle_s)} (median)" if seen.idle_s is not None else ""
        told = (
            f"{tier} evicted {seen.evictions:.0f} chunks{idle}; {share:.1%} of the prompt tokens came "
            f"from tiers below, {seen.hit_tokens / seen.prompt_tokens:.1%} were hits in {tier}"
        )
        if share < self.settings.min_gain:
            return NoChange(f"{told}: under {self.settings.min_gain:.1%}, a larger one cannot gain more", asdict(seen))
        larger = int(capacity * (1 + self.settings.max_step))
        reason = f"{told}: a larger {tier} would serve up to that share itself (how much larger, no ghost tells yet)"
        return Proposal(f"tiers.{tier}.capacity_bytes", capacity, larger, reason, asdict(seen))


def passage(history: Iterable[Window], tier: str) -> Passage:
    """Sums over the windows of a whole store."""
    windows = list(history)
    here = [window for window in windows if window.tier == tier]
    below = [window for window in windows if window.tier in BELOW[tier]]
    seconds = {window.start: window.seconds for window in here}
    held = dict.fromkeys(sorted(seconds), 0.0)
    for window in here:
        held[window.start] += window.gauge("tier_resident_bytes") or 0.0
    sizes = list(held.values()) or [0.0]
    return Passage(
        seconds=sum(seconds.values()),
        prompt_tokens=sum(window.total("prompt_tokens_total") for window in windows),
        hit_tokens=_tokens(here, result="hit"),
        below_tokens=_tokens(below, result="hit"),
        evictions=sum(window.total("tier_evictions_total") for window in here),
        idle_s=median(here, "tier_evicted_idle_seconds"),
        first_bytes=sizes[0],
        most_bytes=max(sizes),
        last_bytes=sizes[-1],
    )


def _tokens(windows: Iterable[Window], **labels: str) -> float:
    return sum(window.total("tier_lookup_tokens_total", **labels) for window in windows)
