"""One namespace on disk: a pool of keys, and the slots of its slab file."""

from collections.abc import Sequence

import msgspec

from tiertune_connector.chunk import NOBODY, Header
from tiertune_connector.pool import Pool
from tiertune_connector.tiers.base import Evicted, OnEvicted
from tiertune_connector.tiers.shares import Held
from tiertune_connector.tiers.slab import Slab
from tiertune_connector.units import Clock

WIPED_AT_ONCE = 32
"""Chunks whose room one step gives back: about a millisecond of disk time."""


class DiskSlot(msgspec.Struct, eq=False, gc=False):  # no garbage collector goes through a million of them
    """A place in a slab file, and what is known of the chunk in it."""

    number: int
    used_at: float | None = None
    """When the chunk came or was last read; None: in an earlier run."""
    used: bool = True
    """Whether it was read since it came; True for one of an earlier run, as nobody knows."""
    tenant: bytes = b""


class DiskPool(Held):
    """An index that never waits for the disk once it is made; callers that change it hold its tier's lock."""

    pool: Pool[DiskSlot]

    def __init__(
        self,
        slab: Slab,
        algorithm: str,
        capacity: int,
        clock: Clock,
        evicted: OnEvicted,
    ) -> None:
        """Take up the slab's whole chunks, at most ``capacity``. No spare room is left.

        Waits for the disk; OSError. ``clock`` gives monotonic seconds, ``evicted`` hears of chunks that leave.
        """
        super().__init__(slab.namespace, slab.chunk_bytes, slab.stride, Pool(capacity, algorithm))
        self.slab = slab
        self.left: list[DiskSlot] = []
        """Slots of gone chunks, newest last, with headers and room still to be wiped."""
        self.wiping: set[DiskSlot] = set()
        """Slots being wiped now."""
        self.unwiped = 0
        """Slots whose header a failing disk kept: they may be back after a restart."""
        self._overwriting: set[DiskSlot] = set()
        """Slots that a new chunk took over unwiped, until it is whole."""
        self._free: list[DiskSlot] = []
        self._slots = 0
        """Slots of the file."""
        self._clock = clock
        self._evicted = evicted
        for header in slab.headers():
            slot = self._add()
            if header is None or header.key in self.pool or len(self.pool) >= capacity:
                self.wiped(slot, sure=slab.wipe(slot.number))
                continue
            self.pool.reserve(header.key)
            self._commit(header, slot)
        self.pool.resize(len(self.pool))
        self.unread = list(self.pool)
        """Keys from an earlier run that `DiskTier.next_unread` has not given out yet."""

    @property
    def taken_bytes(self) -> int:
        """Taken of the tier's capacity: chunks in use may exceed the pool's, and those that left until wiped."""
        held = len(self.pool) + len(self.left) + len(self.wiping)
        return max(self.pool.capacity, held) * self.stride

    @property
    def unsure(self) -> set[DiskSlot]:
        """Slots of gone chunks whose header may still be there, until somebody is done with them."""
        return self.wiping.union(self._overwriting, self.left, self.pool.leaving)

    def shrink(self) -> None:
        """Shrink one step towards what is allowed."""
        self._evict(self.pool.resize(max(self.allowed, self.pool.capacity - WIPED_AT_ONCE)), "capacity")

    def grow(self, spare_bytes: int) -> None:
        """Grow to what is allowed, as far as the tier has room."""
        capacity = min(self.allowed, (self.taken_bytes + spare_bytes) // self.stride)
        if capacity > self.pool.capacity:
            self.pool.resize(capacity)

    def reserve(self, key: bytes) -> DiskSlot | None:
        """A slot to write, preferably one whose room a new chunk can take over; None: all is in use or being wiped."""
        held = len(self.pool)
        if not self.left and held < self.pool.capacity <= held + len(self.wiping):
            return None
        evicted = self.pool.reserve(key)
        if evicted is None:
            return None
        self._evict(evicted, "room")
        if self.left:
            slot = self.left.pop()
            self._overwriting.add(slot)
            return slot
        return self._free.pop() if self._free else self._add()

    def keep(self, header: Header, slot: DiskSlot) -> None:
        """Make a written slot visible; what is too much leaves, as the capacity may have fallen meanwhile."""
        self._overwriting.discard(slot)
        slot.used_at, slot.used = self._clock(), False
        self._commit(header, slot)
        self._trim()

    def abort(self, key: bytes, slot: DiskSlot) -> None:
        """A reserved chunk could not be written; the rest as in ``keep``."""
        self.pool.abort(key)
        self._leave(slot)
        self._trim()

    def use(self, key: bytes, slot: DiskSlot) -> None:
        """A chunk was read for a request."""
        self.pool.touch([key])
        slot.used_at, slot.used = self._clock(), True

    def unpin(self, key: bytes) -> None:
        """A read is over; the rest as in ``keep``."""
        self._leave(self.pool.unpin(key))
        self._trim()

    def drop(self, key: bytes) -> bool:
        """Forget a chunk, which leaves once nobody uses it; False if it is not here."""
        here = key in self.pool
        self._leave(self.pool.discard(key))
        return here

    def to_wipe(self) -> DiskSlot | None:
        """The slot left last, for the caller to wipe; None: there is none."""
        slot = self.left.pop() if self.left else None
        if slot is not None:
            self.wiping.add(slot)
        return slot

    def wiped(self, slot: DiskSlot, *, sure: bool) -> None:
        """A slot was wiped and is free; ``sure`` is the answer of `Slab.wipe`."""
        self.wiping.discard(slot)
        self._free.append(slot)
        self.unwiped += not sure

    def close(self) -> None:
        self.left.clear()
        if not self.pool.pinned and not self.wiping:  # else a descriptor in use could become another file's
            self.slab.close()

    def _add(self) -> DiskSlot:
        """A slot more, at the end of the file."""
        self._slots += 1
        return DiskSlot(self._slots - 1)

    def _commit(self, header: Header, slot: DiskSlot) -> None:
        slot.tenant = header.origin.tenant
        self.pool.commit(header.key, slot)

    def _trim(self) -> None:
        self._evict(self.pool.trim(), "capacity")

    def _evict(self, chunks: Sequence[tuple[bytes, DiskSlot]], reason: str) -> None:
        """Report chunks that leave, and let their slots go."""
        if chunks:
            named = self.namespace, self.pool.algorithm, reason
            self._evicted([Evicted(*named, slot.used_at, NOBODY, slot.used) for _, slot in chunks])
        for _, slot in chunks:
            self._leave(slot)

    def _leave(self, slot: DiskSlot | None) -> None:
        """A slot's chunk, if any, has gone or did not come."""
        if slot is not None:
            self._overwriting.discard(slot)
            self.left.append(slot)
