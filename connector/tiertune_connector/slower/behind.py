"""Which chunks are written behind to slower tiers, and when: at commit, at a second use, or before eviction."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from weakref import WeakKeyDictionary

from tiertune_connector.pool import Pool
from tiertune_connector.slower.reach import Reach
from tiertune_connector.slower.writers import Write
from tiertune_connector.tiers.base import Evicted, Outcome
from tiertune_connector.tiers.slots import DramPool, Slot
from tiertune_connector.tuning import SlowerTier

BELIEVED_S = 300.0
"""How long a tier is believed to hold what it was given: what is used later is offered again."""
LOOKED_AT = 512
"""Victims one step looks at: a fraction of a millisecond with the lock held."""
_AHEAD_SHARE = 4
"""One in so many chunks of a pool may leave at once, so it is written before."""
_MOST_AHEAD = 8192
"""Most chunks to write ahead: they are listed with the lock held."""
_WAITING = 128
"""Victims waiting at a time: they are pinned, and every eviction steps over them."""
_DRAINED = 8
"""With one in so many written since the last step, perhaps 5 ms ago, a queue would be empty before a step in 50 ms."""
_QUEUED_SHARE, _PINNED_SHARE = 1 / 2, 5 / 8
"""Of a pool's chunks waits at most this for one tier, and for all tiers together."""
_MADE_ROOM = ("room", "capacity")
Chunk = tuple[bytes, Slot]
"""A key, and where its chunk lies in DRAM."""


@dataclass(eq=False)
class WriteBehind(Reach):
    """Feeds the lanes' queues from DRAM. Guarded by the DRAM tier's lock."""

    def __post_init__(self) -> None:
        self._victims = {tier: WeakKeyDictionary[DramPool, deque[bytes]]() for tier in self.lanes}
        """Each pool's victims that no step has looked at yet."""

    def tiers(self, *when: str) -> list[SlowerTier]:
        """The tiers whose tuned ``write`` (``commit``, ``evict``) is in ``when``."""
        tuned = self.tuning().tiers
        writes: dict[SlowerTier, str] = {
            "disk": tuned.disk.write if tuned.disk.capacity_bytes else "off",
            "remote": tuned.remote.write,
        }
        return [tier for tier, write in writes.items() if tier in self.lanes and write in when]

    def used(self, digest: str, chunks: Sequence[Chunk]) -> None:
        """Queue committed or used chunks for the tiers that are written at commit and lack them."""
        for tier in self.tiers("commit"):
            for key, slot in self._missing(tier, chunks):
                self._offer(tier, digest, key, slot)

    def clean_ahead(self) -> bool:
        """Queue each pool's next victims for tiers that lack them, so that evicting never waits: one step.

        True: a queue that had drained was filled to its end, and may soon be empty with more to write.
        """
        drains = False
        for tier in self.tiers("evict", "commit"):
            lane = self.lanes[tier]
            if lane.breaker.open or lane.breaker.paused:
                continue
            for digest, held in list(self.dram.pools.items()):
                with self.dram.lock:
                    most = min(_WAITING, self._queue_length(tier, digest))
                    drained = room = most - lane.writers.queued(digest)
                    for key, slot in self._missing(tier, self._next_victims(tier, held)) if room > 0 else ():
                        room -= not lane.breaker.refuses(key) and self._offer(tier, digest, key, slot)
                        if room <= 0:
                            drains |= drained * _DRAINED >= most
                            break
        return drains

    def lost(self, chunks: Sequence[Evicted]) -> None:
        """Count the chunks that left DRAM before their turn to be written.

        What was offered and dropped is counted by then. A dead tier is not even offered what it takes at commit.
        """
        dead = [tier for tier in self.tiers("commit") if self.lanes[tier].breaker.open]
        for tier in (*self.tiers("evict"), *dead):
            left = [chunk for chunk in chunks if tier not in chunk.behind and chunk.reason in _MADE_ROOM]
            count = sum(self._wanted(tier, one.namespace, one.key, used=one.used) for one in left)
            if count:
                self.lanes[tier].writers.missed(count)

    def _missing(self, tier: SlowerTier, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The chunks that a tier does not hold or may have lost; a maybe lost one only once after each use."""
        doubted = self.clock() - BELIEVED_S
        for key, slot in chunks:
            known = slot.behind.get(tier, -inf)
            if known < doubted and known < slot.used_at:
                yield key, slot

    def _next_victims(self, tier: SlowerTier, held: DramPool) -> Iterator[Chunk]:
        """A pool's next few victims, on from where the last step ended; in time all have their turn."""
        pool, left = held.pool, self._victims[tier].setdefault(held, deque())
        if not left:
            left.extend(islice(pool, _ahead(pool)))
        for _ in range(min(len(left), LOOKED_AT)):
            key = left.popleft()
            slot = pool.get(key)
            if slot is not None:
                yield key, slot

    def _offer(self, tier: SlowerTier, digest: str, key: bytes, slot: Slot) -> bool:
        """Hand a chunk to a tier's writers, if the tier is to have it; whether it was."""
        if self.lanes[tier].breaker.open or not self._wanted(tier, digest, key, used=slot.uses > 0):
            return False
        if self.dram.pin(digest, key, use=False) is None:
            return False
        slot.behind[tier] = inf

        def done(outcome: Outcome | None) -> None:
            with self.dram.lock:
                slot.behind[tier] = self.clock() if outcome and outcome.kept else -inf
                self.dram.unpin(digest, key)

        write = Write(digest, key, slot.view(), replace(slot.origin, checksum=slot.checksum), done)
        self.lanes[tier].writers.queue(write, at_most=self._queue_length(tier, digest))
        return True

    def _wanted(self, tier: SlowerTier, digest: str, key: bytes, *, used: bool) -> bool:
        """Whether a tier admits a chunk and, if it is the disk, lacks it.

        The disk gets none of a namespace without a share there, which would make it pass for full, nor of a namespace
        that nobody uses, which would take room there from those in use.
        """
        if not used and getattr(self.tuning().admission, tier) != "always":
            return False
        if tier == "disk" and self.dram.pools[digest].lends:
            return False
        held = self.disk.pools.get(digest) if self.disk and tier == "disk" else None
        return held is None or (held.pool.capacity > 0 and key not in held.pool)

    def _queue_length(self, tier: SlowerTier, digest: str) -> int:
        """Most chunks of a pool in a tier's queue, lest slow tiers pin it all; others are offered when used again."""
        capacity = self.dram.pools[digest].pool.capacity
        elsewhere = sum(lane.writers.queued(digest) for name, lane in self.lanes.items() if name != tier)
        return max(1, int(min(_QUEUED_SHARE * capacity, _PINNED_SHARE * capacity - elsewhere)))


def _ahead(pool: Pool[Slot]) -> int:
    """How many victims to write: with the free room, they make the share that may leave at once."""
    free = pool.capacity - len(pool)
    return max(0, min(pool.capacity // _AHEAD_SHARE + 1 - free, _MOST_AHEAD))
