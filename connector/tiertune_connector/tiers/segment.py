"""Shared memory that a store hands to its clients: a memfd, cut into slots of one size.

A segment begins with one generation per slot (unsigned 64 bit, native order), then the slots, each page-aligned. A
slot's generation changes whenever its contents may change hands, so a reader knows whether it copied in time.
"""

import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiertune_connector.chunk import Bytes
from tiertune_connector.tiers.linux import populate, punch_hole, spare_memory

PAGE = mmap.PAGESIZE
_OF_ONE_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody may cut a memfd: that would kill who maps it."""
_MOST_KEPT = 256
"""Descriptors that a store keeps for all else: clients, tiers, HTTP."""
_MOST_ALLOWED = 1 << 20
"""Descriptors that are asked for: where a container's limit is a thousand million, some programs close as many."""


def allow_descriptors() -> None:
    """Raise this process's limit: a segment takes two of a store's, and one of a client's; the usual one is 1024."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a hard limit above `fs.nr_open` may not even be set to itself
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, min(most, _MOST_ALLOWED)), most))


def whole_pages(nbytes: int) -> int:
    """Bytes of the pages that hold so many."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class Geometry:
    """What both sides must know to find a slot."""

    slots: int
    chunk_bytes: int

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return whole_pages(self.chunk_bytes)

    @property
    def total_bytes(self) -> int:
        return self.offset(self.slots)

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return whole_pages(self.slots * 8) + slot * self.stride


class Mapped:
    """One memfd, mapped. The store makes it and keeps its descriptor; a client is sent one, and needs the mapping."""

    def __init__(self, fd: int, nbytes: int, *, keep: bool) -> None:
        """``fd`` is closed unless it is to ``keep``, also by ValueError: the memfd is smaller."""
        try:
            self._map = mmap.mmap(fd, nbytes)
        finally:
            if not keep:
                os.close(fd)  # the mapping has its own
        self.fd = fd if keep else -1

    def close(self) -> None:
        """Unmap. Views that are still held keep the mapping until they go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1  # another file's, a moment later
        with suppress(BufferError):  # somebody copies or looks there: the mapping goes with the last view
            self._map.close()


class Segment(Mapped):
    """A client's view, made of the descriptor that it was sent; `create` makes the store's own."""

    def __init__(self, number: int, geometry: Geometry, fd: int, *, keep: bool = False) -> None:
        super().__init__(fd, geometry.total_bytes, keep=keep)
        self.number = number
        self.geometry = geometry
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self._address = self._bytes.ctypes.data
        self._warm: set[int] = set()
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, geometry.slots)

    @classmethod
    def create(cls, number: int, geometry: Geometry) -> "Segment":
        """Fresh memory, already touched: OSError if the machine has not that much, or too few descriptors are left."""
        with touched(f"tiertune-{number}", geometry.total_bytes, most_kept=_MOST_KEPT) as fd:
            return cls(number, geometry, fd, keep=True)

    def slot(self, index: int) -> Bytes:
        """The payload bytes of a slot, shape (chunk_bytes,)."""
        start = self.geometry.offset(index)
        return self._bytes[start : start + self.geometry.chunk_bytes]

    def warm(self, index: int) -> None:
        """Before a slot's first copy in this process, fill its page tables at once, instead of a fault for each page.

        Slot by slot, as touching a whole segment would take back the memory of slots that were given back.
        """
        if index not in self._warm:
            self._warm.add(index)
            populate(self._address + self.geometry.offset(index), self.geometry.stride)

    def renew(self, index: int) -> int:
        """Raise a slot's generation and return it: whoever still reads the old contents will notice."""
        self.generations[index] += np.uint64(1)
        return int(self.generations[index])

    def give_back(self, index: int) -> None:
        """Return a slot's memory to the machine, in every process that maps it."""
        punch_hole(self.fd, self.geometry.offset(index), self.geometry.stride)

    def take_again(self, indices: Sequence[int]) -> None:
        """Get memory for slots that were given back, all or none; OSError if the machine has not that much."""
        stride = self.geometry.stride
        spared(len(indices) * stride)
        try:
            for index in indices:
                os.posix_fallocate(self.fd, self.geometry.offset(index), stride)
        except OSError:
            for index in indices:
                self.give_back(index)
            raise

    def close(self) -> None:
        del self._bytes, self.generations
        super().close()


@contextmanager
def touched(name: str, nbytes: int, *, most_kept: int = 0) -> Iterator[int]:
    """A new memfd of touched memory, whose size is fixed; closed if what follows fails.

    OSError if the machine has not that much, or after it fewer than ``most_kept`` descriptors were left, or a quarter.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _leaves_descriptors(fd, most_kept)
        spared(nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _OF_ONE_SIZE)
        yield fd
    except OSError:
        os.close(fd)
        raise


def spared(nbytes: int) -> None:
    """OSError if the machine has not that much to spare."""
    if nbytes > spare_memory():
        raise OSError(errno.ENOMEM, "this machine or container has not so much memory left")


def _leaves_descriptors(fd: int, most_kept: int) -> None:
    """OSError if a new descriptor, which is the lowest free one, is one of the last ``most_kept``, or last quarter."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if fd >= most - min(most_kept, most // 4):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
