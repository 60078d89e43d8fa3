"""What every tuner is asked, and what it may answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as member
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tiertune_agent.fields import Json, read
from tiertune_agent.records import Made, Prospect, Rates, StageWindow, Target, Window, Windows
from tiertune_connector.documents import Document
from tiertune_connector.units import Duration

Mode = Literal["observe", "recommend", "auto"]
Scope = Literal["tier", "pool", "store", "fleet", "size"]
Period = Annotated[Duration, Field(gt=0)]
MOST_OF_TIER = 240
"""Windows that a tuner of one tier looks through: an hour of windows of 15 s."""
REMNANT = 0.05
"""A remainder below this share of what there may be is not worth a step of its own: halving would never end."""


class TunerSettings(Document):
    """What the policy file may say to any tuner."""

    looks: ClassVar[int] = 1
    """How often the tuner is asked in a period."""
    advisory: ClassVar[bool] = False
    """Whether it only ever recommends, whatever the policy's mode."""

    mode: Mode | None = None
    """None: the policy's."""
    period: Period
    """A target is changed at most once in a period of the clock, with at least half of one between two changes, and a
    whole one between two steps of a size the same way."""
    hold_off: Duration = 0.0
    """How long a target is left alone after a change, but for further steps the same way."""

    @property
    def look_s(self) -> float:
        """Seconds from one look to the next."""
        return self.period / self.looks


@dataclass(frozen=True)
class Proposal:
    """A wish to change ``field`` (dotted, in the store's tuning document). ``reason``: one sentence with figures."""

    field: str
    before: Any
    after: Any
    reason: str
    evidence: Json = member(default_factory=dict)
    requests: int | None = None
    """Requests that the wish rests on; None: it rests on something else (probes, the policy file)."""


@dataclass(frozen=True)
class NoChange:
    """Nothing to change, or not enough data to tell. ``reason``: one sentence with figures."""

    reason: str
    evidence: Json = member(default_factory=dict)
    refused: str = ""
    """The field whose change the guard refused; empty: nothing is wished."""


Answer = Proposal | NoChange


@dataclass(frozen=True)
class TypicalCandidate:
    """A typical request that found chunks in a tier: means over the last ones seen."""

    requests: int
    """0: none was seen; a prompt of mean length stands for them."""
    nbytes: float
    recompute_s: float


@dataclass(frozen=True)
class Current:
    """How things stand now, as the store reported them."""

    target: Target
    tuning: Json
    status: Json
    last: Made | None = None
    """The tuner's last change of the target."""
    typical: TypicalCandidate | None = None
    prospects: Sequence[Prospect] = ()
    """What other sizes would have cost, oldest first, for every namespace that the target serves."""
    hosts: int = 1
    """Stores that the prospects' shapes describe, each with DRAM and disk of its own."""
    rates: Rates = member(default_factory=Rates)
    holdout: float = 0.0
    """Share of requests that the policy holds out from remote fetches."""
    budget_bytes: int | None = None
    """If DRAM and the remote share one budget, that of all hosts' DRAM and the remote; None: they do not."""
    remote_bytes: int = 0
    """Capacity of the remote tier."""
    least_bytes: float | None = None
    """Lower bound of the target's capacity; None: there is none."""
    most_bytes: float | None = None
    """Upper bound: the tighter of the policy's bound and what its budgets leave; None: there is none."""
    stages: Sequence[StageWindow] = ()
    """What the GPUs of the whole fleet did lately, by stage and phase."""


class Tuner(ABC):
    """One question about one target, asked again every period."""

    name: ClassVar[str]
    key: ClassVar[str]
    """Key of its settings in a policy's ``tuners``; tuners that share settings share the key."""
    scope: ClassVar[Scope]
    """What it reads. ``tier``: windows of the target's tier; ``pool``: of its pool, with ghosts; ``store``: of the
    whole store, with prospects; ``fleet``: prospects and stages; ``size``: prospects (budgets pay for what it sets)."""

    tiers: ClassVar[Sequence[str]] = ()
    """Tiers of a store that it is asked about, unless ``targets`` says otherwise."""

    settings: TunerSettings
    """What the policy has under ``key``."""

    def __init__(self, settings: TunerSettings) -> None:
        self.settings = settings

    def targets(self, store: str, status: Json) -> list[Target]:
        """What there is to tune in a store with this status: by default those of ``tiers`` that it is set up with."""
        return [Target(store, tier, models=models(status)) for tier in self.tiers if present(status, tier)]

    @abstractmethod
    def evaluate(self, history: Windows, current: Current) -> Answer:
        """Answer from the windows, oldest first."""


def models(status: Json) -> tuple[str, ...]:
    """Models that a store serves, by its status."""
    told = {pool.get("model") or "" for pool in served(status).values()}
    return tuple(sorted(told.union(status.get("models") or ())))  # sources report no pools


def pools(status: Json) -> Mapping[str, Json]:
    """A store's pools in its status, by namespace."""
    told: Mapping[str, Json] = status.get("pools") or {}
    return told


def pool_targets(store: str, tier: str, status: Json) -> list[Target]:
    """A store's pools, each with the model that it serves."""
    return [Target(store, tier, digest, (pool.get("model") or "",)) for digest, pool in sorted(served(status).items())]


def since_change(history: Windows, current: Current) -> list[Window]:
    """Windows that began after the target's last change."""
    return [window for window in history if current.last is None or window.start >= current.last.at]


def served(status: Json) -> Mapping[str, Json]:
    """The pools, by namespace, but for those only on disk, whose engines have not come since the store started."""
    return {digest: pool for digest, pool in pools(status).items() if "dram" in pool or "disk" not in pool}


def present(status: Json, tier: str) -> bool:
    """Whether a store is configured with the tier."""
    return read(status, f"tiers.{tier}.health") not in (None, "absent")
