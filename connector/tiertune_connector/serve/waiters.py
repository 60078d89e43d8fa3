"""Threads for what waits, or takes long: the one that serves all clients does neither."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tiertune_connector.counters import Counters
from tiertune_connector.serve.connection import Connection

log = logging.getLogger(__name__)
_KINDS = ("lookup", "long", "disk", "remote", "damage", "store")
"""Each waits on threads of its kind, so that none holds up a faster one: a lookup; the counting of a long prompt; a
load, by its slowest tier; what a client says is damaged, until it is summed; many chunks that are stored."""
_MOST_LATER = 8
"""Long prompts that are to be counted yet: one more is counted at once, and all clients wait until it is."""


class Waiters:
    """Threads are made as they are needed, 32 of each kind at most."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._pools = {kind: ThreadPoolExecutor(32, thread_name_prefix=f"wait-{kind}") for kind in _KINDS}
        self._room = threading.Semaphore(_MOST_LATER)

    def run(self, connection: Connection, serve: Callable[[], None], kind: str) -> Future[None]:
        """On a thread of a ``kind``; what fails ends the client's connection."""

        def guarded() -> None:
            try:
                serve()
            except OSError:
                connection.shutdown()
            except Exception:
                log.exception("a request of pid %d failed", connection.peer.pid)
                self._counters.add("internal_errors_total", ("wait",))
                connection.shutdown()

        return self._pools[kind].submit(guarded)

    def later(self, connection: Connection, count: Callable[[], None]) -> None:
        """What nobody waits for, and takes long: on another thread, unless too much is to be done there already."""
        if self._room.acquire(blocking=False):
            self.run(connection, count, "long").add_done_callback(lambda _: self._room.release())
        else:
            count()

    def close(self) -> None:
        """Nothing is begun any more."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
