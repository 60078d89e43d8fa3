"""Local disk: a slab file for each namespace, cut into slots; the index is rebuilt from slot headers at start.

A slot is a page with the chunk's header, then the payload. The header is written last and wiped first, so a slot is
either whole or nobody's. Nothing is synced: a cache may lose data, and every read is verified.
"""

import errno
import fcntl
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tiertune_connector.chunk import HEADER_BYTES, NOBODY, Header, Origin, checksum, decode_header
from tiertune_connector.pool import Pool
from tiertune_connector.tiers.base import Outcome, Usage
from tiertune_connector.tiers.dram import Evicted
from tiertune_connector.tiers.linux import punch_hole
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tiers.shares import share_capacity

_NAME = re.compile(r"([0-9a-f]{32})-(\d+)\.slab")
_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        self.unwiped = 0
        """Slots whose header could not be removed from a failing disk: they may be back after a restart."""
        self._free: list[int] = []
        self._slots = 0

    def recover(self, capacity: int) -> int:
        """Index the whole slots that the file holds, at most ``capacity``; returns how many."""
        self.pool.resize(capacity)
        self._slots = -(-os.fstat(self.fd).st_size // self.slot_bytes)  # the last payload may end within its pages
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
        return self._give_back(self.pool.resize(capacity))

    def reserve(self, key: bytes) -> tuple[int, list[bytes]] | None:
        """A slot to be written, and the keys evicted for it; None if all is in use."""
        evicted = self.pool.reserve(key)
        if evicted is None:
            return None
        for old, slot in evicted[:1]:  # its room on disk stays, for the new chunk
            self.tenants.pop(old, None)
            self._forget(slot)
        self._give_back(evicted[1:])
        return self._take(), [old for old, _ in evicted]

    def drop(self, key: bytes) -> bool:
        """Forget a chunk, whose room is given back when nobody uses it; False if it is not here."""
        if key not in self.pool:
            return False
        self.tenants.pop(key, None)
        slot = self.pool.discard(key)
        if slot is not None:
            self._wipe(slot)
        return True

    def abort(self, key: bytes, slot: int) -> None:
        """A reserved chunk could not be written."""
        self.pool.abort(key)
        self._wipe(slot)

    def unpin(self, key: bytes) -> list[bytes]:
        """A read is over; returns the keys that leave because the capacity fell meanwhile."""
        left = self.pool.unpin(key)
        if left is not None:
            self._wipe(left)
        return self.trim()

    def trim(self) -> list[bytes]:
        return self._give_back(self.pool.trim())

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

    def _take(self) -> int:
        """A slot that nobody uses."""
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def _give_back(self, evicted: Sequence[tuple[bytes, int]]) -> list[bytes]:
        for key, slot in evicted:
            self.tenants.pop(key, None)
            self._wipe(slot)
        return [key for key, _ in evicted]

    def _wipe(self, slot: int) -> None:
        if punch_hole(self.fd, slot * self.slot_bytes, self.slot_bytes):
            self._free.append(slot)
        else:  # a file system without holes
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        """Free a slot, its room on disk kept."""
        self._free.append(slot)
        try:
            os.pwrite(self.fd, bytes(HEADER_BYTES), slot * self.slot_bytes)
        except OSError:
            self.unwiped += 1


class DiskTier:
    """Thread-safe: the index under a lock, bytes outside it; a chunk in use is pinned."""

    name = "disk"

    def __init__(self, root: Path) -> None:
        """``root`` is made if it is missing; OSError if that fails, or another store uses it."""
        root.mkdir(parents=True, exist_ok=True)
        self.slabs: dict[str, Slab] = {}
        self.on_evicted: Callable[[Sequence[Evicted]], None] = lambda _: None
        self._root = root
        self._capacity_bytes = 0
        self._asked: Mapping[str, tuple[int | None, str]] = {}
        self._lock = threading.RLock()
        self._owner = (root / "lock").open("w")
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._owner.close()
            raise OSError(f"{root}: another store uses this disk directory") from error

    def attach(self, namespace: str, chunk_bytes: int, algorithm: str) -> Outcome:
        """Open the namespace's slab; ERROR, and nothing is kept of the namespace, if the disk does not let us."""
        with self._lock:
            slab = self.slabs.get(namespace)
            if slab is not None and slab.chunk_bytes == chunk_bytes:
                return Outcome.OK
            try:
                self._open(namespace, chunk_bytes, algorithm)
            except OSError:
                return Outcome.ERROR
            self.retune(self._capacity_bytes, self._asked)
            return Outcome.OK

    def recover(self, capacity_bytes: int, algorithm: str) -> None:
        """Take up every slab that an earlier run left; `retune` then shares the room. OSError if the disk fails."""
        with self._lock:
            self._capacity_bytes = capacity_bytes
            for path in sorted(self._root.glob("*.slab")):
                match = _NAME.fullmatch(path.name)
                if match and match[1] not in self.slabs:
                    self._open(match[1], int(match[2]), algorithm)

    def retune(self, capacity_bytes: int, asked: Mapping[str, tuple[int | None, str]]) -> None:
        """As DramTier.retune."""
        with self._lock:
            self._capacity_bytes, self._asked = capacity_bytes, asked
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
        outcome, header = Outcome.OK, None
        try:
            header = slab.read(slot, key, out)
        except OSError:
            outcome = Outcome.ERROR
        with self._lock:
            if header is not None:
                slab.pool.touch([key])
            elif outcome is Outcome.OK:
                outcome = Outcome.CORRUPT
                slab.drop(key)
            self._tell(slab, slab.unpin(key), "capacity")
        return outcome, header.origin if header else NOBODY

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        with self._lock:
            if namespace not in self.slabs and self.attach(namespace, len(payload), "") is not Outcome.OK:
                return Outcome.ERROR
            slab = self.slabs[namespace]
            if slab.chunk_bytes != len(payload):
                return Outcome.ERROR
            if key in slab.pool or slab.pool.busy(key):
                return Outcome.OK
            room = slab.reserve(key)
            if room is None:
                return Outcome.FULL
            slot, evicted = room
            self._tell(slab, evicted, "room")
        header = Header(namespace, key, origin, len(payload), checksum(payload))
        try:
            slab.write(slot, header, payload)
        except OSError as error:
            with self._lock:
                slab.abort(key, slot)
            return Outcome.FULL if error.errno in _FULL else Outcome.ERROR
        with self._lock:
            slab.keep(header, slot)
            self._tell(slab, slab.trim(), "capacity")
        return Outcome.OK

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> tuple[Outcome, int]:
        with self._lock:
            slabs = [slab for name, slab in self.slabs.items() if namespace in (None, name)]
            unwiped = sum(slab.unwiped for slab in slabs)
            count = sum(
                slab.drop(key)
                for slab in slabs
                for key in list(slab.pool)
                if tenant in (None, slab.tenants.get(key, b""))
            )
            whole = unwiped == sum(slab.unwiped for slab in slabs)
            return Outcome.OK if whole else Outcome.ERROR, count

    def usage(self) -> Usage:
        with self._lock:
            resident = sum(len(slab.pool) * slab.slot_bytes for slab in self.slabs.values())
            return Usage(resident, self._capacity_bytes, sum(len(slab.pool) for slab in self.slabs.values()))

    def close(self) -> None:
        with self._lock:
            for slab in self.slabs.values():
                if not slab.pool.pinned:  # else a transfer hangs: its descriptor must not become another file's
                    os.close(slab.fd)
            self.slabs.clear()
            self._owner.close()

    def _open(self, namespace: str, chunk_bytes: int, algorithm: str) -> None:
        """Take up or make a slab; files of the namespace with another chunk size are removed."""
        before = self.slabs.pop(namespace, None)
        if before is not None:
            os.close(before.fd)
        path = self._root / f"{namespace}-{chunk_bytes}.slab"
        for other in self._root.glob(f"{namespace}-*.slab"):
            if other != path:
                other.unlink()
        slab = Slab(path, namespace, chunk_bytes, algorithm or "lru")
        try:
            slab.recover(self._capacity_bytes // slab.slot_bytes)
        except OSError:
            os.close(slab.fd)
            raise
        self.slabs[namespace] = slab

    def _tell(self, slab: Slab, keys: Sequence[bytes], reason: str) -> None:
        if keys:
            algorithm = slab.pool.algorithm
            self.on_evicted([Evicted(slab.namespace, algorithm, reason, None, NOBODY) for _ in keys])


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
