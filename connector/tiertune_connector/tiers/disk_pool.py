"""One namespace on disk: a pool of keys, and the slots of its slab file."""

from collections.abc import Callable, Sequence

from tiertune_connector.chunk import Header
from tiertune_connector.pool import Pool
from tiertune_connector.tiers.disk_slots import DiskSlots, Last
from tiertune_connector.tiers.slab import Slab

WIPED_AT_ONCE = 32
"""Chunks whose room one step gives back: about a millisecond of disk time."""


class DiskPool:
    """An index that never waits for the disk once it is made; callers that change it hold its tier's lock."""

    def __init__(self, slab: Slab, algorithm: str, capacity: int, clock: Callable[[], float]) -> None:
        """Take up the slab's whole chunks, at most ``capacity``. No spare room is left.

        Waits for the disk; OSError. ``clock`` gives monotonic seconds.
        """
        self.slab = slab
        self.namespace, self.chunk_bytes, self.stride = slab.namespace, slab.chunk_bytes, slab.stride
        self.slots = DiskSlots()
        self.pool: Pool[int] = Pool(capacity, algorithm)
        self.allowed = 0
        """Chunks that the tuning allows; the pool follows in steps."""
        self.lends = self.found = False
        self.tenants: dict[bytes, bytes] = {}
        """Tenant digest of each key that has one."""
        self._clock = clock
        for header in slab.headers():
            slot = self.slots.add()
            if header is None or header.key in self.pool or len(self.pool) >= capacity:
                self.slots.wiped(slot, sure=slab.wipe(slot))
                continue
            self.pool.reserve(header.key)
            self._commit(header, slot)
        self.pool.resize(len(self.pool))
        self.unread = list(self.pool)
        """Keys from an earlier run that `DiskTier.next_unread` has not given out yet."""

    @property
    def effective(self) -> int:
        """Chunks that the pool holds or may."""
        return self.pool.capacity

    @property
    def taken_bytes(self) -> int:
        """Taken of the tier's capacity: chunks in use may exceed the pool's, and those that left until wiped."""
        held = len(self.pool) + len(self.slots.left) + len(self.slots.wiping)
        return max(self.pool.capacity, held) * self.stride

    @property
    def unsure(self) -> set[int]:
        """Slots of gone chunks whose header may still be there, until somebody is done with them."""
        return self.slots.wiping.union(self.slots.overwriting, self.slots.left, self.pool.leaving)

    def shrink(self) -> list[Last]:
        """Shrink one step towards what is allowed; returns what is known of each evicted chunk."""
        return self._leave(self.pool.resize(max(self.allowed, self.pool.capacity - WIPED_AT_ONCE)))

    def grow(self, spare_bytes: int) -> None:
        """Grow to what is allowed, as far as the tier has room."""
        capacity = min(self.allowed, (self.taken_bytes + spare_bytes) // self.stride)
        if capacity > self.pool.capacity:
            self.pool.resize(capacity)

    def reserve(self, key: bytes) -> tuple[int, list[Last]] | None:
        """A slot to write, and what is known of the chunks evicted for it; None: all is in use or being wiped."""
        held = len(self.pool)
        if not self.slots.left and held < self.pool.capacity <= held + len(self.slots.wiping):
            return None
        evicted = self.pool.reserve(key)
        if evicted is None:
            return None
        left = self._leave(evicted)
        return self.slots.take(), left

    def keep(self, header: Header, slot: int) -> list[Last]:
        """Make a written slot visible; returns, like `shrink`, what leaves as the capacity fell meanwhile."""
        self.slots.came(slot, self._clock())
        self._commit(header, slot)
        return self._leave(self.pool.trim())

    def abort(self, key: bytes, slot: int) -> list[Last]:
        """A reserved chunk could not be written; returns like `keep`."""
        self.pool.abort(key)
        self.slots.leave(slot)
        return self._leave(self.pool.trim())

    def use(self, key: bytes, slot: int) -> None:
        """A chunk was read for a request."""
        self.pool.touch([key])
        self.slots.use(slot, self._clock())

    def unpin(self, key: bytes) -> list[Last]:
        """A read is over; returns like `keep`."""
        left = self.pool.unpin(key)
        if left is not None:
            self.slots.leave(left)
        return self._leave(self.pool.trim())

    def drop(self, key: bytes) -> bool:
        """Forget a chunk, which leaves once nobody uses it; False if it is not here."""
        if key not in self.pool:
            return False
        self.tenants.pop(key, None)
        slot = self.pool.discard(key)
        if slot is not None:
            self.slots.leave(slot)
        return True

    def close(self) -> None:
        self.slots.left.clear()
        if not self.pool.pinned and not self.slots.wiping:  # else a descriptor in use could become another file's
            self.slab.close()

    def _commit(self, header: Header, slot: int) -> None:
        self.pool.commit(header.key, slot)
        if header.origin.tenant:
            self.tenants[header.key] = header.origin.tenant

    def _leave(self, evicted: Sequence[tuple[bytes, int]]) -> list[Last]:
        for key, _ in evicted:
            self.tenants.pop(key, None)
        return [self.slots.leave(slot) for _, slot in evicted]
