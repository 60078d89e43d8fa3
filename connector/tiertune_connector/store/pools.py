"""Pools of DRAM and the disk, kept as the tuning asks: each namespace's share of a tier, and its algorithm."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tiertune_connector.counters import Counters
from tiertune_connector.sessions.namespaces import Namespaces
from tiertune_connector.slower.reach import Reach
from tiertune_connector.tiers.base import Outcome

if TYPE_CHECKING:
    from tiertune_connector.tiers.disk import DiskTier
    from tiertune_connector.tiers.dram import DramTier
    from tiertune_connector.tuning import LocalTier


@dataclass(eq=False)
class Pools(Reach):
    """Thread-safe by the store's lock, which is DRAM's. Nothing is applied before ``retune`` or ``share``."""

    namespaces: Namespaces
    counters: Counters

    def __post_init__(self) -> None:
        self.local: dict[LocalTier, DramTier | DiskTier] = {"dram": self.dram}
        if self.disk is not None:
            self.local["disk"] = self.disk
            for pool in self.disk.pools.values():
                pool.found = len(pool.pool) > 0

    def retune(self) -> None:
        """Set every pool's size and algorithm anew; ``settle``, and the disk's own, make them so.

        Call with the store's lock held, as ``share``.
        """
        tuning = self.tuning()
        for tier, medium in self.local.items():
            asked = {
                digest: (tuning.pool(digest, tier).capacity_bytes, tuning.algorithm(digest, tier))
                for digest in {**self.dram.pools, **medium.pools}  # also those the disk has not opened yet
            }
            medium.retune(tuning.capacity_bytes(tier), asked)

    def share(self) -> None:
        """Share the tiers anew for a new namespace."""
        self._lend()
        self.retune()

    def open_on_disk(self, digest: str, chunk_bytes: int) -> None:
        """Have a namespace's slab opened, waiting a while; if that fails, its first write tries again."""
        if self.disk is None:
            return
        outcome = self.lanes["disk"].prepare(partial(self.disk.attach, digest, chunk_bytes))
        if outcome is not Outcome.OK:
            self.counters.add("tier_errors_total", ("disk", "attach", outcome.value))

    def unknown(self, namespace: str | None = None) -> list[str]:
        """Namespaces with chunks of which nothing else is known, or of these only the named one."""
        return [
            digest
            for medium in self.local.values()
            for digest, held in list(medium.pools.items())
            if namespace in (None, digest) and len(held.pool) and self.namespaces.served(digest) is None
        ]

    def settle(self) -> bool:
        """Take one bounded step towards the tuning, except on disk; True while more is to do.

        Namespaces that nobody uses lend their share to the others meanwhile.
        """
        with self.dram.lock:
            if self._lend():
                self.retune()
        return self.dram.settle()

    def _lend(self) -> bool:
        return self.namespaces.lend({tier: dict(medium.pools) for tier, medium in self.local.items()}, self.tuning())
