"""The pools of DRAM and the disk as the tuning asks them to be: each namespace's share of a tier, and its algorithm."""

from collections.abc import Callable, Mapping
from functools import partial

from tiertune_connector.counters import Counters
from tiertune_connector.sessions.namespaces import Namespaces
from tiertune_connector.slower.lane import Lane
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tuning import LocalTier, Tuning


class Pools:
    """Thread-safe by the store's lock, which is DRAM's."""

    def __init__(
        self,
        *,
        dram: DramTier,
        disk: DiskTier | None,
        lanes: Mapping[str, Lane],
        namespaces: Namespaces,
        counters: Counters,
        tuning: Callable[[], Tuning],
    ) -> None:
        """``disk`` is the medium of the lane of that name; ``tuning`` is what is in force.

        Nothing is applied before ``retune`` or ``share``.
        """
        self._tuning = tuning
        self._dram = dram
        self._disk = disk
        self._lanes = lanes
        self._namespaces = namespaces
        self._counters = counters
        self._lock = dram.lock
        self._local: dict[LocalTier, DramTier | DiskTier] = {"dram": dram}
        if disk is not None:
            self._local["disk"] = disk
            for pool in disk.pools.values():
                pool.found = len(pool.pool) > 0

    def retune(self) -> None:
        """Ask another size and algorithm of every pool; they follow in ``settle`` and ``settle_disk``."""
        with self._lock:
            self._apply()

    def share(self) -> None:
        """A namespace has come: share the tiers anew."""
        with self._lock:
            self._lend()
            self._apply()

    def open_on_disk(self, digest: str, chunk_bytes: int) -> None:
        """Have a namespace's slab opened, and wait a while for it; if it is not, its first write tries again."""
        if self._disk is None:
            return
        algorithm = self._tuning().algorithm(digest, "disk")
        outcome = self._lanes["disk"].prepare(partial(self._disk.attach, digest, chunk_bytes, algorithm))
        if outcome is not Outcome.OK:
            self._counters.add("tier_errors_total", ("disk", "attach", outcome.value))

    def settle(self) -> bool:
        """One bounded step towards what the tuning asks, but for the disk; True while more is to do.

        Namespaces that nobody uses lend their share to the others meanwhile.
        """
        with self._lock:
            if self._lend():
                self._apply()
        return self._dram.settle()

    def settle_disk(self) -> bool:
        """The same on disk, which may hang: for a thread of its own."""
        return self._disk is not None and self._disk.settle()

    def _lend(self) -> bool:
        return self._namespaces.lend({tier: dict(medium.pools) for tier, medium in self._local.items()}, self._tuning())

    def _apply(self) -> None:
        tuning = self._tuning()
        for tier, medium in self._local.items():
            asked = {
                digest: (tuning.pool(digest, tier).capacity_bytes, tuning.algorithm(digest, tier))
                for digest in {**self._dram.pools, **medium.pools}  # those too that the disk has not opened yet
            }
            medium.retune(tuning.capacity_bytes(tier), asked)
