"""Threads for what waits or takes long, as the thread that serves all clients must not."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, get_args

from tiertune_connector.counters import Counters
from tiertune_connector.serve.connection import Connection

log = logging.getLogger(__name__)
Kind = Literal["lookup", "disk", "remote", "damage", "store"]
"""Each has threads of its own, so that none holds up a faster one: lookups; loads, by their slowest tier; summing what
a client says is damaged; storing many chunks."""
_MOST_UNSERVED = 1000
"""Requests of a kind in a row for which there was no thread, until their places in its queue are forgotten."""
_MOST_LATER = 8
"""Long prompts yet to be counted: one more is counted at once, while all clients wait."""


class Waiters:
    """Threads, made as needed, at most 32 of each kind."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._pools: dict[Kind, ThreadPoolExecutor] = {kind: _threads(kind) for kind in get_args(Kind)}
        self._unserved = dict.fromkeys(self._pools, 0)
        self._long = _threads("long")
        """For ``later`` alone."""
        self._room = threading.Semaphore(_MOST_LATER)

    def run(self, connection: Connection, serve: Callable[[], None], kind: Kind) -> bool:
        """Serve on a thread of a ``kind``; a failure ends the client's connection. False: no thread can be had."""
        todo = [serve]  # whoever takes it out serves

        def once() -> None:
            with suppress(IndexError):
                self._guarded(connection, todo.pop())

        try:
            self._pools[kind].submit(once)
        except RuntimeError:  # it is queued all the same: a thread may just have begun it, or comes hours later
            self._counters.add("internal_errors_total", ("wait",))
            with suppress(IndexError):
                todo.pop()
                self._refused(kind)
                return False
        self._unserved[kind] = 0
        return True

    def _refused(self, kind: Kind) -> None:
        """Each leaves its place in the queue: if there is never a thread, they would fill the memory."""
        self._unserved[kind] += 1
        if self._unserved[kind] == _MOST_UNSERVED:
            self._unserved[kind] = 0
            former, self._pools[kind] = self._pools[kind], _threads(kind)
            former.shutdown(wait=False)  # threads that it has do what is theirs, and end

    def _guarded(self, connection: Connection, serve: Callable[[], None]) -> None:
        try:
            serve()
        except OSError:
            connection.shutdown()
        except Exception:
            log.exception("a request of %s failed", connection)
            self._counters.add("internal_errors_total", ("wait",))
            connection.shutdown()

    def later(self, connection: Connection, count: Callable[[], None]) -> None:
        """Do what takes long and nobody waits for: on another thread, or at once if too much waits there."""
        if not self._room.acquire(blocking=False):
            count()
            return

        def counted() -> None:
            try:
                count()
            finally:
                self._room.release()

        with suppress(RuntimeError):  # no thread can be had; the next one that comes does it
            self._long.submit(self._guarded, connection, counted)

    def close(self) -> None:
        """Begin nothing any more."""
        for pool in (*self._pools.values(), self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def _threads(kind: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(32, thread_name_prefix=f"wait-{kind}")
