"""What a policy, its overrides laid over, says of a store as it is, and of the managed remote. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.policy.document import Policy, Rule, by_calendar, frozen_until, made, mode_of
from tiertune_agent.records import REMOTE, Target
from tiertune_agent.tuners.base import Mode, Tuner
from tiertune_agent.tuners.registry import OF_REMOTE, OF_STORES

STRENGTH: Sequence[Mode] = get_args(Mode)
"""Modes, the one that does least first."""


@dataclass(frozen=True)
class Allowed:
    """What tuners may do there, but for those that only advise."""

    modes: Mapping[str, Mode]
    """The strongest of any target, by key of the tuner's settings."""
    until: datetime | None
    """Until then the calendar forbids every change by themselves; None: not every one."""

    def document(self) -> JsonDict:
        """As the API tells it."""
        return {"modes": self.modes, "frozen": by_calendar(self.until) or None}


NOTHING = Allowed({}, None)


def of_store(policy: Policy, store: str, status: Json, now: datetime) -> Allowed:
    """Of all that is tuned in a store with this status."""
    tuners = (made(kind, policy) for kind in OF_STORES)
    return _allowed(policy, ((tuner, target) for tuner in tuners for target in tuner.targets(store, status)), now)


def of_remote(policy: Policy, now: datetime) -> Allowed:
    """Of the remote, if it is managed."""
    return _allowed(policy, ((made(kind, policy), REMOTE) for kind in OF_REMOTE), now)


def frozen_all(policy: Policy, known: Iterable[Allowed], now: datetime) -> datetime | None:
    """Until when the calendar forbids every change anywhere; as the policy alone says it where nothing is known."""
    return _all_until([one.until for one in known if one.modes] or [frozen_until(policy, now)])


def _allowed(policy: Policy, asked: Iterable[tuple[Tuner, Target]], now: datetime) -> Allowed:
    """``asked``: of one store."""
    modes: dict[str, Mode] = {}
    rules: dict[tuple[str, ...], Rule] = {}
    for tuner, target in asked:
        if tuner.settings.advisory:
            continue
        if target.models not in rules:
            rules[target.models] = policy.for_target(target)
        mode = mode_of(rules[target.models], tuner.name)
        modes[tuner.key] = max(mode, modes.get(tuner.key, mode), key=STRENGTH.index)
    return Allowed(modes, _all_until([frozen_until(rule, now) for rule in rules.values()]))


def _all_until(ends: Sequence[datetime | None]) -> datetime | None:
    """Until when all are frozen; None: not all are, or there are none."""
    frozen = [end for end in ends if end]
    return min(frozen, default=None) if len(frozen) == len(ends) else None
