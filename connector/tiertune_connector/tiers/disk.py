"""Local disk: a slab file for each namespace (`Slab`); the index is rebuilt from slot headers at start.

A disk may hang: whatever waits for it does so without the lock, and the index answers all the same.
"""

import errno
import fcntl
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tiertune_connector.chunk import NOBODY, Header, Origin
from tiertune_connector.tiers.base import Came, Evicted, Outcome, Usage, unheard
from tiertune_connector.tiers.shares import retune
from tiertune_connector.tiers.slab import AT_ONCE, Slab

_NAME = re.compile(r"([0-9a-f]{32})-(\d+)\.slab")
_READERS = 4
"""Windows that are read at a time: more keep no disk busier."""
HANDED_OVER = 128
"""Chunks that one step hands over to another algorithm: less."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATIENCE_S = 2.0
"""For what others were about to remove when a flush ended."""


class DiskTier:
    """Thread-safe: the index under a lock, bytes outside it; a chunk in use is pinned."""

    name = "disk"

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """``root`` is made if it is missing; OSError if that fails, or another store uses it."""
        root.mkdir(parents=True, exist_ok=True)
        self.pools: dict[str, Slab] = {}
        self.on_evicted: Callable[[Sequence[Evicted]], None] = lambda _: None
        self._root = root
        self._clock = clock
        self._capacity_bytes = 0
        self._asked: Mapping[str, tuple[int | None, str]] = {}
        self._lock = threading.RLock()
        self._wiped = threading.Condition(self._lock)
        self._opening = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="disk-window")
        self._owner = (root / "lock").open("w")
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._owner.close()
            raise OSError(f"{root}: another store uses this disk directory") from error

    def attach(self, namespace: str, chunk_bytes: int, algorithm: str) -> Outcome:
        """Open the namespace's slab, and make room for it as `retune` asked. Waits for the disk.

        ERROR, and nothing is kept of the namespace, if the disk does not let us.
        """
        if self._opened(namespace, chunk_bytes):
            return Outcome.OK
        with self._opening:
            if self._opened(namespace, chunk_bytes):
                return Outcome.OK
            try:
                self._open(namespace, chunk_bytes, algorithm)
            except OSError:
                return Outcome.ERROR
        with self._lock:
            retune(self.pools, self._capacity_bytes, self._asked)
        self.settle(AT_ONCE)
        return Outcome.OK

    def recover(self, capacity_bytes: int, algorithm: str) -> None:
        """Take up every slab that an earlier run left; `retune` then shares the room. OSError if the disk fails."""
        with self._opening:
            self._capacity_bytes = capacity_bytes
            for path in sorted(self._root.glob("*.slab")):
                match = _NAME.fullmatch(path.name)
                if match and match[1] not in self.pools:
                    self._open(match[1], int(match[2]), algorithm)

    def retune(self, capacity_bytes: int, asked: Mapping[str, tuple[int | None, str]]) -> None:
        """As DramTier.retune, also for namespaces that are attached later."""
        with self._lock:
            self._capacity_bytes, self._asked = capacity_bytes, asked
            retune(self.pools, capacity_bytes, asked)
            self._step()

    def settle(self, at_most: int = sys.maxsize) -> bool:
        """One bounded step of each pool towards what is asked; True while more is to do. Waits for the disk.

        What one pool has not given back yet, another cannot have: the slabs are never larger than their tier. Of each,
        the room of ``at_most`` chunks is given back.
        """
        with self._lock:
            more = self._step()
        for slab in list(self.pools.values()):
            self._wipe(slab, at_most)
        with self._lock:
            self._grow()
            gone = any(slab.lends and slab.vacant for slab in self.pools.values())
        if gone:
            self._remove_vacant()
        return more

    def present(self, namespace: str, keys: Sequence[bytes]) -> tuple[Outcome, int]:
        with self._lock:
            slab = self.pools.get(namespace)
            return Outcome.OK, slab.pool.prefix(keys) if slab else 0

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> tuple[Outcome, Origin]:
        return self._read(namespace, key, out, came, use=True)

    def verify(self, namespace: str, key: bytes, out: memoryview) -> Outcome:
        """A read that is no use of the chunk; ``out`` takes the payload."""
        return self._read(namespace, key, out, unheard, use=False)[0]

    def next_unread(self) -> tuple[str, bytes, int] | None:
        """Namespace, key and payload bytes of a chunk of an earlier run, each once; the next victims last."""
        with self._lock:
            for slab in self.pools.values():
                while slab.unread:
                    key = slab.unread.pop()
                    if key in slab.pool:
                        return slab.namespace, key, slab.chunk_bytes
        return None

    def _read(self, namespace: str, key: bytes, out: memoryview, came: Came, *, use: bool) -> tuple[Outcome, Origin]:
        with self._lock:
            slab = self.pools.get(namespace)
            slot = slab.pool.pin(key) if slab else None
        if slab is None or slot is None:
            return Outcome.MISS, NOBODY
        outcome, header = Outcome.OK, None
        try:
            header = slab.read(slot, key, out, came)
        except OSError:
            outcome = Outcome.ERROR
        with self._lock:
            if header is not None and use:
                slab.use(key, slot)
            elif header is None and outcome is Outcome.OK:
                # Who read it at the same time found it out, and tells, if it is gone already.
                outcome = Outcome.CORRUPT if slab.drop(key) else Outcome.MISS
            self._tell(slab, slab.unpin(key), "capacity")
        self._wipe(slab, AT_ONCE)
        return outcome, header.origin if header else NOBODY

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        if namespace not in self.pools and self.attach(namespace, len(payload), "") is not Outcome.OK:
            return Outcome.ERROR
        with self._lock:
            slab = self.pools.get(namespace)
            if slab is None or slab.chunk_bytes != len(payload):
                return Outcome.ERROR
            if key in slab.pool or slab.pool.busy(key):
                return Outcome.OK
            room = slab.reserve(key)
            if room is None:
                return Outcome.FULL
            slot, evicted = room
            self._tell(slab, evicted, "room")
        header = Header.of(namespace, key, payload, origin)
        outcome = Outcome.OK
        try:
            slab.write(slot, header, payload)
        except OSError as error:
            outcome = Outcome.FULL if error.errno in _FULL else Outcome.ERROR
        with self._lock:
            if outcome is Outcome.OK:
                slab.keep(header, slot)
            else:
                slab.abort(key, slot)
            self._wiped.notify_all()
            self._tell(slab, slab.trim(), "capacity")
        self._wipe(slab, AT_ONCE)
        return outcome

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> tuple[Outcome, int]:
        with self._lock:
            slabs = [slab for name, slab in self.pools.items() if namespace in (None, name)]
            unwiped = sum(slab.unwiped for slab in slabs)
            count = sum(
                slab.drop(key)
                for slab in slabs
                for key in list(slab.pool)
                if tenant in (None, slab.tenants.get(key, b""))
            )
        for slab in slabs:
            self._wipe(slab)
        with self._lock:
            others = [(slab, slab.unsure) for slab in slabs]
            if not self._wiped.wait_for(lambda: not any(slab.unsure & slots for slab, slots in others), _PATIENCE_S):
                return Outcome.TIMEOUT, count
            whole = unwiped == sum(slab.unwiped for slab in slabs)
            return Outcome.OK if whole else Outcome.ERROR, count

    def usage(self) -> Usage:
        with self._lock:
            resident = sum(len(slab.pool) * slab.stride for slab in self.pools.values())
            return Usage(resident, self._capacity_bytes, sum(len(slab.pool) for slab in self.pools.values()))

    @property
    def room_bytes(self) -> int:
        """Of the whole file system; OSError, also if that does not answer."""
        try:
            return self._readers.submit(shutil.disk_usage, self._root).result(_PATIENCE_S).total
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error

    def close(self) -> None:
        with self._lock:
            for slab in self.pools.values():
                slab.close()
            self.pools.clear()
            self._owner.close()
        self._readers.shutdown(wait=False)

    def _opened(self, namespace: str, chunk_bytes: int) -> bool:
        slab = self.pools.get(namespace)
        return slab is not None and slab.chunk_bytes == chunk_bytes

    def _open(self, namespace: str, chunk_bytes: int, algorithm: str) -> None:
        """Take up or make a slab; files of the namespace with another chunk size are removed."""
        with self._lock:
            before = self.pools.pop(namespace, None)
        if before is not None:
            before.close()
        path = self._root / f"{namespace}-{chunk_bytes}.slab"
        for other in self._root.glob(f"{namespace}-*.slab"):
            if other != path:
                other.unlink()
        slab = Slab(path, namespace, chunk_bytes, algorithm or "lru", readers=self._readers, clock=self._clock)
        try:
            slab.recover(self._capacity_bytes // slab.stride)
        except OSError:
            slab.close()
            raise
        with self._lock:
            self.pools[namespace] = slab

    def _remove_vacant(self) -> None:
        """Forget those that lend their share and have nothing left, their files too. Waits for the disk."""
        with self._opening:
            with self._lock:
                gone = [slab for slab in self.pools.values() if slab.lends and slab.vacant]
                for slab in gone:
                    del self.pools[slab.namespace]
            for slab in gone:
                slab.close()
                with suppress(OSError):  # it is found empty after a restart, and removed then
                    slab.path.unlink(missing_ok=True)

    def _step(self) -> bool:
        """What `settle` does to the index."""
        slabs = list(self.pools.values())
        shrinking = [slab for slab in slabs if slab.pool.capacity > slab.allowed]
        for slab in shrinking:
            self._tell(slab, slab.shrink(), "capacity")
        self._grow()
        switching = [slab for slab in slabs if slab.pool.hand_over(HANDED_OVER)]
        return bool(shrinking or switching)

    def _grow(self) -> None:
        for slab in self.pools.values():
            slab.grow(self._capacity_bytes - sum(each.taken_bytes for each in self.pools.values()))

    def _wipe(self, slab: Slab, at_most: int = sys.maxsize) -> None:
        """Wipe what left a slab, the newest first. Waits for the disk."""
        for _ in range(at_most):
            with self._lock:
                slot = slab.to_wipe()
            if slot is None:
                return
            sure = slab.wipe(slot)
            with self._lock:
                slab.wiped(slot, sure=sure)
                self._wiped.notify_all()

    def _tell(self, slab: Slab, used_at: Sequence[float | None], reason: str) -> None:
        """Chunks left that were used last then."""
        if used_at:
            algorithm = slab.pool.algorithm
            self.on_evicted([Evicted(slab.namespace, algorithm, reason, at, NOBODY) for at in used_at])
