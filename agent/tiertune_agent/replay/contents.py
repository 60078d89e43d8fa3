"""What every request finds in the tiers of a fleet: production's pools, which can change between requests.

Contents do not depend on what is fetched: every chain is written through.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiertune_agent.replay.scenario import ByHand, Scenario
from tiertune_agent.replay.traces import Trace, TraceError
from tiertune_connector.eviction import Key
from tiertune_connector.whatif.simulated import SimulatedPool

if TYPE_CHECKING:
    from tiertune_agent.replay.tuned import ReplayAgent

LONGEST_DAYS = 366
"""Most days that a replay plays: longer times are not in seconds."""
_STICKY = np.uint64(0x9E3779B97F4A7C15)


class ReplayedRequest(NamedTuple):
    """One request and the tiers of its longest gapless prefix."""

    at_s: float
    """Seconds from the first request."""
    prompt_tokens: int
    tiers: list[str]
    engine: int = 0


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


def arrivals(trace: Trace, scenario: Scenario) -> list[float]:
    """Seconds from the first request to each; TraceError if they exceed ``LONGEST_DAYS``."""
    times: list[float] = ((trace.t - trace.t[0]) * scenario.time_factor).tolist()
    if times[-1] > LONGEST_DAYS * 86400:
        raise TraceError(
            f"{trace.name}: column 't' and time_factor make {times[-1] / 86400:,.0f} days, and a replay plays "
            f"{LONGEST_DAYS} at most: times are in seconds"
        )
    return times


def route(trace: Trace, scenario: Scenario, rng: np.random.Generator) -> list[int] | None:
    """The engine of every request; None if it depends on the outcome of earlier requests."""
    count = len(trace)
    if scenario.routing == "least_loaded":
        return None
    if scenario.routing == "sticky":
        return stick(trace, scenario.engines)
    by_chance = scenario.routing == "random"
    engines = rng.integers(0, scenario.engines, count) if by_chance else np.arange(count) % scenario.engines
    placed: list[int] = engines.tolist()
    return placed


def stick(trace: Trace, engines: int) -> list[int]:
    """The engine of every request, picked by a hash of its session."""
    hashed = (trace.session.astype(np.uint64) * _STICKY) >> np.uint64(33)
    placed: list[int] = (hashed % np.uint64(engines)).tolist()
    return placed


def contents(
    trace: Trace,
    scenario: Scenario,
    engines: Iterable[int],
    fleet: FleetPools,
    conductor: "ReplayAgent | None" = None,
) -> Iterator[ReplayedRequest]:
    """Play the trace through the fleet's pools lazily: a request is looked up only when the iterator is asked for it.

    ``conductor`` is told of each request before its lookup, and before somebody changes the fleet by hand; it may
    change the fleet then. The next of ``engines`` is read only then, too, as it may depend on the outcome of earlier
    requests.
    """
    requests = zip(arrivals(trace, scenario), trace.input_len.tolist(), trace.chains, engines, strict=True)
    by_hand = sorted(((event.at_s, event.by_hand) for event in scenario.events if event.by_hand), key=itemgetter(0))
    for index, (at_s, prompt, chain, engine) in enumerate(requests):
        while by_hand and by_hand[0][0] <= at_s:
            done_s, change = by_hand.pop(0)
            if conductor is not None:
                conductor.until(done_s)
            _do(change, fleet)
        if conductor is not None:
            conductor.request(index, at_s, engine)
        tiers = fleet.find(engine, chain)
        yield ReplayedRequest(at_s, prompt, tiers, engine)
        fleet.write_through(engine, chain, tiers)


def _do(by_hand: ByHand, fleet: FleetPools) -> None:
    fleet.resize(dram=int(by_hand.dram_factor * fleet.dram_pools[0].capacity))
    if by_hand.eviction is not None:
        fleet.switch(by_hand.eviction)
