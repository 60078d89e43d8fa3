"""Host memory: one pool per namespace, its chunks in slots of shared segments.

Clients themselves copy from pinned slots, and to reserved ones. Memory grows by whole segments, already touched, and
shrinks slot by slot: a free slot's memory goes back at once, an empty segment is dropped. Both happen in ``settle``,
outside of requests and step by step, as does the rest of what a tuning asks: however much it is, a request waits for
one step at most.
"""

import logging
import threading
from collections import deque
from itertools import count

from tiertune_connector.chunk import Origin
from tiertune_connector.tiers.base import Counted, Outcome
from tiertune_connector.tiers.segment import Geometry, Segment
from tiertune_connector.tiers.shares import HANDED_OVER, Asked, LocalTier, retune
from tiertune_connector.tiers.slots import LEAVING_AT_ONCE, DramPool, Slot
from tiertune_connector.units import Clock, format_size

log = logging.getLogger(__name__)
_NO_MEMORY_S = 1.0
"""Wait before asking again a machine that had no memory left."""
_LOOKED_S = 1.0
"""A client that found a chunk by `tiers.index` has copied it by then."""


class DramTier(LocalTier[DramPool]):
    """Thread-safe under ``lock``, which the store shares: index operations are short and touch no bytes."""

    name = "dram"

    def __init__(self, *, segment_bytes: int, clock: Clock) -> None:
        """``clock`` gives monotonic seconds."""
        super().__init__()
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._settling = threading.Lock()
        self._try_again_at = 0.0
        self._short = False
        """Whether it was told that memory is too short for this capacity."""
        self._numbers = count(1)
        self._dropped: list[int] = []
        self._given_back: deque[tuple[float, DramPool, list[Slot]]] = deque()

    def attach(self, namespace: str, chunk_bytes: int, algorithm: str) -> DramPool | None:
        """The pool of a namespace, made if need be; None if it exists with another chunk size."""
        with self.lock:
            pool = self.pools.get(namespace)
            if pool is None:
                pool = self.pools[namespace] = DramPool(
                    namespace, chunk_bytes, algorithm, self._evicted, capacity_bytes=self.capacity_bytes
                )
            return pool if pool.chunk_bytes == chunk_bytes else None

    def retune(self, capacity_bytes: int, asked: Asked) -> None:
        """Set capacity and algorithm by namespace; pools without bytes of their own share the rest.

        Takes the first step of that; the others follow in ``settle``.
        """
        with self.lock:
            self._short = self._short and capacity_bytes == self.capacity_bytes
            self.capacity_bytes = capacity_bytes
            retune(self.pools, capacity_bytes, asked)
            for pool in self.pools.values():
                pool.fit("capacity")

    def settle(self) -> bool:
        """Take one bounded step with each pool: evict and give back, else grow by a segment; hand over.

        True while more is to do. What one pool has not given back yet, another cannot have. A pool that lends its
        share is forgotten when nothing is left of it.
        """
        with self._settling:
            with self.lock:
                pools = list(self.pools.values())
            shrunk = [self._shrink(pool) for pool in pools]  # all of them first: it makes room for those that grow
            more = [was or self._grow(pool) for pool, was in zip(pools, shrunk, strict=True)]
            self._give_back_again()
            for pool in pools:
                with self.lock:
                    more.append(pool.pool.hand_over(HANDED_OVER))
                    if pool.lends and pool.vacant:
                        self.pools.pop(pool.namespace, None)
                        pool.close()
            return any(more)

    def dropped_segments(self) -> list[int]:
        """Numbers of segments dropped since the last call: clients should unmap them."""
        with self.lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def reserve(self, namespace: str, key: bytes, origin: Origin, engine: str = "") -> Slot | None:
        """A slot to write, its key invisible until ``commit``; None if the key is here, or no slot is to be had."""
        with self.lock:
            pool = self.pools.get(namespace)
            evicted = pool.pool.reserve(key) if pool else None
            if pool is None or evicted is None:
                return None
            pool.evict(evicted, "room")
            slot = pool.free.pop()
            slot.generation = slot.segment.renew(slot.index)
            slot.origin, slot.engine, slot.used_at, slot.uses = origin, engine, self._clock(), 0
            slot.behind = {}
            return slot

    def commit(self, namespace: str, key: bytes, slot: Slot, digest: int, *, users: int = 0) -> None:
        """The chunk in a reserved slot is whole, and pinned for ``users``; ``digest`` is its xxh3."""
        with self.lock:
            pool = self.pools[namespace]
            slot.checksum = digest
            pool.commit(key, slot)
            for _ in range(users):
                self.pin(namespace, key)
            pool.trim()

    def abort(self, namespace: str, key: bytes, slot: Slot, *, quarantine: bool = False) -> None:
        """A reserved chunk will not come; with ``quarantine`` somebody may still be writing into the slot."""
        with self.lock:
            pool = self.pools[namespace]
            pool.pool.abort(key)
            if quarantine:
                pool.quarantined.append(slot)
                pool.fit("quarantine")
            else:
                pool.vacate(slot)

    def release_quarantine(self, namespace: str, slot: Slot) -> None:
        """Nobody can be writing into the slot any more."""
        with self.lock:
            pool = self.pools[namespace]
            pool.quarantined.remove(slot)
            pool.vacate(slot)
            pool.fit("capacity")

    def pin(self, namespace: str, key: bytes, *, use: bool = True) -> Slot | None:
        """The slot of a visible key, kept until ``unpin``; a copy to another tier is no ``use``."""
        with self.lock:
            pool = self.pools.get(namespace)
            slot = pool.pool.pin(key) if pool else None
            if slot is not None and use:
                slot.used_at = self._clock()
                slot.uses += 1
            return slot

    def unpin(self, namespace: str, key: bytes) -> None:
        with self.lock:
            pool = self.pools.get(namespace)
            if pool is not None:  # else the store ended during a load
                pool.unpin(key)

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> Counted:
        """In steps, with requests served in between; the caller keeps out what comes meanwhile and should go."""
        with self.lock:
            pools = self._named(namespace)
        return Outcome.OK, self._drop_from(pools, tenant, at_once=LEAVING_AT_ONCE)

    def close(self) -> None:
        with self.lock:
            for pool in self.pools.values():
                pool.close()
            self.pools.clear()
            self._given_back.clear()

    def _shrink(self, pool: DramPool) -> bool:
        with self.lock:
            before = pool.pool.capacity
            pool.fit("capacity")
            surplus = pool.provisioned - len(pool.quarantined) - pool.pool.capacity
            leaving = [pool.free.pop() for _ in range(min(len(pool.free), surplus, LEAVING_AT_ONCE))]
            for slot in leaving:
                pool.retired.setdefault(slot.segment.number, []).append(slot)
            pool.provisioned -= len(leaving)
        for slot in leaving:
            slot.given_back = True
            slot.segment.give_back(slot.index)
        if leaving:
            self._given_back.append((self._clock(), pool, leaving))
        for segment in {slot.segment for slot in leaving}:  # only `settle` changes segments and retired slots
            if len(pool.retired[segment.number]) == segment.geometry.slots:
                with self.lock:
                    del pool.retired[segment.number], pool.segments[segment.number]
                    self._dropped.append(segment.number)
                segment.close()
        return bool(leaving) or pool.pool.capacity < before

    def _give_back_again(self) -> None:
        """Give back again what a client took anew by reading a slot while its chunk left."""
        while self._given_back and self._clock() - self._given_back[0][0] >= _LOOKED_S:
            _, pool, slots = self._given_back.popleft()
            for slot in slots:
                if slot.given_back and slot.segment.number in pool.segments:
                    slot.segment.give_back(slot.index)

    def _grow(self, pool: DramPool) -> bool:
        """Memory is taken outside the lock: only `settle` changes segments and retired slots."""
        with self.lock:
            left = self.capacity_bytes - sum(other.provisioned * other.stride for other in self.pools.values())
            a_segment = max(1, self._segment_bytes // pool.stride)
            missing = min(pool.allowed - pool.provisioned, a_segment, left // pool.stride)
        if missing <= 0 or self._clock() < self._try_again_at:
            return False
        retired = next(filter(None, pool.retired.values()), [])
        slots = retired[-missing:]
        try:
            if retired:
                segment = slots[0].segment
                segment.take_again([slot.index for slot in slots])
            else:
                segment = Segment.create(next(self._numbers), Geometry(missing, pool.chunk_bytes))
                slots = [Slot(segment, index) for index in range(missing)]
        except OSError as error:  # effective capacity stays below the desired one, as is reported
            self._try_again_at = self._clock() + _NO_MEMORY_S
            if not self._short:
                has, wanted = format_size(self.capacity_bytes - left), format_size(self.capacity_bytes)
                log.warning("dram has %s of %s: %s; it goes on trying", has, wanted, error.strerror)
            self._short = True
            return False
        for slot in slots:
            slot.given_back = False
        with self.lock:
            del retired[-len(slots) :]
            pool.segments[segment.number] = segment
            pool.free.extend(slots)
            pool.provisioned += len(slots)
            pool.fit("capacity")
        return True
