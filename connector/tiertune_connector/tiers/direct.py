"""A file whose payloads bypass the page cache, which would copy each once more, and keep what DRAM has just had.

Only whole pages between page-aligned places can: the rest, and everything on a file system without O_DIRECT, goes
through the cache. The kernel keeps both ways coherent.
"""

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from pathlib import Path

import numpy as np
import xxhash

from tiertune_connector.tiers.base import Came
from tiertune_connector.tiers.segment import PAGE

Move = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`: descriptor, buffers, offset; bytes moved."""
WINDOW_BYTES = 2 << 20
"""Read while the window before is summed and copied; some of them are as fast as one large read."""


class PayloadFile:
    """Thread-safe, unless two threads move the same bytes."""

    def __init__(self, path: Path, readers: Executor) -> None:
        """Open or make the file; OSError if that fails. ``readers`` read windows of long payloads ahead."""
        self._readers = readers
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        """Through the cache."""
        self._direct = -1
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:  # a file system without it, unless descriptors have run out
            if error.errno in (errno.EMFILE, errno.ENFILE):
                os.close(self.fd)
                raise

    def read_at(self, out: memoryview, offset: int, came: Came) -> int | None:
        """Fill ``out`` from ``offset`` and return its `checksum`; None if the file ends before. OSError.

        ``came`` as in a tier's ``read``.
        """
        digest = xxhash.xxh3_64()
        windows = [(start, out[start : start + WINDOW_BYTES]) for start in range(0, len(out), WINDOW_BYTES)]
        if len(windows) == 1:
            if not self._fill(out, offset):
                return None
            came(len(out))
            return xxhash.xxh3_64_intdigest(out)
        coming = list[Future[bool]]()
        try:
            coming.extend(self._readers.submit(self._fill, window, offset + start) for start, window in windows)
            for (start, window), come in zip(windows, coming, strict=True):
                if not come.result():
                    return None
                came(start + len(window))
                digest.update(window)
        finally:  # nobody may read into what is no longer ours
            wait([come for come in coming if not come.cancel()])
        return digest.intdigest()

    def write_at(self, payload: memoryview, offset: int) -> None:
        """Write the whole payload at ``offset``; OSError."""
        done = self._past_the_cache(os.pwritev, payload, offset)
        pwrite_all(self.fd, payload[done:], offset + done)

    def close(self) -> None:
        os.close(self.fd)
        if self._direct >= 0:
            os.close(self._direct)

    def _fill(self, out: memoryview, offset: int) -> bool:
        """Fill ``out``; False if the file ends before."""
        done = self._past_the_cache(os.preadv, out, offset)
        while done < len(out):
            count = os.preadv(self.fd, [out[done:]], offset + done)
            if count == 0:
                return False
            done += count
        return True

    def _past_the_cache(self, move: Move, view: memoryview, offset: int) -> int:
        """Move whole pages as far as possible; returns the bytes moved."""
        pages = len(view) // PAGE * PAGE
        if self._direct < 0 or not pages or (np.frombuffer(view, np.uint8).ctypes.data | offset) % PAGE:
            return 0
        try:
            return move(self._direct, [view[:pages]], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a device that wants more than pages
                raise
            return 0


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all, through the cache; OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
