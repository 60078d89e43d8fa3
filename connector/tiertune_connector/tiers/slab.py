"""One namespace's slab file on disk, cut into slots.

A slot is a page with the chunk's header, then the payload. The header is written last and wiped first, so a slot is
whole or nobody's. Only flushes are synced: a cache may lose data, and every read is verified.

The header's page is written whole, with zeros behind it: of one that is written in part, the kernel first reads the
rest, unless it has it cached; of a large disk it has little. Payloads bypass the page cache, which would copy each once
more, and keep what DRAM has just had.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from tiertune_connector.chunk import HEADER_BYTES, Header, decode_header
from tiertune_connector.tiers.base import Came
from tiertune_connector.tiers.linux import punch_hole
from tiertune_connector.tiers.segment import PAGE, whole_pages

log = logging.getLogger(__name__)
Move = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`: descriptor, buffers, offset; bytes moved."""
WINDOW_BYTES = 2 << 20
"""Read while the window before is summed and copied; some of them are as fast as one large read."""


class Slab:
    """Thread-safe, unless two threads move the same bytes. It waits for the disk, so it is called without a lock.

    Only whole pages between page-aligned places go past the cache: the rest, and everything on a file system without
    O_DIRECT, goes through it. The kernel keeps both ways coherent.
    """

    def __init__(self, path: Path, namespace: str, chunk_bytes: int, readers: Executor) -> None:
        """Open or make the file; OSError if that fails. ``readers`` read windows of long payloads ahead."""
        self.path = path
        self.namespace = namespace
        self.chunk_bytes = chunk_bytes
        self.stride = PAGE + whole_pages(chunk_bytes)
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

    def headers(self) -> Iterator[Header | None]:
        """Each slot's header; None: it has no chunk of ours, or cannot be read any more. OSError."""
        slots, unreadable = -(-os.fstat(self.fd).st_size // self.stride), 0  # the last may end within its pages
        for slot in range(slots):
            try:
                yield self._header(slot)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                unreadable += 1
                yield None
        if unreadable:
            log.warning("%s: %d of %d chunks cannot be read any more, and are lost", self.path, unreadable, slots)

    def write(self, slot: int, header: Header, payload: memoryview) -> None:
        """Fill a slot; OSError."""
        start = slot * self.stride
        self._behead(slot)
        self.write_at(payload, start + PAGE)
        self._write_all(memoryview(header.encode().ljust(PAGE, b"\0")), start)

    def read(self, slot: int, key: bytes, out: memoryview, came: Came) -> Header | None:
        """Fill ``out`` and return its header; None if it is not the chunk that was written. OSError.

        ``came`` as in a tier's ``read``.
        """
        header = self._header(slot)
        if header is None or (header.key, header.length) != (key, len(out)):
            return None
        return header if self.read_at(out, slot * self.stride + PAGE, came) == header.checksum else None

    def read_at(self, out: memoryview, offset: int, came: Came) -> int | None:
        """Fill ``out`` from ``offset`` and return its `checksum`; None if the file ends before. OSError.

        ``came`` as in a tier's ``read``.
        """
        digest = xxhash.xxh3_64()
        windows = [(start, out[start : start + WINDOW_BYTES]) for start in range(0, len(out), WINDOW_BYTES)]
        coming = list[Future[bool]]()
        try:
            coming.extend(self._readers.submit(self._fill, window, offset + start) for start, window in windows[1:])
            for number, (start, window) in enumerate(windows):
                if not (coming[number - 1].result() if number else self._fill(window, offset)):
                    return None
                came(start + len(window))
                digest.update(window)
        finally:  # nobody may read into what is no longer ours
            for reading in [come for come in coming if not come.cancel()]:
                reading.exception()  # waits for its end
        return digest.intdigest()

    def write_at(self, payload: memoryview, offset: int) -> None:
        """Write the whole payload at ``offset``; OSError."""
        done = self._past_the_cache(os.pwritev, payload, offset)
        self._write_all(payload[done:], offset + done)

    def wipe(self, slot: int) -> bool:
        """Give a slot's room back, or remove its header at least; False if the disk allows neither."""
        if punch_hole(self.fd, slot * self.stride, self.stride):
            return True
        try:  # a file system without holes
            self._behead(slot)
        except OSError:
            return False
        return True

    def sync(self) -> None:
        """Have what was wiped stay so over a loss of power, of a closed slab too; OSError."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:  # removed: it was cleared before
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Have the file empty, over a loss of power too; OSError. Nobody may be using a slot."""
        os.ftruncate(self.fd, 0)
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
        if self._direct >= 0:
            os.close(self._direct)

    def _header(self, slot: int) -> Header | None:
        header = decode_header(os.pread(self.fd, HEADER_BYTES, slot * self.stride))
        ours = header is not None and (header.namespace, header.length) == (self.namespace, self.chunk_bytes)
        return header if ours else None

    def _behead(self, slot: int) -> None:
        os.pwrite(self.fd, bytes(PAGE), slot * self.stride)

    def _write_all(self, data: memoryview, offset: int) -> None:
        """Write all, through the cache; OSError."""
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], offset + done)

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
