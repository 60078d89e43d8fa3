"""One namespace's slab file on disk, cut into slots.

A slot is a page with the chunk's header, then the payload. The header is written last and wiped first, so a slot is
whole or nobody's. Only flushes are synced: a cache may lose data, and every read is verified.

The header's page is written whole, with zeros behind it: of one that is written in part, the kernel first reads the
rest, unless it has it cached; of a large disk it has little.
"""

import errno
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

from tiertune_connector.chunk import HEADER_BYTES, Header, decode_header
from tiertune_connector.tiers.base import Came
from tiertune_connector.tiers.direct import PayloadFile, pwrite_all
from tiertune_connector.tiers.linux import punch_hole
from tiertune_connector.tiers.segment import PAGE

log = logging.getLogger(__name__)


class Slab(PayloadFile):
    """Waits for the disk, which may hang: call it without its tier's lock."""

    def __init__(self, path: Path, namespace: str, chunk_bytes: int, readers: Executor) -> None:
        """Open or make the file; OSError if that fails."""
        super().__init__(path, readers)
        self.path = path
        self.namespace = namespace
        self.chunk_bytes = chunk_bytes
        self.stride = PAGE + -(-chunk_bytes // PAGE) * PAGE

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
        pwrite_all(self.fd, memoryview(header.encode().ljust(PAGE, b"\0")), start)

    def read(self, slot: int, key: bytes, out: memoryview, came: Came) -> Header | None:
        """Fill ``out`` and return its header; None if it is not the chunk that was written. OSError.

        ``came`` as in a tier's ``read``.
        """
        header = self._header(slot)
        if header is None or (header.key, header.length) != (key, len(out)):
            return None
        return header if self.read_at(out, slot * self.stride + PAGE, came) == header.checksum else None

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

    def _header(self, slot: int) -> Header | None:
        header = decode_header(os.pread(self.fd, HEADER_BYTES, slot * self.stride))
        ours = header is not None and (header.namespace, header.length) == (self.namespace, self.chunk_bytes)
        return header if ours else None

    def _behead(self, slot: int) -> None:
        os.pwrite(self.fd, bytes(PAGE), slot * self.stride)
