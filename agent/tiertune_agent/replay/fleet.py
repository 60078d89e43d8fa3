"""The caches of a fleet in a replay: production's pools, which can change size and algorithm between requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiertune_agent.replay.scenario import Scenario
from tiertune_connector.eviction import Key
from tiertune_connector.whatif.simulated import SimulatedPool


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


class FleetPools:
    """The pools of all engines and nodes, and the remote one. Sizes in chunks."""

    def __init__(self, scenario: Scenario, capacities: Sizes, block_tokens: int) -> None:
        self.node = scenario.node
        self._all = scenario.tiers.remote.touch == "all"
        gpu_chunks = scenario.gpu_cache_tokens // block_tokens
        nodes = range(scenario.nodes)
        self.gpu_pools = [SimulatedPool(gpu_chunks) for _ in range(scenario.engines) if gpu_chunks]
        self.dram_pools = [SimulatedPool(capacities.dram, capacities.dram_eviction) for _ in nodes]
        self.disk_pools = [SimulatedPool(capacities.disk, capacities.disk_eviction) for _ in nodes]
        self.remote_pool = SimulatedPool(capacities.remote, capacities.remote_eviction)

    def find(self, engine: int, chain: Sequence[Key]) -> list[str]:
        """The tier of each chunk before the first miss; only leading ones are on the GPU."""
        node = self.node(engine)
        tiers = ["gpu"] * self.gpu_pools[engine].prefix(chain) if self.gpu_pools else []
        dram, disk = self.dram_pools[node].visible, self.disk_pools[node].visible
        remote = self.remote_pool.visible
        for key in chain[len(tiers) :] if tiers else chain:
            if key in dram:
                tiers.append("dram")
            elif key in disk:
                tiers.append("disk")
            elif key in remote:
                tiers.append("remote")
            else:
                break
        return tiers

    def write_through(self, engine: int, chain: Sequence[Key], tiers: Sequence[str]) -> None:
        """Touch or insert the chain in every tier, nearest first; ``tiers`` is what ``find`` returned for it."""
        node = self.node(engine)
        if self.gpu_pools:
            self.gpu_pools[engine].write_through(chain)
        self.dram_pools[node].write_through(chain)
        if self.disk_pools[node].capacity:
            self.disk_pools[node].write_through(chain)
        if self.remote_pool.capacity:
            self.remote_pool.write_through(chain if self._all else _below(chain, tiers))

    def resize(self, *, dram: int | None = None, remote: int | None = None) -> None:
        """Set capacities, ``dram`` per node and ``remote`` of the fleet; what no longer fits is evicted at once.

        None leaves a tier as it is. A node has at least one chunk of DRAM.
        """
        if dram is not None:
            for pool in self.dram_pools:
                pool.resize(max(1, dram))
        if remote is not None:
            self.remote_pool.resize(remote)

    def switch(self, algorithm: str) -> None:
        """Change the eviction algorithm of every node's DRAM; the pools keep what they hold."""
        for pool in self.dram_pools:
            pool.switch(algorithm)


def _below(chain: Sequence[Key], tiers: Sequence[str]) -> list[Key]:
    """The keys that no local tier had."""
    had = [key for key, tier in zip(chain, tiers, strict=False) if tier == "remote"]
    return [*had, *chain[len(tiers) :]]
