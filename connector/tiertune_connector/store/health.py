"""Whether tiers are well, and what a fetch from each costs now, learned from requests, or else from probes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from tiertune_connector.copying.probe import CopyProbe
from tiertune_connector.cost import FetchCost, FetchEstimate
from tiertune_connector.slower.reach import Reach

_DRAM_SILENT_S = 1.0
_DISK_SILENT_S = 20.0
"""Less than the time between two probes."""
_PROBED = 512
"""Chunks of a pool that probes copy in turn: one copied just before would come out of a processor's cache."""

_CACHE_BYTES = 64 << 20
"""A pool that holds less may lie wholly in a processor's cache: it is probed only if no pool holds more."""


@dataclass(eq=False)
class Health(Reach):
    """Thread-safe."""

    def __post_init__(self) -> None:
        self._lock = self.dram.lock
        self._dram_cost = FetchCost(now=self.clock(), t0_s=1e-4, bytes_per_s=5e9)
        self._copies = CopyProbe(self.clock)
        self._probed = self._disk_probed = 0

    def close(self) -> None:
        """Nobody probes any more."""
        self._copies.close()

    def told(self, tier: str) -> tuple[str, str]:
        """State and reason of a tier."""
        lane = self.lanes.get(tier)
        if tier != "dram" and lane is None:
            return "absent", "not configured"
        if lane is not None and lane.breaker.state != "ok":
            return lane.breaker.state, lane.breaker.reason
        tuning = self.tuning()
        if tuning.bypass:
            return "bypassed", "the store is bypassed"
        if tier == "remote" and tuning.tiers.remote.fetch == "off":
            return "bypassed", "remote fetch is off by tuning"
        return "ok", ""

    @property
    def remote_unwell(self) -> bool:
        """Whether to probe the remote before its time."""
        return "remote" in self.lanes and self.lanes["remote"].breaker.unwell

    def costs(self, coming: Mapping[str, int], chunk_bytes: int) -> dict[str, FetchEstimate]:
        """Current fetch cost of each tier that has one; ``coming`` counts the chunks already coming, by tier."""
        estimates = {"dram": self.dram_cost()}
        for name, lane in self.lanes.items():
            count = coming.get(name, 0)
            estimates[name] = lane.transit.estimate(count, count * chunk_bytes)
        return {name: estimate for name, estimate in estimates.items() if estimate is not None}

    def dram_cost(self) -> FetchEstimate | None:
        """Cost of a fetch from DRAM."""
        with self._lock:
            return self._dram_cost.estimate(self.clock())

    def dram_took(self, chunks: int, nbytes: int, seconds: float) -> None:
        """An engine reports what a load from DRAM took; one smaller than other models' chunks is ignored.

        Threads and messages dominate it, and would make larger chunks seem many times slower to copy.
        """
        with self._lock:
            largest = max((pool.chunk_bytes for pool in self.dram.pools.values() if pool.pool.visible), default=0)
            if nbytes >= largest:
                self._dram_cost.observe(chunks, nbytes, seconds, self.clock())

    def probe(self) -> bool:
        """Measure all tiers outside of requests. Waits for the remote.

        True if the remote's health is not settled: probe again soon.
        """
        with self._lock:
            chunk_bytes = max((pool.chunk_bytes for pool in self.dram.pools.values()), default=1 << 18)
        self._probe_dram()
        self._probe_disk()
        if "remote" not in self.lanes:
            return False
        self.lanes["remote"].probe(chunk_bytes)
        return self.lanes["remote"].breaker.unsettled

    def try_again(self) -> None:
        """Let requests ask a dead disk again, and writes a tier that had no room."""
        for name, lane in self.lanes.items():
            lane.try_again(asking=name != "remote")

    def _probe_dram(self) -> None:
        """If no engine has reported lately, copy as they do: an engine that found DRAM slow would never retry it."""
        with self._lock:
            held = [pool for pool in self.dram.pools.values() if pool.pool.visible]
            if not held or self._dram_cost.age_s(self.clock()) < _DRAM_SILENT_S:
                return
            # With small chunks, threads and clocks dominate.
            largest = max(held, key=lambda one: (one.resident_bytes >= _CACHE_BYTES, one.chunk_bytes))
            pool = largest.pool
            first = self._probed % min(len(pool.visible), _PROBED)
            self._probed = first + self._copies.most
            pinned = {key: slot for key in islice(pool, first, self._probed) if (slot := pool.pin(key)) is not None}
        try:
            nbytes, seconds = self._copies.copy([slot.view() for slot in pinned.values()])
        finally:
            with self._lock:
                for key in pinned:
                    self.dram.unpin(largest.namespace, key)
        with self._lock:
            self._dram_cost.observe(len(pinned), nbytes, seconds, self.clock())

    def _probe_disk(self) -> None:
        """Read a chunk of a size not read for a while: an engine that found it slow would never retry it."""
        disk, number = self.disk, self._disk_probed
        if disk is None:
            return
        self._disk_probed += 1
        chunks = disk.one_of_each_size(number)
        first = number % max(1, len(chunks))  # one is read at a time
        for namespace, key, nbytes in chunks[first:] + chunks[:first]:
            read = partial(disk.read, namespace, key, use=False)
            self.lanes["disk"].measure(read, nbytes, _DISK_SILENT_S)
