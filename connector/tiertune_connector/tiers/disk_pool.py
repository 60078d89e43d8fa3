"""One namespace on disk: a pool of keys, and the slots of its slab file."""

from array import array
from math import isnan, nan

from tiertune_connector.chunk import NOBODY, Header
from tiertune_connector.pool import Pool
from tiertune_connector.tiers.base import Evicted, OnEvicted
from tiertune_connector.tiers.shares import Held
from tiertune_connector.tiers.slab import Slab
from tiertune_connector.units import Clock

WIPED_AT_ONCE = 32
"""Chunks whose room one step gives back: about a millisecond of disk time."""


class DiskPool(Held):
    """An index that never waits for the disk once it is made; callers that change it hold its tier's lock.

    A slot is a number: what is known of it lies in arrays, as objects for a million of them would take much memory.
    """

    pool: Pool[int]

    def __init__(self, slab: Slab, algorithm: str, capacity: int, clock: Clock, evicted: OnEvicted) -> None:
        """Take up the slab's whole chunks, at most ``capacity``. No spare room is left.

        Waits for the disk; OSError. ``clock`` gives monotonic seconds, ``evicted`` hears of chunks that leave.
        """
        super().__init__(slab.namespace, slab.chunk_bytes, slab.stride, Pool(capacity, algorithm), evicted)
        self.slab = slab
        self.left: list[int] = []
        """Slots of gone chunks, newest last, with headers and room still to be wiped."""
        self.wiping: set[int] = set()
        """Slots being wiped now."""
        self.unwiped: list[int] = []
        """Free slots whose header a failing disk kept: it may be back after a restart, unless a flush wipes it."""
        self._free: list[int] = []
        self._overwriting: set[int] = set()
        """Slots that a new chunk took over unwiped, until it is whole."""
        self._used_at = array("d")
        """By slot, all of the file's: when its chunk came or was last read; NaN: in an earlier run."""
        self._used = bytearray()
        """By slot: whether its chunk was read since it came; yes for one of an earlier run, as nobody knows."""
        self._tenants: dict[int, bytes] = {}
        """Tenants' digests, of chunks that have one, by slot."""
        self._doubted = set[bytes]()
        """Keys of chunks that could not be read."""
        self._clock = clock
        self.ended = False
        """Whether nothing more of it is wiped."""
        for header in slab.headers():
            slot = self._add()
            if header is None or header.key in self.pool or len(self.pool) >= capacity:
                self.wiped(slot, sure=slab.wipe(slot))
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
    def unsure(self) -> set[int]:
        """Slots of gone chunks whose header may still be there, until somebody is done with them."""
        return self.wiping.union(self._overwriting, self.left, self.pool.leaving)

    def shrink(self) -> None:
        """Shrink one step towards what is allowed."""
        self.evict(self.pool.resize(max(self.allowed, self.pool.capacity - WIPED_AT_ONCE)), "capacity")

    def grow(self, spare_bytes: int) -> None:
        """Grow to what is allowed, as far as the tier has room."""
        capacity = min(self.allowed, (self.taken_bytes + spare_bytes) // self.stride)
        if capacity > self.pool.capacity:
            self.pool.resize(capacity)

    def reserve(self, key: bytes) -> int | None:
        """A slot to write; None: all is in use or being wiped."""
        held = len(self.pool)
        if not self.left and held < self.pool.capacity <= held + len(self.wiping):
            return None
        evicted = self.pool.reserve(key)
        if evicted is None:
            return None
        self.evict(evicted, "room")
        if stale := self.left or (not self._free and self.unwiped):  # best is one whose room it can take over
            slot = stale.pop()
            self._overwriting.add(slot)
            return slot
        return self._free.pop() if self._free else self._add()

    def keep(self, header: Header, slot: int) -> None:
        """Make a written slot visible; what is too much leaves, as the capacity may have fallen meanwhile."""
        self._overwriting.discard(slot)
        self._used_at[slot], self._used[slot] = self._clock(), False
        self._commit(header, slot)
        self.trim()

    def abort(self, key: bytes, slot: int) -> None:
        """A reserved chunk could not be written; the rest as in ``keep``."""
        self.pool.abort(key)
        self._leave(slot)
        self.trim()

    def use(self, key: bytes, slot: int) -> None:
        """A chunk was read for a request."""
        self.pool.touch([key])
        self._doubted.discard(key)
        self._used_at[slot], self._used[slot] = self._clock(), True

    def doubt(self, key: bytes) -> None:
        """A chunk could not be read for a request; after the second time in a row it leaves, to be written anew."""
        if key in self._doubted:
            self.drop(key)
        self._doubted ^= {key}

    def tenant(self, slot: int) -> bytes:
        return self._tenants.get(slot, b"")

    def last(self, key: bytes, slot: int, reason: str) -> Evicted:  # noqa: ARG002 (nobody asks for the key)
        at, used = self._used_at[slot], bool(self._used[slot])
        self._leave(slot)
        return Evicted(self.namespace, self.pool.algorithm, reason, None if isnan(at) else at, NOBODY, used)

    def to_wipe(self) -> int | None:
        """The slot left last, for the caller to wipe; None: there is none."""
        slot = self.left.pop() if self.left else None
        if slot is not None:
            self.wiping.add(slot)
        return slot

    def wiped(self, slot: int, *, sure: bool) -> None:
        """A slot was wiped and is free; ``sure`` is the answer of `Slab.wipe`."""
        self.wiping.discard(slot)
        (self._free if sure else self.unwiped).append(slot)

    def wipe_again(self) -> None:
        """Have wiped what a failing disk kept."""
        self.left += self.unwiped
        self.unwiped.clear()

    def end(self) -> bool:
        """Have nothing more wiped; whether nobody uses the slab: else its descriptor, closed, could be another file's.

        Who removed the pool closes the slab then, which waits for the disk.
        """
        self.left.clear()
        self.ended = True
        return not self.pool.pinned and not self.wiping

    def _add(self) -> int:
        """A slot more, at the end of the file."""
        self._used_at.append(nan)
        self._used.append(True)
        return len(self._used) - 1

    def _commit(self, header: Header, slot: int) -> None:
        if header.origin.tenant:
            self._tenants[slot] = header.origin.tenant
        self.pool.commit(header.key, slot)

    def _leave(self, slot: int) -> None:
        """A slot's chunk has gone or did not come."""
        self._tenants.pop(slot, None)
        self._overwriting.discard(slot)
        self.left.append(slot)
