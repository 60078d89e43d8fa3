"""What passes between the agent's parts: plain values, all times aware and in UTC."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

from tiertune_agent.fields import Json, JsonDict


@dataclass(frozen=True)
class Histogram:
    """Observations of one window: how many, their sum, and counts by the catalogue's buckets (sparse)."""

    count: float
    sum: float
    buckets: Mapping[int, float]

    @classmethod
    def added(cls, parts: Sequence["Histogram"]) -> "Histogram":
        """All observations in one."""
        buckets = added_up(bucket for part in parts for bucket in part.buckets.items())
        return cls(sum([part.count for part in parts]), sum([part.sum for part in parts]), buckets)

    @classmethod
    def parse(cls, document: Json) -> "Histogram":
        return cls(document["count"], document["sum"], {int(i): n for i, n in document["buckets"].items()})


One = TypeVar("One")
Kind = TypeVar("Kind")
Value = float | Histogram
Labels = Mapping[str, str]
Now = Callable[[], datetime]
"""Tells the time."""
GIB = 2**30
OBSERVED = "observed"
"""Marks sources that are only observed: in a status it holds their kind, in windows it is 1."""
NAME_CHARS = 255


def cut(name: str) -> str:
    """A name as the database keeps it: stores, tiers and namespaces are called so from where they are read on."""
    return name.replace("\0", "")[:NAME_CHARS]


def series(name: str, labels: Iterable[tuple[str, str]]) -> str:
    """Name of a counter within a window: ``name`` or ``name{label=value,...}``."""
    inner = ",".join(f"{label}={value}" for label, value in labels)
    return f"{name}{{{inner}}}" if inner else name


@lru_cache(maxsize=16_384)
def _parsed(key: str) -> tuple[str, Labels]:
    """Name and labels of a series; cached, as every window has the same few hundred."""
    name, _, inner = key.partition("{")
    labels = (label.partition("=") for label in inner.rstrip("}").split(","))
    return name, {label: text for label, _, text in labels if label}


@lru_cache(maxsize=512)
def _by_name(keys: tuple[str, ...]) -> dict[str, list[tuple[str, Labels]]]:
    """Series and their labels by name; cached, as many windows have the same ones."""
    found: dict[str, list[tuple[str, Labels]]] = {}
    for key in keys:
        name, labels = _parsed(key)
        found.setdefault(name, []).append((key, labels))
    return found


@dataclass(frozen=True)
class Window:
    """What one tier of one store (``namespace`` empty: all its pools) counted in some seconds.

    Counters are differences (those that did not move are left out), gauges their value at the end.
    """

    store: str
    namespace: str
    model: str
    tier: str
    start: datetime
    seconds: float
    values: Mapping[str, Value]

    def matching(self, name: str, **labels: str) -> list[Value]:
        """The values of all series of ``name`` that carry these labels."""
        found = _by_name(tuple(self.values)).get(name, ())
        if not labels:
            return [self.values[key] for key, _ in found]
        return [self.values[key] for key, told in found if labels.items() <= told.items()]

    def histograms(self, name: str, **labels: str) -> list[Histogram]:
        """The histograms among ``matching``."""
        return [value for value in self.matching(name, **labels) if isinstance(value, Histogram)]

    def each(self, *names: str) -> Iterator[tuple[str, Labels, float]]:
        """All series of several names, one after the other: name, labels, value; no histograms."""
        known = _by_name(tuple(self.values))
        for name in names:
            for key, told in known.get(name, ()):
                value = self.values[key]
                if not isinstance(value, Histogram):
                    yield name, told, value

    def total(self, name: str, **labels: str) -> float:
        """The sum of ``matching`` numbers; 0 if nothing was counted."""
        return self.gauge(name, **labels) or 0.0

    def before_decode(self, name: str, **labels: str) -> float:
        """As ``total``, without what engines of the stage decode looked up: prefill's had done so before them."""
        return self.total(name, **labels) - self.total(name, stage="decode", **labels)

    def gauge(self, name: str, **labels: str) -> float | None:
        """The sum of ``matching`` numbers; None if the store does not report any."""
        return sum_known(value for value in self.matching(name, **labels) if not isinstance(value, Histogram))

    @property
    def observed(self) -> bool:
        """Whether its source is only observed: what such a window does not have is unknown, not 0."""
        return OBSERVED in self.values

    def known(self, name: str, **labels: str) -> float | None:
        """As ``total``; None if an observed source does not report it."""
        return self.gauge(name, **labels) if self.observed else self.total(name, **labels)


Windows = Sequence[Window]
"""Of one tier, or of several; those of one oldest first."""


def total(windows: Iterable[Window], name: str, **labels: str) -> float:
    """The sum over all windows; 0 if nothing was counted."""
    return sum(window.total(name, **labels) for window in windows)


def sum_known(values: Iterable[float | None]) -> float | None:
    """The sum of known values; None if there are none."""
    return sum(told) if (told := [value for value in values if value is not None]) else None


def sum_of_all(values: Iterable[float | None]) -> float | None:
    """The sum of values; None if one of them is not known."""
    told = list(values)
    return None if None in told else sum(filter(None, told))


def added_up(numbers: Iterable[tuple[Kind, float]]) -> dict[Kind, float]:
    """The sum of the numbers of each kind."""
    sums: dict[Kind, float] = {}
    for kind, number in numbers:
        sums[kind] = sums.get(kind, 0.0) + number
    return sums


def grouped(those: Iterable[One], kind: Callable[[One], Kind]) -> dict[Kind, list[One]]:
    """Those of one kind together, in their order."""
    found: dict[Kind, list[One]] = {}
    for one in those:
        found.setdefault(kind(one), []).append(one)
    return found


def covered_s(windows: Iterable[Window]) -> float:
    """Seconds that the windows cover: a tier and its pools cover the same time, each at most all of it."""
    longest: dict[datetime, float] = {}
    for window in windows:
        longest[window.start] = max(longest.get(window.start, 0.0), window.seconds)
    return sum(longest.values())


@dataclass(frozen=True)
class StageWindow:
    """Seconds and tokens of one stage and phase in a window; or figures of a GPU, with ``gpu`` and without a phase."""

    store: str
    stage: str
    phase: str
    gpu: str
    start: datetime
    seconds: float
    gpu_seconds: float
    tokens: float
    utilization: float | None = None
    """Share of time in which a kernel ran; this and the next three at the window's end, energy over the window."""
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True)
class Prospect:
    """What requests of one namespace, in the whole fleet, would have cost under other sizes of the tiers."""

    namespace: str
    start: datetime
    seconds: float
    requests: int
    costs: Mapping[str, float]
    """Predicted seconds to the first token per request, by ``str(Shape)``."""


def ended(one: Window | StageWindow | Prospect) -> datetime:
    return one.start + timedelta(seconds=one.seconds)


@dataclass(frozen=True)
class Snapshot:
    """What one store answered: its state now and, from the second answer of a boot on, the windows since the last."""

    store: str
    url: str
    boot_id: str
    version: str
    at: datetime
    status: Json
    tuning: Json
    windows: tuple[Window, ...] = ()
    stages: tuple[StageWindow, ...] = ()
    writes: object = None
    """Commands that the store received, as it reports them."""

    @property
    def observed(self) -> bool:
        """Whether it is not our store: what its windows do not have is unknown, and nothing can be set."""
        return bool(self.status.get(OBSERVED))


@dataclass(frozen=True)
class Expectation:
    """The tuning expected of a store, since when, and when its own began to differ."""

    tuning: Json
    since: datetime
    differs: datetime | None = None


class State(StrEnum):
    """State of a decision. Approved means in flight until the outcome is known."""

    PROPOSED = "proposed"
    APPROVED = "approved"
    REJECTED = "rejected"
    APPLIED = "applied"
    SOAKING = "soaking"
    KEPT = "kept"
    ROLLED_BACK = "rolled_back"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Made:
    """A change that was made to ``field`` (dotted, in a store's tuning document)."""

    field: str
    before: Any
    after: Any
    at: datetime
    goal: Any = None
    """The goal, if only a step towards it was allowed; None: the change reached it."""
    learned: bool = False
    """Whether its evidence counts requests, or it was undone: it is not merely what the policy file said."""

    @property
    def direction(self) -> object:
        return direction(self.before, self.after)


def direction(before: Any, after: Any) -> object:  # noqa: ANN401 (JSON)
    """Equal for changes of the same kind: 1 or -1 for figures (0: none), the new value for anything else."""
    if isinstance(before, int | float) and isinstance(after, int | float):
        return (after > before) - (after < before)
    return after


FLEET = "fleet"
"""Stands in for a store if something concerns all of them, or the remote that they share."""
UNJUDGED = (State.APPLIED, State.SOAKING)
JUDGED = (State.KEPT, State.ROLLED_BACK, State.INCONCLUSIVE)
CHANGED = (*UNJUDGED, *JUDGED)
"""States of decisions that did change a store."""
STANDING = tuple(state for state in CHANGED if state != State.ROLLED_BACK)
"""Those of them in which decisions can be rolled back."""


@dataclass(frozen=True)
class Target:
    """What a decision changes: a tier of a store, or one pool of it. ``models`` are those that it serves."""

    store: str
    tier: str
    namespace: str = ""
    models: tuple[str, ...] = ()

    def __str__(self) -> str:
        pool = f" {self.namespace[:8]}" if self.namespace else ""
        return f"{self.store} {self.tier}{pool}"


REMOTE = Target(FLEET, "remote")


@dataclass(frozen=True)
class Decision:
    """One row of change control. ``before`` and ``after`` are values of ``field`` (dotted) in the tuning document."""

    id: int
    key: str
    """Idempotency key: the same for every attempt to apply this decision, and for no other."""
    tuner: str
    target: Target
    field: str
    before: Any
    after: Any
    mode: str
    state: State
    reason: str
    evidence: Json
    expected_version: int | None
    applied_version: int | None
    policy_revision: int | None
    created_at: datetime
    updated_at: datetime
    approved_at: datetime | None
    approved_by: str
    applied_at: datetime | None
    soak_until: datetime | None = None
    """When it is judged; None: it does not soak yet."""
    undo: Json | None = None
    """The wish to roll it back, written before the store is touched: key, by, at, reason, evidence."""
    waits: str = ""
    """Why what is under way has not ended yet; empty: nothing is, or it was not tried yet."""

    @property
    def made_at(self) -> datetime:
        """When it was made, or proposed if it was not made yet."""
        return self.applied_at or self.created_at

    def document(self) -> JsonDict:
        """The decision as the API and ``--json`` show it, and ``decisions show`` in this order."""
        return {
            "id": self.id,
            "tuner": self.tuner,
            "store": self.target.store,
            "tier": self.target.tier,
            "pool": self.target.namespace,
            "field": self.field,
            "from": self.before,
            "to": self.after,
            "mode": self.mode,
            "state": str(self.state),
            "reason": self.reason,
            "waits": self.waits or None,
            "evidence": dict(self.evidence),
            **{name: getattr(self, name) for name in ("expected_version", "applied_version", "policy_revision")},
            "approved_by": self.approved_by,
            "rolled_back_by": self.undo["by"] if self.undo else None,
            **{
                name: moment.isoformat() if (moment := getattr(self, name)) else None
                for name in ("created_at", "updated_at", "approved_at", "applied_at", "soak_until")
            },
        }


def parts(decision: Decision) -> tuple[Decision, ...]:
    """The changes that a decision consists of, in the order in which they are made; mostly one.

    Those of a split rest on no version: each is made if its field still has the value from before.
    """
    if not (steps := decision.evidence.get("split")):
        return (decision,)
    return tuple(
        replace(
            decision,
            key=f"{decision.key}-{number}",
            target=Target(step["store"], step["tier"], models=tuple(step.get("models", ()))),
            field=step["field"],
            before=step["from"],
            after=step["to"],
            expected_version=None,
            undo={**decision.undo, "key": f"{decision.undo['key']}-{number}"} if decision.undo else None,
        )
        for number, step in enumerate(steps)
    )


@dataclass(frozen=True)
class Rates:
    """The policy's prices; those per GiB and month there are per GiB and hour here."""

    gpu_hour: float = 0.0
    gib_hour: Mapping[str, float] = field(default_factory=dict)
    network_gib: float = 0.0
    remote_apart: bool = False
    """Whether the remote is booked once, for the fleet, with the rent of what no store reports of it."""
