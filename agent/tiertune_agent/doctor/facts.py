"""What is known of a deployment: plain values that ``gathered`` reads. An unknown value is None or empty."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.counters import Rows
from tiertune_agent.fields import Json, read
from tiertune_agent.records import Window, added_up, series
from tiertune_agent.tuners.base import pools, present
from tiertune_connector.tuning import TIERS


@dataclass(frozen=True)
class Clock:
    """How far another host's clock is ahead of ours, in seconds; read over a network it is known to ± ``doubt_s``."""

    ahead_s: float = 0.0
    doubt_s: float = 0.0


class Counted(Window):
    """A store's counters since it started as one window, with all their labels."""

    def count(self, name: str, **labels: str) -> float:
        """Observations of ``matching`` histograms."""
        return sum(value.count for value in self.histograms(name, **labels))

    def split(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums of the numbers of ``name`` that carry ``labels``, by the values of ``label``; zeros are left out."""
        found = ((told, value) for _, told, value in self.each(name) if value and labels.items() <= told.items())
        return added_up((told.get(label, ""), value) for told, value in found)


def counted_in(rows: Rows) -> Counted:
    told = {series(name, labels): value for (name, labels), value in rows.items()}
    return Counted("", "", "", "", datetime.min.replace(tzinfo=UTC), 0.0, told)


@dataclass(frozen=True)
class Facts:
    problem: str = field(default="", kw_only=True)
    """Why asking it failed; empty: it answers."""

    @property
    def answers(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class StoreFacts(Facts):
    """One store, as its own HTTP answers."""

    url: str
    called: str = ""
    """Its name in the settings; empty: they give none."""
    status: Json = field(default_factory=dict)
    tuning: Json = field(default_factory=dict)
    counted: Counted = field(default_factory=lambda: counted_in({}))
    clock: Clock = Clock()
    known: str = ""
    """Its name in the agent's list; empty: it is not listed."""
    heard: bool = False
    """The agent reaches it, so it is well, even if we cannot."""
    closed: bool = False
    """It answers, but wants a token that we do not have."""

    @property
    def name(self) -> str:
        return str(self.status.get("store") or self.called or self.known or self.url)

    @property
    def tiers(self) -> Mapping[str, Json]:
        """States of those that are configured."""
        return {tier: read(self.status, f"tiers.{tier}") for tier in TIERS if present(self.status, tier)}

    @property
    def pools(self) -> Mapping[str, Json]:
        return pools(self.status)

    @property
    def clients(self) -> Sequence[Json]:
        return self.status.get("clients") or ()


@dataclass(frozen=True)
class AgentFacts(Facts):
    """The agent, as its API answers."""

    url: str
    fleet: Json = field(default_factory=dict)
    incidents: Sequence[Json] = ()
    """Open ones."""
    policies: Json = field(default_factory=dict)
    clock: Clock = Clock()
    away: bool = False
    """It is there, but its database is not."""

    @property
    def file(self) -> str:
        """Its policy file; its address if it has none."""
        return str(self.policies.get("source") or self.url)

    @property
    def stores(self) -> Sequence[Json]:
        """Stores as the agent last saw them, without sources that are only observed."""
        return [store for store in self.fleet.get("stores") or () if not store.get("observed")]

    @property
    def sources(self) -> frozenset[str]:
        """Names of what is only observed, also of sources that never answered."""
        known = (str(one["name"]) for one in self.fleet.get("stores") or () if one.get("observed"))
        return frozenset((*known, *(read(self.fleet, "unheard.sources") or ())))


NOT_ASKED = AgentFacts("", problem="nobody named it")


@dataclass(frozen=True)
class EngineFacts(Facts):
    """One engine, by vLLM's own ``/metrics``."""

    url: str
    told: Exposition = field(default_factory=lambda: Exposition(""))

    def total(self, name: str) -> float:
        """A metric's sum; 0 if the engine does not export it."""
        return self.told.total(name) or 0.0


@dataclass(frozen=True)
class ServerFacts(Facts):
    """One server of the remote tier, by its own answer."""

    server: str
    maxmemory: int | None = None
    """0: no bound."""
    policy: str = ""
    used_bytes: int = 0


@dataclass(frozen=True)
class StorageFacts(Facts):
    """A measured storage, compared with recomputing."""

    storage: str
    latency_s: float = 0.0
    """Of reading a small chunk."""
    bytes_per_s: float = 0.0
    """Reading, one chunk at a time."""
    write_bytes_per_s: float = 0.0
    model: str = ""
    gpu: str = ""
    prompt_tokens: int = 0
    """Length of the compared prefix."""
    fetch_s: float = 0.0
    recompute_s: float = 0.0
    break_even_tokens: float = 0.0


@dataclass(frozen=True)
class AllFacts:
    version: str
    """Of this command."""
    agent: AgentFacts = NOT_ASKED
    stores: Sequence[StoreFacts] = ()
    engines: Sequence[EngineFacts] = ()
    servers: Sequence[ServerFacts] = ()
    storage: StorageFacts | None = None
    unknown: Sequence[str] = ()
    """What could not be looked at, and why."""

    @property
    def answering(self) -> list[StoreFacts]:
        return [store for store in self.stores if store.answers]
