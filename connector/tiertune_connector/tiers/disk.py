"""Local disk: a slab file for each namespace; the index (`DiskPool`) is rebuilt from slot headers at start.

A disk may hang: whatever waits for it does so without the lock, so the index still answers.
"""

import errno
import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import monotonic

from tiertune_connector import locks
from tiertune_connector.chunk import NOBODY, Header, Origin
from tiertune_connector.threads import Threads
from tiertune_connector.tiers.base import Came, Counted, OnFiles, Outcome, Read, unheard
from tiertune_connector.tiers.disk_pool import WIPED_AT_ONCE, DiskPool
from tiertune_connector.tiers.shares import HANDED_OVER, Asked, LocalTier, retune
from tiertune_connector.tiers.slab import Slab
from tiertune_connector.units import Clock

_NAME = re.compile(r"([0-9a-f]{32})-(\d+)\.slab")
_READERS = 4
"""Windows read at a time: more keep no disk busier."""
_DROPPED = 128
"""Chunks one step of a flush drops: a fraction of a millisecond with the lock held."""
_IN_TURNS = 512
"""Chunks of a pool to name in turn: one read just before would come out of a cache."""
_PATIENCE_S = 2.0
"""Wait for what others were still removing as a flush ended."""
_SIZE_S = 0.5
"""Wait for the file system's size. A change asks for it in its turn, for which others wait a second."""


class DiskTier(OnFiles, LocalTier[DiskPool]):
    """Thread-safe: the index under a lock, bytes outside it; a chunk in use is pinned."""

    name = "disk"

    def __init__(self, root: Path, clock: Clock = monotonic) -> None:
        """``root`` is made if missing; OSError if that fails, or another store uses it."""
        super().__init__()
        self.root = root
        self._clock = clock
        self._asked: Asked = {}
        self._wiped = threading.Condition(self.lock)
        self._opening = threading.Lock()
        self._readers = Threads(_READERS, "disk-window", ready=_READERS)
        self._sizer = Threads(1, "disk-size")  # else the size would wait for a busy disk's windows
        try:
            self._owner = locks.own(root)
        except BlockingIOError as error:
            raise OSError(f"{root}: another store uses this disk directory: end it, or name another") from error

    def attach(self, namespace: str, chunk_bytes: int) -> Outcome:
        """Open the namespace's slab, and make room for it as `retune` asked. Waits for the disk.

        FULL or ERROR, and no trace of the namespace, if the disk refuses.
        """
        if self._opened(namespace, chunk_bytes):
            return Outcome.OK
        with self._opening:
            if self._opened(namespace, chunk_bytes):
                return Outcome.OK
            try:
                self._open(namespace, chunk_bytes, "lru")  # until `retune`, a line below
            except OSError as error:
                return self._failed(error, wanted_room=True)
        with self.lock:
            retune(self.pools, self.capacity_bytes, self._asked)
        self.settle(WIPED_AT_ONCE)
        return Outcome.OK

    def recover(self, capacity_bytes: int, algorithm: str) -> None:
        """Take up every slab that an earlier run left; `retune` then shares the room. OSError if the disk fails."""
        with self._opening:
            self.capacity_bytes = capacity_bytes
            for path in sorted(self.root.glob("*.slab")):
                match = _NAME.fullmatch(path.name)
                if match and match[1] not in self.pools:
                    self._open(match[1], int(match[2]), algorithm)

    def retune(self, capacity_bytes: int, asked: Asked) -> None:
        """Like `DramTier.retune`, also for namespaces attached later."""
        with self.lock:
            self.capacity_bytes, self._asked = capacity_bytes, asked
            retune(self.pools, capacity_bytes, asked)
            self._step()

    def settle(self, at_most: int = sys.maxsize) -> bool:
        """Take one bounded step with each pool towards what is asked; True while more is to do. Waits for the disk.

        What one pool has not given back yet, another cannot have: the slabs are never larger than their tier. Each
        gives back the room of ``at_most`` chunks.
        """
        with self.lock:
            more = self._step()
        for pool in list(self.pools.values()):
            self._wipe(pool, at_most)
        with self.lock:
            self._grow()
            gone = any(pool.lends and not pool.taken_bytes for pool in self.pools.values())
        if gone:
            self._remove_vacant()
        return more

    def present(self, namespace: str, keys: Sequence[bytes]) -> Counted:
        with self.lock:
            pool = self.pools.get(namespace)
            return Outcome.OK, pool.pool.prefix(keys) if pool else 0

    def next_unread(self) -> tuple[str, bytes, int] | None:
        """Namespace, key and payload bytes of a chunk of an earlier run, each once, next victims last; else None."""
        with self.lock:
            for pool in self.pools.values():
                while pool.unread:
                    key = pool.unread.pop()
                    if key in pool.pool:
                        return pool.namespace, key, pool.chunk_bytes
        return None

    def one_of_each_size(self, number: int) -> list[tuple[str, bytes, int]]:
        """Namespace, key and payload bytes of a chunk of each size; another ``number``, another chunk."""
        with self.lock:
            held = {pool.chunk_bytes: pool for pool in self.pools.values() if pool.pool.visible}
            return [
                (pool.namespace, next(islice(pool.pool, number % min(len(pool.pool.visible), _IN_TURNS), None)), nbytes)
                for nbytes, pool in sorted(held.items())
            ]

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard, *, use: bool = True) -> Read:
        """A tier's `read`; one that only checks or probes is no ``use`` of the chunk."""
        with self.lock:
            pool = self.pools.get(namespace)
            slot = pool.pool.pin(key) if pool else None
        if pool is None or slot is None:
            return Outcome.MISS, NOBODY
        outcome, header, unreadable = Outcome.OK, None, False
        try:
            header = pool.slab.read(slot, key, out, came)
        except OSError as error:
            outcome, unreadable = self._failed(error), error.errno == errno.EIO
        with self.lock:
            if header is not None and use:
                pool.use(key, slot)
            elif header is None and outcome is Outcome.OK:
                # If it is gone already, a concurrent reader found that out, and says so.
                outcome = Outcome.CORRUPT if pool.drop(key) else Outcome.MISS
            elif unreadable and use:
                pool.doubt(key)
            pool.unpin(key)
        self._wipe(pool, WIPED_AT_ONCE)
        return outcome, header.origin if header else NOBODY

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        opened = Outcome.OK if namespace in self.pools else self.attach(namespace, len(payload))
        if opened is not Outcome.OK:
            return opened
        with self.lock:
            pool = self.pools.get(namespace)
            if pool is None or pool.chunk_bytes != len(payload):
                return Outcome.ERROR
            if key in pool.pool or pool.pool.busy(key):
                return Outcome.THERE
            slot = pool.reserve(key)
            if slot is None:
                return Outcome.FULL
        header = Header.of(namespace, key, payload, origin)
        outcome = Outcome.OK
        try:
            pool.slab.write(slot, header, payload)
        except OSError as error:
            outcome = self._failed(error, wanted_room=True)
        with self.lock:
            pool.keep(header, slot) if outcome is Outcome.OK else pool.abort(key, slot)
            self._wiped.notify_all()
        self._wipe(pool, WIPED_AT_ONCE)
        return outcome

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> Counted:
        """In steps, like `DramTier.flush`."""
        with self.lock:
            pools = self._named(namespace)
        count = self._drop_from(pools, tenant, at_once=_DROPPED)
        with self._opening, self.lock:  # a pool that is being removed comes back if its file cannot be
            pools += [pool for pool in self._named(namespace) if pool not in pools]
            for pool in pools:
                pool.wipe_again()
        for pool in pools:
            self._wipe(pool)
        with self.lock:
            others = [(pool, pool.unsure.union(pool.unwiped)) for pool in pools]  # which others may take up
            if not self._wiped.wait_for(lambda: not any(pool.unsure & slots for pool, slots in others), _PATIENCE_S):
                return Outcome.TIMEOUT, count
            if any(pool.unwiped or pool.ended for pool in pools):
                return Outcome.ERROR, count
        try:
            for pool in pools:
                pool.slab.sync()
        except OSError as error:
            return self._failed(error), count
        return Outcome.OK, count

    @property
    def room_bytes(self) -> int:
        """Size of the file system; OSError, also if it does not answer."""
        try:
            return self._sizer.submit(shutil.disk_usage, self.root).result(_SIZE_S).total
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error

    def close(self) -> None:
        self._forget()
        self._owner.close()
        for threads in (self._readers, self._sizer):
            threads.shutdown(wait=False)

    def _opened(self, namespace: str, chunk_bytes: int) -> bool:
        pool = self.pools.get(namespace)
        return pool is not None and pool.chunk_bytes == chunk_bytes

    def _open(self, namespace: str, chunk_bytes: int, algorithm: str) -> None:
        """Take up or make a slab; files of the namespace with another chunk size are removed."""
        self._forget(namespace)
        path = self.root / f"{namespace}-{chunk_bytes}.slab"
        for other in self.root.glob(f"{namespace}-*.slab"):
            if other != path:
                other.unlink()
        slab = Slab(path, namespace, chunk_bytes, self._readers)
        try:
            capacity = self.capacity_bytes // slab.stride
            pool = DiskPool(slab, algorithm, capacity, self._clock, self._evicted)
        except OSError:
            slab.close()
            raise
        with self.lock:
            self.pools[namespace] = pool

    def _forget(self, namespace: str | None = None) -> None:
        """Forget the pool of a namespace, if there is one; None: all. Waits for the disk."""
        with self.lock:
            gone = self._named(namespace)
            unused = [pool.slab for pool in gone if pool.end()]
            for pool in gone:
                del self.pools[pool.namespace]
        for slab in unused:
            slab.close()

    def _remove_vacant(self) -> None:
        """Forget pools that lend their share and are empty, with their files. Waits for the disk."""
        with self._opening:
            with self.lock:
                gone = [pool for pool in self.pools.values() if pool.lends and not pool.taken_bytes]
                for pool in gone:
                    del self.pools[pool.namespace]
            for pool in gone:  # nobody uses what takes nothing
                try:
                    pool.slab.clear()  # a loss of power may bring the file back
                    pool.slab.path.unlink(missing_ok=True)
                except OSError:  # a restart may find chunks there, until a flush wipes it
                    with self.lock:
                        self.pools[pool.namespace] = pool
                else:
                    with suppress(OSError):  # the descriptor is closed all the same
                        pool.slab.close()

    def _step(self) -> bool:
        """What `settle` does to the index."""
        pools = list(self.pools.values())
        shrinking = [pool for pool in pools if pool.pool.capacity > pool.allowed]
        for pool in shrinking:
            pool.shrink()
        self._grow()
        switching = [pool for pool in pools if pool.pool.hand_over(HANDED_OVER)]
        return bool(shrinking or switching)

    def _grow(self) -> None:
        for pool in self.pools.values():
            pool.grow(self.capacity_bytes - sum(each.taken_bytes for each in self.pools.values()))

    def _wipe(self, pool: DiskPool, at_most: int = sys.maxsize) -> None:
        """Wipe what left a pool, newest first. Waits for the disk."""
        for _ in range(at_most):
            with self.lock:
                slot = pool.to_wipe()
            if slot is None:
                return
            sure = pool.slab.wipe(slot)
            with self.lock:
                pool.wiped(slot, sure=sure)
                self._wiped.notify_all()
