"""What fetching saves as measured: requests that fetch against requests that are held out from it. Pure.

The two groups are drawn by chance, when they are looked up, from all requests that find chunks in the remote; whatever
becomes of a request, it stays in its group. A group's cost is the ratio of two sums, seconds to the first token (or to
the end, without one) over the tokens that were to be had; its variance is that of a ratio estimator (Cochran, Sampling
Techniques, 1977, 6.4). The interval is the normal one, of 95 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tiertune_agent.records import Window

COUNTER = "holdout_sums_total"
GROUPS = ("held", "fetched")
ENOUGH_REQUESTS = 30
"""In each group, before an interval is told: a normal one needs some."""
NORMAL_95 = 1.96


@dataclass(frozen=True)
class GroupSums:
    """Of one group: requests, their seconds and tokens, and the sums of squares and products."""

    requests: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    seconds2: float = 0.0
    tokens2: float = 0.0
    seconds_tokens: float = 0.0

    def __add__(self, other: "GroupSums") -> "GroupSums":
        return GroupSums(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(GroupSums)))

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def variance(self) -> float:
        """Of ``per_token``."""
        ratio = self.per_token
        spread = self.seconds2 - 2 * ratio * self.seconds_tokens + ratio * ratio * self.tokens2
        return max(0.0, spread) / self.tokens**2 * self.requests / (self.requests - 1)


@dataclass(frozen=True)
class MeasuredSaving:
    """Seconds that all fetches of the group saved, and between which bounds with 95 % confidence."""

    saved: float
    low: float
    high: float


def sums(window: Window, group: str) -> GroupSums:
    """What the window's store counted of one group."""
    return GroupSums(**{each.name: window.total(COUNTER, group=group, sum=each.name) for each in fields(GroupSums)})


def measured(held: GroupSums, fetched: GroupSums) -> MeasuredSaving | None:
    """None where a group is too small."""
    if min(held.requests, fetched.requests) < ENOUGH_REQUESTS or not (held.tokens > 0 and fetched.tokens > 0):
        return None
    each = held.per_token - fetched.per_token
    margin = NORMAL_95 * (held.variance + fetched.variance) ** 0.5
    return MeasuredSaving(*(bound * fetched.tokens for bound in (each, each - margin, each + margin)))


def document(groups: Mapping[str, GroupSums]) -> dict[str, Any]:
    return {name: vars(group) for name, group in groups.items()}


def parse(kept: Mapping[str, Any] | None) -> dict[str, GroupSums]:
    return {name: GroupSums(**(kept or {}).get(name, {})) for name in GROUPS}
