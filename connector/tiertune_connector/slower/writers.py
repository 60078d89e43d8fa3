"""The chunks to be written behind to one slower tier, and the threads that write them."""

import errno
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiertune_connector.chunk import Origin
from tiertune_connector.counters import Counters
from tiertune_connector.tiers.base import Outcome

MAX_QUEUED = 1024
"""Chunks queued per namespace, at most."""

_THREADS = 2


@dataclass(frozen=True, eq=False)
class Write:
    """A chunk to be written behind; ``done`` is called once, with the outcome, or None if it was dropped."""

    namespace: str
    key: bytes
    payload: memoryview
    origin: Origin
    done: Callable[[Outcome | None], None]


class WriteQueue:
    """What waits to be written, each namespace's in its own order. Guarded by its writers' lock.

    Those that wait share the bytes evenly: by chunks in turn, one of small chunks would hardly be written beside one of
    large chunks.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Write]] = {}
        self._taken: dict[str, int] = {}
        """Bytes of each that waits, or has had more than its part; one that comes has had as many as the others."""
        self._least = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, namespace: str) -> int:
        """How many writes of a namespace wait."""
        return len(self._waiting.get(namespace, ()))

    def append(self, write: Write) -> None:
        self._waiting.setdefault(write.namespace, deque()).append(write)
        self._taken[write.namespace] = max(self._least, self._taken.get(write.namespace, 0))

    def pop(self) -> Write:
        """The next one; ValueError if none waits."""
        namespace = min(self._waiting, key=self._taken.__getitem__)
        self._least = self._taken[namespace]
        write = self._waiting[namespace].popleft()
        self._taken[namespace] += len(write.payload)
        if not self._waiting[namespace]:
            del self._waiting[namespace]
            waiting, least = self._waiting, self._least
            self._taken = {name: had for name, had in self._taken.items() if name in waiting or had > least}
        return write

    def take(self, matches: Callable[[Write], bool] = lambda _: True) -> list[Write]:
        """Remove and return the matching writes."""
        waiting = [write for writes in self._waiting.values() for write in writes]
        self._waiting.clear()
        taken = list[Write]()
        for write in waiting:
            (taken if matches(write) else self).append(write)
        return taken


class Writers:
    """The threads of one tier. Thread-safe; only ``drop_queued`` and ``close`` wait."""

    def __init__(
        self, tier: str, counters: Counters, put: Callable[[Write], Outcome], refusal: Callable[[], str]
    ) -> None:
        """``put`` writes a chunk, on a thread of ours, and raises nothing. OSError if not all threads can be had.

        ``refusal`` returns why nothing is written now; empty: all is well.
        """
        self._tier = tier
        self._counters = counters
        self._put = put
        self._refusal = refusal
        self._changed = threading.Condition()
        self._queue = WriteQueue()
        self._writing: set[Write] = set()
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"{tier}-write", daemon=True) for _ in range(_THREADS)]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            raise OSError(errno.EAGAIN, f"{tier}-write: not all threads ({_THREADS}) can be had") from error

    def queue(self, write: Write, *, at_most: int = MAX_QUEUED) -> None:
        """Queue a chunk; it is dropped and counted if its namespace's queue is full, or nothing is written now.

        ``at_most`` may shorten that queue: what waits is pinned in its pool.
        """
        with self._changed:
            full = self._queue.of(write.namespace) >= min(MAX_QUEUED, at_most)
            reason = self._refusal() or ("queue_full" if full else "closing" if self._closed else "")
            if not reason:
                self._queue.append(write)
                self._changed.notify()
                return
        self._drop([write], reason)

    def queued(self, namespace: str | None = None) -> int:
        """Chunks of one or all namespaces that wait or are being written."""
        with self._changed:
            if namespace is None:
                return len(self._queue) + len(self._writing)
            return self._queue.of(namespace) + sum(write.namespace == namespace for write in self._writing)

    def missed(self, count: int) -> None:
        """Count chunks that left their pool before they were written."""
        self._dropped(self._refusal() or "evicted", count)

    def refused(self) -> None:
        """Drop what waits if nothing is written now, since it stays pinned meanwhile."""
        with self._changed:
            reason = self._refusal()
            dropped = self._queue.take() if reason else []
        self._drop(dropped, reason)

    def drop_queued(self, matches: Callable[[Write], bool], timeout_s: float) -> bool:
        """Drop matching chunks that wait; wait up to ``timeout_s`` for those being written. False: some still are."""
        with self._changed:
            dropped = self._queue.take(matches)
            writing = {write for write in self._writing if matches(write)}
            ended = self._changed.wait_for(lambda: not writing & self._writing, timeout_s)
        self._drop(dropped, "flushed")
        return ended

    def close(self, timeout_s: float) -> None:
        """Write what is queued as far as the time allows, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_s)
            dropped = self._queue.take()
        self._drop(dropped, "closing")
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (write := self._next()) is not None:
            outcome = self._put(write)
            if not outcome.kept:
                self._dropped(outcome.value)
            self._let_go(write, outcome)
            with self._changed:
                self._writing.discard(write)
                self._changed.notify_all()
            del write  # its memory may be unmapped while this thread is idle

    def _next(self) -> Write | None:
        """The next chunk to be written; None once no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            write = self._queue.pop()
            self._writing.add(write)
            return write

    def _drop(self, writes: list[Write], reason: str) -> None:
        for write in writes:
            self._dropped(reason)
            self._let_go(write, None)

    def _let_go(self, write: Write, outcome: Outcome | None) -> None:
        """Tell the owner; if it raises, neither the writer nor the writes behind it end."""
        with self._counters.surviving("write", f"a chunk for {self._tier} could not be let go"):
            write.done(outcome)

    def _dropped(self, reason: str, count: int = 1) -> None:
        self._counters.add("write_behind_dropped_total", (self._tier, reason), count)
