"""One namespace's slab file on disk, cut into slots, and its pool of slot numbers.

A slot is a page with the chunk's header, then the payload. The header is written last and wiped first, so a slot is
either whole or nobody's. Nothing is synced: a cache may lose data, and every read is verified.
"""

import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from math import isnan, nan
from pathlib import Path

from tiertune_connector.chunk import HEADER_BYTES, Header, decode_header
from tiertune_connector.pool import Pool
from tiertune_connector.tiers.base import Came
from tiertune_connector.tiers.direct import PayloadFile, pwrite_all
from tiertune_connector.tiers.linux import punch_hole
from tiertune_connector.tiers.segment import PAGE

AT_ONCE = 32
"""Chunks whose room one step gives back: about a millisecond of the disk."""


class Slab:
    """Changes its index alone, under its tier's lock, but for `recover`, `write`, `read` and `wipe`.

    Those wait for the disk, which may hang, and are called without the lock.
    """

    def __init__(
        self,
        path: Path,
        namespace: str,
        chunk_bytes: int,
        algorithm: str,
        *,
        readers: Executor,
        clock: Callable[[], float],
    ) -> None:
        """``clock`` gives monotonic seconds."""
        self.path = path
        self.namespace = namespace
        self.chunk_bytes = chunk_bytes
        self.stride = PAGE + -(-chunk_bytes // PAGE) * PAGE
        self.file = PayloadFile(path, readers)
        self.pool: Pool[int] = Pool(0, algorithm)
        self.allowed = 0
        """Chunks that the tuning allows; the pool follows in steps."""
        self.lends = False
        self.tenants: dict[bytes, bytes] = {}
        """Tenant digest of each key that has one."""
        self.unwiped = 0
        """Slots whose header could not be removed from a failing disk: they may be back after a restart."""
        self.unread: list[bytes] = []
        """Taken up from an earlier run, their payloads not looked at by `DiskTier.next_unread` yet."""
        self.left: list[int] = []
        """Slots of chunks that have gone, the newest last, their headers and room still to be wiped."""
        self._wiping: set[int] = set()
        self._overwriting: set[int] = set()
        """Slots that a new chunk took over before they were wiped, until it is whole."""
        self._free: list[int] = []
        self._used_at = array("d")
        """When the chunk of each slot of the file came, or was read last; not a number: in an earlier run."""
        self._clock = clock

    def recover(self, capacity: int) -> int:
        """Index the whole slots that the file holds, at most ``capacity``; returns how many. No room is left over."""
        self.pool.resize(capacity)
        slots = -(-os.fstat(self.file.fd).st_size // self.stride)  # the last payload may end within its pages
        self._used_at = array("d", [nan]) * slots
        for slot in range(slots):
            header = decode_header(os.pread(self.file.fd, HEADER_BYTES, slot * self.stride))
            known = header is not None and (header.namespace, header.length) == (self.namespace, self.chunk_bytes)
            if header is None or not known or header.key in self.pool or len(self.pool) >= capacity:
                self.wiped(slot, sure=self.wipe(slot))
                continue
            self.pool.reserve(header.key)
            self.pool.commit(header.key, slot)
            self._remember(header)
        self.pool.resize(len(self.pool))
        self.unread = list(self.pool)
        return len(self.pool)

    @property
    def effective(self) -> int:
        """Chunks that the pool holds or may."""
        return self.pool.capacity

    @property
    def taken_bytes(self) -> int:
        """Of the tier's capacity; a chunk in use may stay beyond the pool's, and one that left until it is wiped."""
        return max(self.pool.capacity, self._held) * self.stride

    @property
    def vacant(self) -> bool:
        """Whether nothing is left of it: no chunk, no room."""
        return not self.taken_bytes

    @property
    def unsure(self) -> set[int]:
        """Slots of chunks that have gone whose header may still be there, until somebody is done with them."""
        return self._wiping.union(self._overwriting, self.left, self.pool.leaving)

    @property
    def _held(self) -> int:
        """Slots that take room on disk."""
        return len(self.pool) + len(self.left) + len(self._wiping)

    def shrink(self) -> list[float | None]:
        """One step towards what is allowed; returns when each evicted chunk was used last."""
        return self._leave(self.pool.resize(max(self.allowed, self.pool.capacity - AT_ONCE)))

    def grow(self, spare_bytes: int) -> None:
        """Up to what is allowed, as far as the tier has room."""
        capacity = min(self.allowed, (self.taken_bytes + spare_bytes) // self.stride)
        if capacity > self.pool.capacity:
            self.pool.resize(capacity)

    def reserve(self, key: bytes) -> tuple[int, list[float | None]] | None:
        """A slot to be written, and when what is evicted for it was used last; None: all is in use, or being wiped."""
        if not self.left and len(self.pool) < self.pool.capacity <= self._held:
            return None
        evicted = self.pool.reserve(key)
        if evicted is None:
            return None
        left = self._leave(evicted)
        return self._take(), left

    def drop(self, key: bytes) -> bool:
        """Forget a chunk, which leaves when nobody uses it; False if it is not here."""
        if key not in self.pool:
            return False
        self.tenants.pop(key, None)
        slot = self.pool.discard(key)
        if slot is not None:
            self.left.append(slot)
        return True

    def abort(self, key: bytes, slot: int) -> None:
        """A reserved chunk could not be written."""
        self.pool.abort(key)
        self._overwriting.discard(slot)
        self.left.append(slot)

    def use(self, key: bytes, slot: int) -> None:
        """A chunk was read for a request."""
        self.pool.touch([key])
        self._used_at[slot] = self._clock()

    def unpin(self, key: bytes) -> list[float | None]:
        """A read is over; returns as `shrink` what leaves because the capacity fell meanwhile."""
        left = self.pool.unpin(key)
        if left is not None:
            self.left.append(left)
        return self.trim()

    def trim(self) -> list[float | None]:
        return self._leave(self.pool.trim())

    def write(self, slot: int, header: Header, payload: memoryview) -> None:
        """Fill a reserved slot; OSError."""
        start = slot * self.stride
        self._behead(slot)
        self.file.write(payload, start + PAGE)
        pwrite_all(self.file.fd, memoryview(header.encode()), start)

    def keep(self, header: Header, slot: int) -> None:
        """A written slot becomes visible."""
        self._overwriting.discard(slot)
        self._used_at[slot] = self._clock()
        self.pool.commit(header.key, slot)
        self._remember(header)

    def read(self, slot: int, key: bytes, out: memoryview, came: Came) -> Header | None:
        """Fill ``out`` and return its header; None if it is not the chunk that was written. OSError.

        ``came`` as of a tier's ``read``.
        """
        start = slot * self.stride
        header = decode_header(os.pread(self.file.fd, HEADER_BYTES, start))
        if header is None or (header.namespace, header.key, header.length) != (self.namespace, key, len(out)):
            return None
        return header if self.file.read(out, start + PAGE, came) == header.checksum else None

    def to_wipe(self) -> int | None:
        """The slot that left last, for whoever wipes it; None: none is left."""
        slot = self.left.pop() if self.left else None
        if slot is not None:
            self._wiping.add(slot)
        return slot

    def wipe(self, slot: int) -> bool:
        """Give a slot's room back, or remove its header at least; False if the disk allows neither."""
        if punch_hole(self.file.fd, slot * self.stride, self.stride):
            return True
        try:  # a file system without holes
            self._behead(slot)
        except OSError:
            return False
        return True

    def wiped(self, slot: int, *, sure: bool) -> None:
        """What `wipe` said of a slot, which is free now."""
        self._wiping.discard(slot)
        self._free.append(slot)
        self.unwiped += not sure

    def close(self) -> None:
        self.left.clear()
        if not self.pool.pinned and not self._wiping:  # else its descriptor, still in use, could become another file's
            self.file.close()

    def _remember(self, header: Header) -> None:
        if header.origin.tenant:
            self.tenants[header.key] = header.origin.tenant

    def _take(self) -> int:
        """A slot that nobody uses; first one whose room on disk a new chunk can take over."""
        if self.left:
            slot = self.left.pop()
            self._overwriting.add(slot)
            return slot
        if self._free:
            return self._free.pop()
        self._used_at.append(nan)
        return len(self._used_at) - 1

    def _leave(self, evicted: Sequence[tuple[bytes, int]]) -> list[float | None]:
        for key, slot in evicted:
            self.tenants.pop(key, None)
            self.left.append(slot)
        times = (self._used_at[slot] for _, slot in evicted)
        return [None if isnan(at) else at for at in times]

    def _behead(self, slot: int) -> None:
        os.pwrite(self.file.fd, bytes(HEADER_BYTES), slot * self.stride)
