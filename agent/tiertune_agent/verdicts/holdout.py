"""What fetching saves, as measured: requests that fetch against requests that are held out from it. Pure.

Each request that finds chunks in the remote is put into one of the two groups by chance at its lookup, and stays there
whatever becomes of it. A group's cost is the ratio of two sums: seconds to the first token (or to the end, without
one) over tokens found there; its variance is that of a ratio estimator (Cochran, Sampling Techniques, 1977, 6.4). The
interval is the normal one, of 95 %.

Groups can be compared only under one share of held-out requests: once it changes, one group has more of what came
since. So each share is a stratum of its own; what they saved adds up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.records import Window

COUNTER = "holdout_sums_total"
GROUPS = ("held", "fetched")
ENOUGH_REQUESTS = 30
"""Needed in each group for an interval: a normal one needs some."""
NORMAL_95 = 1.96


@dataclass(frozen=True)
class GroupSums:
    """Sums over one group: requests, their seconds and tokens, and the squares and products of these."""

    requests: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    seconds2: float = 0.0
    tokens2: float = 0.0
    seconds_tokens: float = 0.0

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def variance(self) -> float:
        """Variance of ``per_token``."""
        ratio = self.per_token
        spread = self.seconds2 - 2 * ratio * self.seconds_tokens + ratio * ratio * self.tokens2
        return max(0.0, spread) / self.tokens**2 * self.requests / (self.requests - 1)


class MeasuredSaving(NamedTuple):
    """Seconds that all fetches of the group saved, and the bounds with 95 % confidence."""

    saved: float
    low: float
    high: float


def sums(window: Window, group: str) -> GroupSums:
    """What the window's store counted of one group."""
    return GroupSums(**{each.name: window.total(COUNTER, group=group, sum=each.name) for each in fields(GroupSums)})


def measured(strata: Iterable[Json]) -> MeasuredSaving | None:
    """The saving over all strata, both groups' sums each, in which both are large enough; None: there is none."""
    saved, margin2, told = 0.0, 0.0, False
    for groups in strata:
        held, fetched = both = [GroupSums(**groups.get(name, {})) for name in GROUPS]
        if all(group.requests >= ENOUGH_REQUESTS and group.tokens > 0 for group in both):
            saved += (held.per_token - fetched.per_token) * fetched.tokens
            margin2 += (held.variance + fetched.variance) * (NORMAL_95 * fetched.tokens) ** 2
            told = True
    return MeasuredSaving(saved, saved - margin2**0.5, saved + margin2**0.5) if told else None


def added(one: Json, other: Json) -> JsonDict:
    """The sums of both documents, field by field: strata by share, their groups by name, or one group's sums."""
    found = dict(one)
    for name, value in other.items():
        found[name] = added(found.get(name, {}), value) if isinstance(value, Mapping) else found.get(name, 0.0) + value
    return found
