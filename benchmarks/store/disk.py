"""Disk: reads of a chunk that neither DRAM nor the page cache holds, and writes of a batch until the device has it.

The baseline is O_DIRECT between one touched, aligned buffer and a file in the same folder whose blocks are all
allocated. The clock of our writes stops when no page of the slab waits to be written out; nobody syncs.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.store.rounds import ratio
from benchmarks.store.slower import BATCH, CHUNKS, IN_DRAM, NBYTES, NotMeasuredError, Raw, faults, measure
from benchmarks.store.world import serving

_WRITE_OUT = 1 | 2 | 4
"""SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER."""


def disk(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure the folder's device; the tier is full, so that each chunk written takes another's place."""
    section = {"path": str(folder / "disk"), "capacity": CHUNKS * (NBYTES + mmap.PAGESIZE)}
    with raw_file(folder / "raw") as raw, serving(folder, dram=IN_DRAM * NBYTES, disk=section) as store:
        store.tune("tiers", "disk", write="commit")
        cold, written = _slab(folder / "disk")
        told = measure(store, "disk", rounds, {"raw": raw}, cold=cold, written=written, fresh=written)
    return {
        "paths": {
            "disk_read_32m": ratio(told.read["ours"], told.read["raw"], "O_DIRECT", NBYTES),
            "disk_write_32m": ratio(told.write["ours"], told.write["raw"], "O_DIRECT", BATCH * NBYTES),
        },
        "faults_per_op": faults(told, "disk_read_32m", "disk_write_32m"),
    }


@contextmanager
def raw_file(path: Path) -> Iterator[Raw]:
    """The baseline: a file of ``CHUNKS`` chunks. NotMeasuredError if the file system has no O_DIRECT."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        raise NotMeasuredError(f"{path.parent} has no O_DIRECT: {error.strerror}") from error
    buffer = mmap.mmap(-1, NBYTES)
    view = memoryview(buffer)
    view[:] = os.urandom(NBYTES)

    def read(number: int) -> None:
        _whole(os.preadv(fd, [view], number % CHUNKS * NBYTES))

    def write(number: int) -> None:
        _whole(os.pwritev(fd, [view], number % CHUNKS * NBYTES))

    try:
        for number in range(CHUNKS):
            write(number)
        yield Raw(read, write)
    finally:
        os.close(fd)
        path.unlink()


def _whole(done: int) -> None:
    if done != NBYTES:
        raise RuntimeError(f"the device moved {done} bytes of {NBYTES}")


def _slab(folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Functions that drop the store's file from the page cache, and that wait until all its pages are written out."""
    libc = ctypes.CDLL(None, use_errno=True)

    def each(do: Callable[[int], None]) -> None:
        for path in folder.glob("*.slab"):
            fd = os.open(path, os.O_RDONLY)
            try:
                do(fd)
            finally:
                os.close(fd)

    def write_out(fd: int) -> None:
        if libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE_OUT):
            raise OSError(ctypes.get_errno(), "sync_file_range")

    def drop(fd: int) -> None:
        write_out(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    return lambda: each(drop), lambda: each(write_out)
