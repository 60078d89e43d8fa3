"""Local disk: a slab file for each namespace, cut into slots; the index is rebuilt from slot headers at start.

A slot is a page with the chunk's header, then the payload. The header is written last and wiped first, so a slot is
either whole or nobody's. Nothing is synced: a cache may lose data, and every read is verified.
"""

import ctypes
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tiertune_connector.chunk import HEADER_BYTES, NOBODY, Header, Origin, checksum, decode_header
from tiertune_connector.pool import Pool
from tiertune_connector.tiers.base import Outcome, Usage
from tiertune_connector.tiers.dram import Evicted
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tiers.shares import share_capacity

_NAME = re.compile(r"([0-9a-f]{32})-(\d+)\.slab")
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Slab:
    """One namespace's file and its pool of slot numbers."""

    def __init__(self, path: Path, namespace: str, chunk_bytes: int, algorithm: str) -> None:
        self.path = path
        self.namespace = namespace
        self.chunk_bytes = chunk_bytes
        self.slot_bytes = PAGE + -(-chunk_bytes // PAGE) * PAGE
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.pool: Pool[int] = Pool(0, algorithm)
        self.tenants: dict[bytes, bytes] = {}
        """Tenant digest of each key that has one."""
        self._free: list[int] = []
        self._slots = 0

    def recover(self, capacity: int) -> int:
        """Index the whole slots that the file holds, at most ``capacity``; returns how many."""
        self.pool.resize(capacity)
        self._slots = os.fstat(self.fd).st_size // self.slot_bytes
        for slot in range(self._slots):
            header = decode_header(os.pread(self.fd, HEADER_BYTES, slot * self.slot_bytes))
            known = header is not None and (header.namespace, header.length) == (self.namespace, self.chunk_bytes)
            if header is None or not known or header.key in self.pool or len(self.pool) >= capacity:
                self._wipe(slot)
                continue
            self.pool.reserve(header.key)
            self.pool.commit(header.key, slot)
            self._remember(header)
        return len(self.pool)

    def resize(self, capacity: int, algorithm: str) -> list[bytes]:
        """Another capacity in chunks; returns the evicted keys, whose room on disk is given back."""
        if algorithm and algorithm != self.pool.algorithm:
            self.pool.switch(algorithm)
        evicted = self.pool.resize(capacity)
        for key, slot in evicted:
            self.tenants.pop(key, None)
            self._wipe(slot)
        return [key for key, _ in evicted]

    def take(self) -> int:
        """A slot that nobody uses."""
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def reuse(self, slot: int) -> None:
        """An evicted slot is about to be written anew."""
        os.pwrite(self.fd, bytes(HEADER_BYTES), slot * self.slot_bytes)
        self._free.append(slot)

    def drop(self, key: bytes) -> bool:
        """Forget a chunk and give back its room; False if it is in use or not here."""
        slot = self.pool.remove(key)
        if slot is None:
            return False
        self.tenants.pop(key, None)
        self._wipe(slot)
        return True

    def write(self, slot: int, header: Header, payload: memoryview) -> None:
        start = slot * self.slot_bytes
        _pwrite_all(self.fd, payload, start + PAGE)
        _pwrite_all(self.fd, memoryview(header.encode()), start)

    def keep(self, header: Header, slot: int) -> None:
        """A written slot becomes visible."""
        self.pool.commit(header.key, slot)
        self._remember(header)

    def read(self, slot: int, key: bytes, out: memoryview) -> Header | None:
        """Fill ``out`` and return its header; None if it is not the chunk that was written."""
        start = slot * self.slot_bytes
        header = decode_header(os.pread(self.fd, HEADER_BYTES, start))
        if header is None or (header.namespace, header.key, header.length) != (self.namespace, key, len(out)):
            return None
        done = 0
        while done < len(out):
            count = os.preadv(self.fd, [out[done:]], start + PAGE + done)
            if count == 0:
                return None
            done += count
        return header if checksum(out) == header.checksum else None

    def _remember(self, header: Header) -> None:
        if header.origin.tenant:
            self.tenants[header.key] = header.origin.tenant

    def _wipe(self, slot: int) -> None:
        self._free.append(slot)
        if _libc.fallocate(self.fd, _PUNCH_HOLE, slot * self.slot_bytes, self.slot_bytes) != 0:
            os.pwrite(self.fd, bytes(HEADER_BYTES), slot * self.slot_bytes)  # a file system without holes


class DiskTier:
    """Thread-safe: the index under a lock, bytes outside it; a chunk in use is pinned."""

    name = "disk"

    def __init__(self, root: Path) -> None:
        """``root`` is made if it is missing; OSError if that fails."""
        root.mkdir(parents=True, exist_ok=True)
        self.slabs: dict[str, Slab] = {}
        self.on_evicted: Callable[[Sequence[Evicted]], None] = lambda _: None
        self._root = root
        self._capacity_bytes = 0
        self._lock = threading.RLock()

    def attach(self, namespace: str, chunk_bytes: int, algorithm: str) -> None:
        """Open the namespace's slab; files of the namespace with another chunk size are removed."""
        with self._lock:
            if namespace in self.slabs:
                return
            path = self._root / f"{namespace}-{chunk_bytes}.slab"
            for other in self._root.glob(f"{namespace}-*.slab"):
                if other != path:
                    other.unlink()
            slab = Slab(path, namespace, chunk_bytes, algorithm)
            # What the file holds counts only as far as the tier's capacity goes; `retune` shares it exactly.
            slab.recover(self._capacity_bytes // slab.slot_bytes)
            self.slabs[namespace] = slab

    def recover(self, capacity_bytes: int, algorithm: str) -> None:
        """Take up every slab that an earlier run left."""
        with self._lock:
            self._capacity_bytes = capacity_bytes
            for path in sorted(self._root.glob("*.slab")):
                if match := _NAME.fullmatch(path.name):
                    self.attach(match[1], int(match[2]), algorithm)

    def retune(self, capacity_bytes: int, asked: Mapping[str, tuple[int | None, str]]) -> None:
        """As DramTier.retune."""
        with self._lock:
            self._capacity_bytes = capacity_bytes
            wanted = {name: asked.get(name, (None, ""))[0] for name in self.slabs}
            for name, share in share_capacity(capacity_bytes, wanted).items():
                slab = self.slabs[name]
                self._tell(slab, slab.resize(share // slab.slot_bytes, asked.get(name, (None, ""))[1]), "capacity")

    def present(self, namespace: str, keys: Sequence[bytes]) -> tuple[Outcome, int]:
        with self._lock:
            slab = self.slabs.get(namespace)
            return Outcome.OK, slab.pool.prefix(keys) if slab else 0

    def read(self, namespace: str, key: bytes, out: memoryview) -> tuple[Outcome, Origin]:
        with self._lock:
            slab = self.slabs.get(namespace)
            slot = slab.pool.pin(key) if slab else None
        if slab is None or slot is None:
            return Outcome.MISS, NOBODY
        try:
            header = slab.read(slot, key, out)
        except OSError:
            return Outcome.ERROR, NOBODY
        finally:
            with self._lock:
                slab.pool.unpin(key)
        with self._lock:
            if header is None:
                slab.drop(key)
                return Outcome.CORRUPT, NOBODY
            slab.pool.touch([key])
        return Outcome.OK, header.origin

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        with self._lock:
            self.attach(namespace, len(payload), "lru")
            slab = self.slabs[namespace]
            if key in slab.pool or slab.pool.busy(key):
                return Outcome.OK
            evicted = slab.pool.reserve(key)
            if evicted is None:
                return Outcome.FULL
            for old, slot in evicted:
                slab.tenants.pop(old, None)
                slab.reuse(slot)
            self._tell(slab, [old for old, _ in evicted], "room")
            slot = slab.take()
        try:
            slab.write(slot, header := Header(namespace, key, origin, len(payload), checksum(payload)), payload)
        except OSError:
            with self._lock:
                slab.pool.abort(key)
                slab.reuse(slot)
            return Outcome.ERROR
        with self._lock:
            slab.keep(header, slot)
        return Outcome.OK

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> int:
        with self._lock:
            return sum(
                slab.drop(key)
                for name, slab in self.slabs.items()
                if namespace in (None, name)
                for key in list(slab.pool)
                if tenant in (None, slab.tenants.get(key))
            )

    def usage(self) -> Usage:
        with self._lock:
            resident = sum(len(slab.pool) * slab.slot_bytes for slab in self.slabs.values())
            return Usage(resident, self._capacity_bytes, sum(len(slab.pool) for slab in self.slabs.values()))

    def close(self) -> None:
        with self._lock:
            for slab in self.slabs.values():
                os.close(slab.fd)
            self.slabs.clear()

    def _tell(self, slab: Slab, keys: Sequence[bytes], reason: str) -> None:
        if keys:
            algorithm = slab.pool.algorithm
            self.on_evicted([Evicted(slab.namespace, algorithm, reason, None, NOBODY) for _ in keys])


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
