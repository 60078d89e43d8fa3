"""What the standard library does not tell of Linux, lacks, or does while it holds the GIL."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from tiertune_connector import cgroups
from tiertune_connector.cgroups import groups, number, text

_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

_OURS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give back a range of a file, which then reads as zeros; False if the file system cannot."""
    return bool(_libc.fallocate(fd, _PUNCH_HOLE, offset, length) == 0)


def populate(address: int, length: int) -> bool:
    """Fill the page tables of mapped memory, both page-aligned; False on a kernel that cannot."""
    return bool(_libc.madvise(address, length, _POPULATE_WRITE) == 0)


def resident(nbytes: int) -> memoryview:
    """New memory of our own, all of it there already; at once where the kernel is older, but with the GIL held."""
    memory = mmap.mmap(-1, nbytes, _OURS)
    if populate(ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes):
        return memoryview(memory)
    return memoryview(mmap.mmap(-1, nbytes, _OURS | mmap.MAP_POPULATE))


def spare_memory() -> int:
    """Bytes that a cache may still take of what the machine and each of our control groups have; 0 or less: none.

    A part of each limit stays free. What only caches files counts as spare. The kernel does not refuse shared memory
    that is not there: it kills a process when that is touched.
    """
    return min(_without_free(limit) - used for limit, used in _limits())


def most_memory() -> int:
    """As ``spare_memory`` if nobody else took any."""
    return min(_without_free(limit) for limit, _ in _limits())


def _limits() -> Iterator[tuple[int, int]]:
    """What the machine and each of our control groups have, and what of it is in use, in bytes."""
    machine = _fields(cgroups.SYSTEM / "proc/meminfo")
    total, available = (machine.get(name, 1 << 50) * 1024 for name in ("MemTotal:", "MemAvailable:"))
    yield total, total - available
    for folder in groups("memory"):
        for limit, usage, cached in _FILES:
            most, used = number(folder / limit), number(folder / usage)
            if most is not None and used is not None:
                yield most, used - _fields(folder / "memory.stat").get(cached, 0)


def _without_free(limit: int) -> int:
    """Bytes of a limit that a cache may take: nobody else in it, nor the store itself, must be killed for one."""
    return limit - min(_MOST_KEPT_FREE, limit // 4)


_MOST_KEPT_FREE = 512 << 20
"""A burst of lookups by forty clients took 220 MiB."""
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),  # above it, whoever takes memory is put to sleep
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage and field of ``memory.stat``, in version 2 of control groups and in version 1."""


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
