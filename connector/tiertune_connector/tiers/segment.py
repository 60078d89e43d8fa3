"""Shared memory that a store hands to its clients: a memfd, cut into slots of one size.

A segment begins with one generation per slot (unsigned 64 bit, native order), then the slots, each page-aligned. A
slot's generation changes whenever its contents may change hands: so a reader knows whether it copied in time.
"""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

Bytes = npt.NDArray[np.uint8]


def slot_stride(chunk_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-chunk_bytes // PAGE) * PAGE


@dataclass(frozen=True)
class Geometry:
    """What both sides must know to find a slot."""

    slots: int
    chunk_bytes: int

    @property
    def table_bytes(self) -> int:
        return -(-self.slots * 8 // PAGE) * PAGE

    @property
    def total_bytes(self) -> int:
        return self.table_bytes + self.slots * slot_stride(self.chunk_bytes)

    def offset(self, slot: int) -> int:
        return self.table_bytes + slot * slot_stride(self.chunk_bytes)


class Segment:
    """A mapping of one memfd. The store makes it, clients attach to its descriptor."""

    def __init__(self, number: int, geometry: Geometry, fd: int) -> None:
        self.number = number
        self.geometry = geometry
        self.fd = fd
        self._map = mmap.mmap(fd, geometry.total_bytes)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, geometry.slots)

    @classmethod
    def create(cls, number: int, geometry: Geometry) -> "Segment":
        """Fresh memory, already touched: OSError if the machine has not that much."""
        fd = os.memfd_create(f"tiertune-{number}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, geometry.total_bytes)
            return cls(number, geometry, fd)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, number: int, geometry: Geometry, fd: int) -> "Segment":
        """A client's view; page tables are filled ahead, so that copies do not fault."""
        segment = cls(number, geometry, fd)
        with suppress(OSError):  # an older kernel: the first copies fault instead
            segment._map.madvise(_POPULATE_WRITE)
        return segment

    def slot(self, index: int) -> Bytes:
        """The payload bytes of a slot, shape (chunk_bytes,)."""
        start = self.geometry.offset(index)
        return self._bytes[start : start + self.geometry.chunk_bytes]

    def renew(self, index: int) -> int:
        """Raise a slot's generation and return it: whoever still reads the old contents will notice."""
        self.generations[index] += np.uint64(1)
        return int(self.generations[index])

    def give_back(self, index: int) -> None:
        """Return a slot's memory to the machine, in every process that maps it."""
        self._map.madvise(mmap.MADV_REMOVE, self.geometry.offset(index), slot_stride(self.geometry.chunk_bytes))

    def close(self) -> None:
        """Unmap. Views that are still held keep the mapping until they go."""
        os.close(self.fd)
        del self._bytes, self.generations
        with suppress(BufferError):  # a copy is still under way: the mapping goes with its last view
            self._map.close()
