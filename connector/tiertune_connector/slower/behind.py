"""Which chunks are written behind to slower tiers, and when: at commit, at a second use, or before they are evicted."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from weakref import WeakKeyDictionary

from tiertune_connector.pool import Pool
from tiertune_connector.slower.lane import Lane
from tiertune_connector.slower.writers import Write
from tiertune_connector.tiers.base import Evicted, Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.slots import DramPool, Slot
from tiertune_connector.tuning import SlowerTier, Tuning

BELIEVED_S = 300.0
"""A tier is believed for so long to hold what it was given: what is used later is offered again."""
LOOKED_AT = 512
"""Victims that a step looks at: a fraction of a millisecond with the lock held."""
_AHEAD_SHARE = 4
"""One in so many chunks of a pool may leave at once, and has been written before."""
_MOST_AHEAD = 8192
"""Nor more than so many: they are listed with the lock held."""
_WAITING = 128
"""Victims that wait at a time: they are pinned, and every eviction steps over them."""
_QUEUED_SHARE = 2
"""At most one in so many chunks of a pool waits to be written behind."""
_MADE_ROOM = ("room", "capacity")


class WriteBehind:
    """Feeds the lanes' queues from DRAM. Guarded by the DRAM tier's lock."""

    def __init__(
        self,
        dram: DramTier,
        lanes: Mapping[str, Lane],
        disk: DiskTier | None = None,
        *,
        clock: Callable[[], float],
        tuning: Callable[[], Tuning],
    ) -> None:
        """``clock`` gives monotonic seconds, as the DRAM tier's; ``tuning`` is what is in force."""
        self._dram = dram
        self._disk = disk
        self._lanes = lanes
        self._clock = clock
        self._tuning = tuning
        self._victims = {tier: WeakKeyDictionary[DramPool, deque[bytes]]() for tier in lanes}
        """Of each pool those that steps have not looked at yet."""

    def tiers(self, *when: str) -> list[SlowerTier]:
        """The tiers that are written at ``commit``, or at ``evict``."""
        tiers, tuned = list[SlowerTier](), self._tuning().tiers
        if "disk" in self._lanes and tuned.disk.write in when and tuned.disk.capacity_bytes:
            tiers.append("disk")
        if "remote" in self._lanes and tuned.remote.write in when:
            tiers.append("remote")
        return tiers

    def used(self, digest: str, chunks: Sequence[tuple[bytes, Slot]]) -> None:
        """Queue chunks that were committed or used for the tiers written at commit, where they are not yet."""
        for tier in self.tiers("commit"):
            for key, slot in self._missing(tier, chunks):
                self._offer(tier, digest, key, slot)

    def clean_ahead(self) -> None:
        """Queue the next victims where they are not yet, so that evicting never waits: one step of each pool."""
        for tier in self.tiers("evict", "commit"):
            lane = self._lanes[tier]
            refused = lane.breaker.open or lane.breaker.paused
            for digest, held in list(self._dram.pools.items()):
                with self._dram.lock:
                    room = 0 if refused else min(_WAITING, _queue_length(held)) - lane.writers.queued(digest)
                    for key, slot in self._missing(tier, self._next_victims(tier, held)) if room > 0 else ():
                        room -= not lane.breaker.refuses(key) and self._offer(tier, digest, key, slot)
                        if room <= 0:
                            break

    def lost(self, chunks: Sequence[Evicted]) -> None:
        """Count of what left DRAM the chunks whose turn to be written before had not come."""
        for tier in self.tiers("evict") if chunks else ():
            left = [chunk for chunk in chunks if tier not in chunk.behind and chunk.reason in _MADE_ROOM]
            count = sum(self._wanted(tier, one.namespace, one.key, used=one.used) for one in left)
            if count:
                self._lanes[tier].writers.missed(count)

    def _missing(self, tier: SlowerTier, chunks: Iterable[tuple[bytes, Slot]]) -> Iterator[tuple[bytes, Slot]]:
        """Those that a tier does not hold, or may have lost since; the latter once after each use."""
        doubted = self._clock() - BELIEVED_S
        for key, slot in chunks:
            known = slot.behind.get(tier, -inf)
            if known < doubted and known < slot.used_at:
                yield key, slot

    def _next_victims(self, tier: SlowerTier, held: DramPool) -> Iterator[tuple[bytes, Slot]]:
        """The next few of those that leave first, all of them by and by: on from where the last step ended."""
        pool, left = held.pool, self._victims[tier].setdefault(held, deque())
        if not left:
            left.extend(islice(pool, _ahead(pool)))
        for _ in range(min(len(left), LOOKED_AT)):
            key = left.popleft()
            slot = pool.get(key)
            if slot is not None:
                yield key, slot

    def _offer(self, tier: SlowerTier, digest: str, key: bytes, slot: Slot) -> bool:
        """Queue a chunk, if the tier is to have it; whether it was."""
        if self._lanes[tier].breaker.open or not self._wanted(tier, digest, key, used=slot.uses > 0):
            return False
        if self._dram.pin(digest, key, use=False) is None:
            return False
        again = tier in slot.behind
        slot.behind[tier] = inf

        def done(outcome: Outcome | None) -> None:
            with self._dram.lock:
                if outcome is Outcome.OK:
                    slot.behind[tier] = self._clock()
                else:
                    slot.behind.pop(tier, None)
                self._dram.unpin(digest, key)

        write = Write(digest, key, slot.view(), replace(slot.origin, checksum=slot.checksum), done, again=again)
        self._lanes[tier].writers.queue(write, at_most=_queue_length(self._dram.pools[digest]))
        return True

    def _wanted(self, tier: SlowerTier, digest: str, key: bytes, *, used: bool) -> bool:
        """Whether a chunk is admitted, and the disk lacks it: a namespace without a share does not make it full.

        Nor does one that nobody uses take room there from those that somebody does.
        """
        if not used and getattr(self._tuning().admission, tier) != "always":
            return False
        if tier == "disk" and self._dram.pools[digest].lends:
            return False
        held = self._disk.pools.get(digest) if self._disk and tier == "disk" else None
        return held is None or (held.pool.capacity > 0 and key not in held.pool)


def _ahead(pool: Pool[Slot]) -> int:
    """How many victims are to be written: with the free room, the share that may leave at once."""
    free = pool.capacity - len(pool)
    return max(0, min(pool.capacity // _AHEAD_SHARE + 1 - free, _MOST_AHEAD))


def _queue_length(held: DramPool) -> int:
    """A slow tier must not pin the pool: what does not find room is offered again when it is used again."""
    return max(1, held.pool.capacity // _QUEUED_SHARE)
