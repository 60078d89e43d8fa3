"""What every request finds in the tiers. Contents do not depend on what is fetched: every chain is written through."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.traces import Trace
from tiertune_connector.eviction import Key
from tiertune_connector.pool import Pool

_STICKY = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sizes:
    """Capacities in chunks, and the algorithms that order victims."""

    dram: int
    """Per node."""
    disk: int
    """Per node."""
    remote: int
    dram_eviction: str = "lru"
    disk_eviction: str = "lru"
    remote_eviction: str = "lru"


class Found(NamedTuple):
    """One request and the tiers of its longest gapless prefix; the first ``computed`` chunks are on the GPU."""

    at_s: float
    """From the first request."""
    prompt_tokens: int
    computed: int
    tiers: list[str]


def sizes(scenario: Scenario, unique: int, chunk_bytes: int) -> Sizes:
    """The scenario's own split."""
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
    """The same total of DRAM and remote, split anew; all LRU."""
    tiers = scenario.tiers
    total = int(tiers.dram.chunks(unique, chunk_bytes) + tiers.remote.chunks(unique, chunk_bytes))
    return Sizes(
        dram=max(1, int(total * (1 - remote_share) / scenario.nodes)),
        disk=int(tiers.disk.chunks(unique, chunk_bytes) / scenario.nodes),
        remote=int(total * remote_share),
    )


def route(trace: Trace, scenario: Scenario, rng: np.random.Generator) -> list[int]:
    """The engine of every request."""
    count = len(trace)
    if scenario.routing == "random":
        engines = rng.integers(0, scenario.engines, count)
    elif scenario.routing == "round_robin":
        engines = np.arange(count) % scenario.engines
    else:
        hashed = (trace.session.astype(np.uint64) * _STICKY) >> np.uint64(33)
        engines = (hashed % np.uint64(scenario.engines)).astype(np.int64)
    placed: list[int] = engines.tolist()
    return placed


def contents(trace: Trace, scenario: Scenario, engines: Sequence[int], capacities: Sizes) -> list[Found]:
    """Play the whole trace through the pools."""
    fleet = _Fleet(scenario, capacities, trace.block_tokens)
    start = float(trace.t[0])
    found = []
    for at, prompt, engine, chain in zip(trace.t.tolist(), trace.input_len.tolist(), engines, trace.keys, strict=True):
        computed, tiers = fleet.find(engine, chain)
        found.append(Found(at - start, prompt, computed, tiers))
        fleet.write_through(engine, chain, tiers)
    return found


class _Fleet:
    """The pools of all engines and nodes, and the remote one."""

    def __init__(self, scenario: Scenario, capacities: Sizes, block_tokens: int) -> None:
        self._per_node = scenario.engines // scenario.nodes
        self._all = scenario.tiers.remote.touch == "all"
        gpu_chunks = scenario.gpu_cache_tokens // block_tokens
        nodes = range(scenario.nodes)
        self._gpu: list[Pool[bool]] = [Pool(gpu_chunks) for _ in range(scenario.engines) if gpu_chunks]
        self._dram: list[Pool[bool]] = [Pool(capacities.dram, capacities.dram_eviction) for _ in nodes]
        self._disk: list[Pool[bool]] = [
            Pool(capacities.disk, capacities.disk_eviction) for _ in nodes if capacities.disk
        ]
        self._remote: Pool[bool] = Pool(capacities.remote, capacities.remote_eviction)

    def find(self, engine: int, chain: Sequence[Key]) -> tuple[int, list[str]]:
        """How many leading chunks are on the GPU, and the tier of each leading chunk."""
        node = engine // self._per_node
        computed = self._gpu[engine].prefix(chain) if self._gpu else 0
        tiers = ["gpu"] * computed
        dram, disk, remote = self._dram[node], self._disk[node] if self._disk else (), self._remote
        for key in chain[computed:]:
            if key in dram:
                tiers.append("dram")
            elif key in disk:
                tiers.append("disk")
            elif key in remote:
                tiers.append("remote")
            else:
                break
        return computed, tiers

    def write_through(self, engine: int, chain: Sequence[Key], tiers: Sequence[str]) -> None:
        """Touch or insert the chain everywhere, nearest tier first."""
        node = engine // self._per_node
        if self._gpu:
            self._gpu[engine].write_through(chain, place=True)
        self._dram[node].write_through(chain, place=True)
        if self._disk:
            self._disk[node].write_through(chain, place=True)
        if not self._all:
            chain = [key for key, tier in _with_tiers(chain, tiers) if tier in {"remote", ""}]
        self._remote.write_through(chain, place=True)


def _with_tiers(chain: Sequence[Key], tiers: Sequence[str]) -> list[tuple[Key, str]]:
    """Every key of a chain with its tier; "" where none has it."""
    return list(zip(chain, [*tiers, *[""] * (len(chain) - len(tiers))], strict=True))
