"""How large the tiers of a scenario are, in chunks."""

from dataclasses import dataclass

from tiertune_agent.replay.scenario import Scenario


@dataclass(frozen=True)
class Sizes:
    """Capacities in chunks, and the algorithms that order victims."""

    dram: int
    """Per node."""
    disk: int
    """Per node."""
    remote: int
    """Of the fleet."""
    dram_eviction: str = "lru"
    disk_eviction: str = "lru"
    remote_eviction: str = "lru"


def sizes(scenario: Scenario, unique: int, chunk_bytes: int) -> Sizes:
    """The scenario's own split, for a trace of ``unique`` different chunks."""
    tiers = scenario.tiers
    return Sizes(
        dram=max(1, int(tiers.dram.chunks(unique, chunk_bytes) / scenario.nodes)),
        disk=int(tiers.disk.chunks(unique, chunk_bytes) / scenario.nodes),
        remote=int(tiers.remote.chunks(unique, chunk_bytes)),
        dram_eviction=tiers.dram.eviction,
        disk_eviction=tiers.disk.eviction,
        remote_eviction=tiers.remote.eviction,
    )


def split_sizes(scenario: Scenario, unique: int, chunk_bytes: int, remote_share: float) -> Sizes:
    """The same total of DRAM and remote, ``remote_share`` of it remote; all LRU."""
    tiers = scenario.tiers
    total = int(tiers.dram.chunks(unique, chunk_bytes) + tiers.remote.chunks(unique, chunk_bytes))
    return Sizes(
        dram=max(1, int(total * (1 - remote_share) / scenario.nodes)),
        disk=int(tiers.disk.chunks(unique, chunk_bytes) / scenario.nodes),
        remote=int(total * remote_share),
    )


def remote_share(scenario: Scenario, unique: int, chunk_bytes: int) -> float:
    """Remote's share of the scenario's own total of DRAM and remote."""
    dram, remote = (tier.chunks(unique, chunk_bytes) for tier in (scenario.tiers.dram, scenario.tiers.remote))
    return remote / (dram + remote) if remote else 0.0
