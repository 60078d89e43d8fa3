"""Which chunks are written behind to slower tiers, and when: at commit, at a second use, or before they are evicted."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal

from tiertune_connector.lane import Lane, Write
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.dram import DramPool, DramTier, Slot
from tiertune_connector.tuning import Tuning

SlowTier = Literal["disk", "remote"]
_CLEAN_AHEAD = 16
_QUEUED_SHARE = 2
"""At most one in so many chunks of a pool waits to be written behind."""


class WriteBehind:
    """Feeds the lanes' queues from DRAM. Guarded by the DRAM tier's lock."""

    def __init__(self, dram: DramTier, lanes: Mapping[str, Lane]) -> None:
        self._dram = dram
        self._lanes = lanes

    def tiers(self, tuning: Tuning, when: str) -> list[SlowTier]:
        """The tiers that are written at ``commit``, or at ``evict``."""
        tiers, tuned = list[SlowTier](), tuning.tiers
        if "disk" in self._lanes and tuned.disk.write == when and tuned.disk.capacity_bytes:
            tiers.append("disk")
        if "remote" in self._lanes and tuned.remote.write == when:
            tiers.append("remote")
        return tiers

    def used(self, tuning: Tuning, digest: str, chunks: Sequence[tuple[bytes, Slot]]) -> None:
        """Queue chunks that were committed or used for the tiers written at commit, where they are not yet."""
        for tier in self.tiers(tuning, "commit"):
            for key, slot in chunks:
                self._offer(tuning, tier, digest, key, slot)

    def clean_ahead(self, tuning: Tuning) -> None:
        """Queue the next victims for tiers that take what is evicted, so that evicting never waits."""
        for tier in self.tiers(tuning, "evict"):
            for digest, held in list(self._dram.pools.items()):
                with self._dram.lock:
                    if len(held.pool) * 10 < held.pool.capacity * 9:
                        continue
                    room = _queue_length(held) - self._lanes[tier].queued()
                    for key in list(islice(held.pool, max(0, min(room, _CLEAN_AHEAD)))):
                        slot = held.pool.get(key)
                        if slot is not None:
                            self._offer(tuning, tier, digest, key, slot)

    def _offer(self, tuning: Tuning, tier: SlowTier, digest: str, key: bytes, slot: Slot) -> None:
        admitted = getattr(tuning.admission, tier) == "always" or slot.uses > 0
        if tier in slot.behind or not admitted or self._lanes[tier].breaker.open:
            return
        if self._dram.pin(digest, key, use=False) is None:
            return
        slot.behind.add(tier)

        def done(outcome: Outcome | None) -> None:
            with self._dram.lock:
                if outcome is not Outcome.OK:
                    slot.behind.discard(tier)
                self._dram.unpin(digest, key)

        write = Write(digest, key, slot.view(), slot.origin, done)
        self._lanes[tier].write_behind(write, at_most=_queue_length(self._dram.pools[digest]))


def _queue_length(held: DramPool) -> int:
    """A slow tier must not pin the pool: what does not find room is offered again when it is used again."""
    return max(1, held.pool.capacity // _QUEUED_SHARE)
