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

from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.records import Window

COUNTER = "holdout_sums_total"
GROUPS = ("held", "fetched")
ENOUGH_REQUESTS = 30
"""Needed in each group for an interval: a normal one needs some."""
NORMAL_95 = 1.96
UNKNOWN_SHARE = ""
"""Stratum of what was kept before shares were told apart."""


@dataclass(frozen=True)
class GroupSums:
    """Sums over one group: requests, their seconds and tokens, and the squares and products of these."""

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
        """Variance of ``per_token``."""
        ratio = self.per_token
        spread = self.seconds2 - 2 * ratio * self.seconds_tokens + ratio * ratio * self.tokens2
        return max(0.0, spread) / self.tokens**2 * self.requests / (self.requests - 1)


Groups = Mapping[str, GroupSums]
"""Both groups, by name."""


@dataclass(frozen=True)
class MeasuredSaving:
    """Seconds that all fetches of the group saved, and the bounds with 95 % confidence."""

    saved: float
    low: float
    high: float


def sums(window: Window, group: str) -> GroupSums:
    """What the window's store counted of one group."""
    return GroupSums(**{each.name: window.total(COUNTER, group=group, sum=each.name) for each in fields(GroupSums)})


def measured(strata: Iterable[Groups]) -> MeasuredSaving | None:
    """The saving over all strata in which both groups are large enough; None: there is none."""
    told = [groups for groups in strata if _tells(groups)]
    if not told:
        return None
    saved = margin2 = 0.0
    for held, fetched in ((groups["held"], groups["fetched"]) for groups in told):
        saved += (held.per_token - fetched.per_token) * fetched.tokens
        margin2 += (held.variance + fetched.variance) * (NORMAL_95 * fetched.tokens) ** 2
    return MeasuredSaving(saved, saved - margin2**0.5, saved + margin2**0.5)


def added(one: Mapping[str, Groups], other: Mapping[str, Groups]) -> dict[str, Groups]:
    """The strata of both, by share."""
    nothing = dict.fromkeys(GROUPS, GroupSums())
    return {
        share: {name: one.get(share, nothing)[name] + other.get(share, nothing)[name] for name in GROUPS}
        for share in {**one, **other}
    }


def document(strata: Mapping[str, Groups]) -> JsonDict:
    return {share: {name: vars(group) for name, group in groups.items()} for share, groups in strata.items()}


def parse(kept: Json | None) -> dict[str, Groups]:
    """The strata, by share."""
    kept = kept or {}
    strata = {UNKNOWN_SHARE: kept} if any(name in kept for name in GROUPS) else kept
    return {share: {name: GroupSums(**groups.get(name, {})) for name in GROUPS} for share, groups in strata.items()}


def _tells(groups: Groups) -> bool:
    return all(group.requests >= ENOUGH_REQUESTS and group.tokens > 0 for group in groups.values())
