"""Policy files: what operators allow the agent to do. Strict; every problem with file, line and column."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path
from time import sleep
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.followed import Followed
from tiertune_agent.policy.budgets import Budgets, budgeted
from tiertune_agent.policy.calendar import FreezeTimes
from tiertune_agent.policy.guard import Rules
from tiertune_agent.records import Rates, Target
from tiertune_agent.tuners.base import Mode, Tuner, TunerSettings
from tiertune_agent.tuners.registry import TUNERS, Tuners
from tiertune_agent.tuners.remote_fetch import RemoteFetchSettings
from tiertune_agent.tuners.tier_size import TierSizeSettings
from tiertune_connector.documents import Document, FieldError, parse_yaml, read_text, validated
from tiertune_connector.tuning import TIERS
from tiertune_connector.units import Duration

HOURS_PER_MONTH = 730.0
WEEK = timedelta(weeks=1)
"""Hours of the calendar that have not ended after it never do."""


class Objectives(Document):
    ttft_p99: Duration | None = None
    """Read, but no tuner aims at it in this version."""


LEAST_PRICE, MOST_PRICE = 1e-9, 1e9
"""In any currency: products and quotients of prices, seconds and bytes stay finite."""
Price = Annotated[float, Field(ge=0, le=MOST_PRICE)]


class Prices(Document):
    """Money, in one currency of the operator's choice."""

    gpu_hour: Price = 2.5
    """Price of all GPUs of one engine. 0: nothing weighs requests against rent or network, so tiers with rent stay."""
    dram_gib_month: Price = 3.0
    """Rent of a GiB held for a month of 730 hours."""
    disk_gib_month: Price = 0.1
    """The same on disk."""
    remote_gib_month: Price = 4.0
    """The same in the remote; for a Redis, of what the agent reads there, once for all stores."""
    network_gib: Price = 0.0
    """Price of a GiB moved to or from the remote. The ledger and ``admission`` count it; ``remote_fetch`` weighs
    seconds alone."""

    @field_validator("*")
    @classmethod
    def _reckonable(cls, price: float) -> float:
        if 0 < price < LEAST_PRICE:
            raise ValueError(f"Input should be 0, or at least {LEAST_PRICE:g}")
        return price


class Guard(Document):
    changes_per_hour: int = Field(default=12, ge=0)
    """Per store; a split counts for each. Remote fetch off protects requests: it counts, but does not wait. 0: none."""
    min_requests: int = Field(default=500, ge=0)
    """Evidence on fewer requests changes nothing."""
    soak: Duration = 600.0
    """How long a change is watched before it is judged."""
    roll_back_if_worse_by: float = Field(default=0.02, ge=0)
    """Share of the cost by which a change must be worse, and by two standard errors. Automatic only in mode auto."""
    freeze: tuple[FreezeTimes, ...] = ()
    """Hours of the week in which the agent changes nothing by itself; what people command is done."""
    holdout: float = Field(default=0.0, ge=0, le=0.5)
    """Share of requests that does not fetch from the remote, to measure what fetching saves."""


class Remote(Document):
    manage: bool = False
    """Whether the agent tunes capacity and eviction policy of its Redis. Off by default: others may use it too."""


class Rule(Document):
    """All that an override may lay over."""

    mode: Mode = "recommend"
    """Only look, propose, or change without asking; a tuner may have its own mode."""
    objectives: Objectives = Objectives()
    prices: Prices = Prices()
    budgets: Budgets = Budgets()
    guard: Guard = Guard()
    tuners: Tuners = Tuners()
    remote: Remote = Remote()


class Match(Document):
    """Shell patterns; both must fit. A model pattern fits a tier if it fits every model that the tier serves."""

    model: str = "*"
    """Pattern of the served model's name."""
    store: str = "*"
    """Pattern of the store's name; ``fleet`` is the remote."""

    def fits(self, target: Target) -> bool:
        served = all(fnmatchcase(model, self.model) for model in target.models or ("",))
        return served and fnmatchcase(target.store, self.store)

    def meets(self, other: "Match") -> bool:
        """Whether both may fit the same target; true if in doubt."""
        return _may_meet(self.model, other.model) and _may_meet(self.store, other.store)


def _may_meet(one: str, other: str) -> bool:
    """Whether a name may fit both patterns: by matching if one is a plain name, else if their starts and ends agree."""
    parts, its_parts = (re.split(r"[*?\[\]]", each) for each in (one, other))
    if len(parts) == 1 or len(its_parts) == 1:
        return fnmatchcase(one, other) or fnmatchcase(other, one)
    head, longer_head = sorted((parts[0], its_parts[0]), key=len)
    tail, longer_tail = sorted((parts[-1], its_parts[-1]), key=len)
    return longer_head.startswith(head) and longer_tail.endswith(tail)


class Override(Rule):
    match: Match


class Policy(Rule):
    version: Literal[1]
    """Version of this format."""
    overrides: tuple[Override, ...] = ()
    """Applied on top of the rest where they match, in order, field by field; any field but ``version`` is allowed."""

    @field_validator("overrides")
    @classmethod
    def _sound_together(cls, value: tuple[Override, ...], info: ValidationInfo) -> tuple[Override, ...]:
        if not Rule.model_fields.keys() <= info.data.keys():
            return value  # a field below is wrong by itself
        for each in chain(*(combinations(enumerate(value), count) for count in (1, 2))):
            if each[0][1].match.meets(each[-1][1].match):  # one alone meets itself
                try:
                    _resolved(Rule.model_construct(**info.data), [override for _, override in each])
                except ValidationError as error:
                    which = " and ".join(f"entry {index}" for index, _ in each)
                    raise ValueError(f"{which}, laid over the rest: {FieldError.of(error)}") from error
        return value

    def for_target(self, target: Target) -> Rule:
        """The rules for one target: overrides that fit are laid over, in order, field by field."""
        fitting = tuple(number for number, each in enumerate(self.overrides) if each.match.fits(target))
        laid = self._laid
        if fitting not in laid:
            laid[fitting] = _resolved(self, [self.overrides[number] for number in fitting])
        return laid[fitting]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy that lays its own rules over: they may be others."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("_laid", None)
        return copied

    @cached_property
    def _laid(self) -> dict[tuple[int, ...], Rule]:
        """Rules by the numbers of the overrides that fit: laying them over is slow, and every target asks."""
        return {}


def _resolved(base: Rule, overrides: Sequence[Override]) -> Rule:
    rules = base.model_dump(mode="json", include=set(Rule.model_fields), by_alias=True)
    for override in overrides:
        rules = _laid_over(
            rules, override.model_dump(mode="json", exclude={"match"}, exclude_unset=True, by_alias=True)
        )
    return validated(Rule, rules)


def _laid_over(below: Json, above: Json) -> JsonDict:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        merged[key] = _laid_over(lower, value) if isinstance(value, dict) and isinstance(lower, dict) else value
    return merged


def frozen_by(rule: Rule, now: datetime) -> str:
    """Why the policy's calendar forbids changes now; empty: it does not."""
    return by_calendar(frozen_until(rule, now))


def frozen_until(rule: Rule, now: datetime) -> datetime | None:
    """When the hours of the calendar that forbid changes now end, with all that follow at once; None: none do."""
    until, at, last = None, now, now + WEEK
    while at < last:
        end = max((end for entry in rule.guard.freeze if (end := entry.ends(at))), default=None)
        if end is None or (until and end <= at):  # a later one may end before, where clocks are set
            break
        until = at = end
    return until


def by_calendar(until: datetime | None) -> str:
    """Why nothing is changed until then; empty: something may be."""
    return f"by the policy's calendar until {until:%a %H:%M %Z}" if until else ""


SETTINGS = {**{key: key for key in Tuners.model_fields}, **{tuner.name: tuner.key for tuner in TUNERS}}
"""The key of each tuner's settings, by tuner and by key."""


def mode_of(rule: Rule, tuner: str) -> Mode:
    """A tuner's own mode, else the policy's; a tuner that only advises never acts.

    A former tuner, whose change may still soak, has the policy's.
    """
    if tuner not in SETTINGS:
        return rule.mode
    settings = settings_of(rule, tuner)
    mode = settings.mode or rule.mode
    return "recommend" if settings.advisory and mode == "auto" else mode


def advises(tuner: str) -> bool:
    """Whether the tuner only ever advises; a former tuner does not."""
    return tuner in SETTINGS and settings_of(DEFAULT.policy, tuner).advisory


def settable() -> list[str]:
    """Keys, in a policy, of the tuners that may change something by themselves."""
    return [key for key, settings in DEFAULT.policy.tuners if not settings.advisory]


def settings_of(rule: Rule, tuner: str) -> TunerSettings:
    """A tuner's settings in the rules, by its name."""
    settings: TunerSettings = getattr(rule.tuners, SETTINGS[tuner])
    return settings


def made(tuner: type[Tuner], rule: Rule) -> Tuner:
    """The tuner as the rules set it."""
    return tuner(settings_of(rule, tuner.name))


def rules_for(rule: Rule, tuner: str, tier: str, *, elsewhere: Mapping[str, int], own: int = 0) -> Rules:
    """The guard's rules for one tuner and tier.

    ``elsewhere``: bytes by tier that the fleet's budgets already pay for outside of what is tuned; ``own``: within it.
    """
    settings = settings_of(rule, tuner)
    sizes = settings if isinstance(settings, TierSizeSettings) else None
    paid = budgeted(rule.budgets, tier, elsewhere, own) if sizes else None
    bounds = (getattr(sizes.max, tier) if sizes else None, paid.left if paid else None)
    return Rules(
        mode=mode_of(rule, tuner),
        min_requests=rule.guard.min_requests,
        changes_per_hour=rule.guard.changes_per_hour,
        period=settings.period,
        spacing=settings.period - settings.look_s / 2,  # rounds are not punctual
        hold_off=settings.hold_off,
        soak=rule.guard.soak,
        waits=not isinstance(settings, RemoteFetchSettings),  # protects requests, changes nothing that a ghost measures
        max_step=sizes.max_step if sizes else None,
        least=getattr(sizes.min, tier) if sizes else None,
        most=min((bound for bound in bounds if bound is not None), default=None),
    )


def split_rules(rules: Rules, sizes: TierSizeSettings, budget: int, hosts: int) -> Rules:
    """The rules for one host's DRAM, if ``budget`` is split between the DRAM of all hosts and the remote."""
    most = max(0, budget - (sizes.min.remote or 0)) / hosts
    least = 0.0 if sizes.max.remote is None else max(0, budget - sizes.max.remote) / hosts
    return replace(
        rules, least=max(rules.least or 0, least), most=min(most if rules.most is None else rules.most, most)
    )


def rates(prices: Prices) -> Rates:
    """The prices, with rents per GiB and hour."""
    per_hour = {tier: getattr(prices, f"{tier}_gib_month") / HOURS_PER_MONTH for tier in TIERS}
    return Rates(prices.gpu_hour, per_hour, prices.network_gib)


@dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """A policy with the text that it came from. Equal only to itself, so it can be a key."""

    policy: Policy
    source: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.text.encode(), digest_size=16).hexdigest()


DEFAULT = LoadedPolicy(Policy(version=1), "built in", "version: 1\n")


def load(path: Path) -> LoadedPolicy:
    """The policy in a file; DocumentError names every place to mend."""
    return _parsed(path, read_text(path))


def _parsed(path: Path, text: str) -> LoadedPolicy:
    return LoadedPolicy(parse_yaml(text, Policy, name=str(path)), str(path), text)


def followed(path: Path | None, wait: Callable[[float], None] = sleep) -> Followed[LoadedPolicy]:
    """The policy in a file that may be edited; without a path the built-in one."""
    return Followed(path, _parsed, DEFAULT, wait)
