"""What the demo showed: figures from the stores' and the agent's answers, and whether they prove the point. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.demo.player import Tally
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.records import CHANGED
from tiertune_connector.catalogue import PREFIX
from tiertune_connector.units import format_count

TIERS = ("dram", "remote")
TOLD = ("id", "tuner", "store", "pool", "from", "to", "state", "reason")
"""Of each decision, by ``--json``; also ``at_s``."""
OF_TIER: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "hit_tokens": ("tier_lookup_tokens_total", {"result": "hit"}),
    "evictions": ("tier_evictions_total", {}),
    "saved_s": ("saved_seconds_total", {}),
    "lost_s": ("lost_seconds_total", {}),
    "resident_bytes": ("tier_resident_bytes", {}),
    "capacity_bytes": ("tier_capacity_bytes", {"state": "effective"}),
}
"""Figures of a tier: metric and labels of each."""


@dataclass(frozen=True)
class Figures:
    """All that is known at one moment of the run."""

    seconds: float = 0.0
    tiers: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: tiers(()))
    """Of each, what ``OF_TIER`` names."""
    decisions: Sequence[Json] = ()
    """As ``--json`` has them and with their ``field``, oldest first."""
    windows: int = 0
    counted: Mapping[str, int] = field(default_factory=dict)
    """The players' tallies."""

    def total(self, name: str) -> float:
        return sum(tier[name] for tier in self.tiers.values())

    @property
    def gate(self) -> dict[str, int]:
        """Requests by the gates' decision and by outcome; each once, however many tiers had its chunks."""
        return {name: self.counted.get(name, 0) for name in Tally.GATE}

    def document(self) -> JsonDict:
        """As ``demo --json`` writes it."""
        kept = ("hit_tokens", "evictions", "resident_bytes", "capacity_bytes")
        return {
            "seconds": round(self.seconds, 3),
            "requests": self.counted.get("requests", 0),
            "windows": self.windows,
            "decisions": [{name: decision[name] for name in (*TOLD, "at_s")} for decision in self.decisions],
            "tiers": {name: {part: int(tier[part]) for part in kept} for name, tier in self.tiers.items()},
            "gate": self.gate,
            "saved_seconds": round(self.total("saved_s"), 3),
            "lost_seconds": round(self.total("lost_s"), 3),
            "chunks": {name: self.counted.get(name, 0) for name in Tally.CHUNKS},
        }


def total(told: Iterable[Exposition], metric: str, **labels: str) -> float:
    """The sum of a metric over several ``/metrics``."""
    return sum(one.total(PREFIX + metric, **labels) or 0.0 for one in told)


def tiers(told: Sequence[Exposition]) -> dict[str, dict[str, float]]:
    """From the metrics of all stores, and of the agent, who alone knows what a Redis holds and evicts."""
    return {
        tier: {name: total(told, metric, tier=tier, **labels) for name, (metric, labels) in OF_TIER.items()}
        for tier in TIERS
    }


def decisions(documents: Sequence[Json], started: datetime) -> list[Json]:
    """From ``/api/v1/decisions``, oldest first, with the seconds since the start in ``at_s``."""
    found: list[Json] = []
    for document in sorted(documents, key=itemgetter("id")):
        at = datetime.fromisoformat(document["applied_at"] or document["created_at"])
        told = {name: document[name] for name in ("field", *TOLD)}
        found.append(told | {"at_s": round((at - started).total_seconds(), 3)})
    return found


def applied(decision: Json) -> bool:
    """Whether it changed the store."""
    return decision["state"] in CHANGED


def shortfall(figures: Figures, slowed: tuple[float, float]) -> list[str]:
    """What was not shown; empty: all was. ``slowed``: start and end of the slow remote, in seconds of the run."""
    start, end = slowed
    made = [one for one in figures.decisions if one["tuner"] == "remote_fetch" and applied(one)]
    off = [one["at_s"] for one in made if one["to"] == "off" and start <= one["at_s"] <= end]
    missing = [f"no hit in {name}" for name, tier in figures.tiers.items() if not tier["hit_tokens"]]
    if not off:
        missing.append(f"no decision to stop fetching while the remote was slow ({start:.0f} to {end:.0f} s)")
    elif not any(one["to"] == "on" and one["at_s"] > off[0] for one in made):
        missing.append("no decision to fetch again after it was fast")
    return missing


def damage(figures: Figures) -> list[str]:
    """Wrong bytes that an engine would have computed with; nothing excuses them."""
    wrong = figures.counted.get("wrong", 0)
    return [f"wrong bytes were taken for right in {format_count(wrong, 'chunk')}"] if wrong else []
