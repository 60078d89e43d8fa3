"""Which eviction algorithm for a pool? Without ghosts this can be told only of very small pools; it only recommends."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from tiertune_agent.fields import read
from tiertune_agent.records import Target, Window, median
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, Scope, TunerSettings
from tiertune_connector.units import Duration, format_duration

SMALL_CHUNKS = 18
"""Up to here ARC was seen to lose to LRU: its ghost lists adapt on too few chunks (lmcache_agents, 8 to 18 blocks)."""


class EvictionSettings(TunerSettings):
    period: Duration = 1800.0
    hold_off: Duration = 21600.0
    candidates: tuple[Literal["lru", "arc", "s3fifo"], ...] = Field(default=("lru", "arc", "s3fifo"), min_length=1)
    min_gain: float = Field(default=0.03, ge=0.0, le=1.0)
    """Least gain in hit ratio, as a share."""


class Eviction:
    name: ClassVar = "eviction"
    scope: ClassVar[Scope] = "tier"
    advisory: ClassVar = True

    def __init__(self, settings: EvictionSettings) -> None:
        self.settings = settings

    def targets(self, store: str, status: Mapping[str, Any]) -> list[Target]:
        pools = status.get("pools") or {}
        return [Target(store, "dram", digest, (pool.get("model", ""),)) for digest, pool in sorted(pools.items())]

    def evaluate(self, history: Sequence[Window], current: Current) -> Answer:
        digest = current.target.namespace
        field = f"pools.{digest}.dram.eviction"
        algorithm = read(current.tuning, field) or read(current.tuning, "defaults.eviction") or "lru"
        chunks = capacity_chunks((current.status.get("pools") or {}).get(digest) or {})
        evictions = sum(window.total("tier_evictions_total") for window in history)
        if algorithm == "arc" and "lru" in self.settings.candidates and chunks is not None and chunks <= SMALL_CHUNKS:
            reason = f"the pool has room for {chunks} chunks: up to {SMALL_CHUNKS}, arc was measured below lru"
            return Proposal(field, algorithm, "lru", reason, {"capacity_chunks": chunks, "evictions": evictions})
        if not evictions:
            return NoChange(
                f"{algorithm} stays: nothing was evicted in {len(history)} windows, so any algorithm is right"
            )
        idle = median(history, "tier_evicted_idle_seconds")
        unused = f", unused for {format_duration(idle)} (median)" if idle is not None else ""
        return NoChange(
            f"{algorithm} stays, not enough data: {evictions:.0f} chunks were evicted{unused}, "
            f"but no ghost tells what {_others(self.settings.candidates, algorithm)} would have kept"
        )


def capacity_chunks(pool: Mapping[str, Any]) -> int | None:
    """Room of a pool in chunks, by its status; None where it does not tell."""
    each, capacity = pool.get("chunk_bytes"), read(pool, "dram.effective.capacity_bytes")
    return int(capacity // each) if each and capacity is not None else None


def _others(candidates: Sequence[str], algorithm: str) -> str:
    return " or ".join(name for name in candidates if name != algorithm) or "another algorithm"
