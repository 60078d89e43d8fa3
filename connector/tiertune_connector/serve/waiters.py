"""What waits or takes long, as the thread that serves all clients must not."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, get_args

from tiertune_connector.counters import Counters
from tiertune_connector.serve.connection import Connection
from tiertune_connector.threads import Threads

log = logging.getLogger(__name__)
Kind = Literal["lookup", "disk", "remote", "damage", "store", "long"]
"""Each has threads of its own, so that none holds up a faster one: lookups; loads, by their slowest tier; summing what
a client says is damaged; storing many chunks; counting long prompts."""
Work = Callable[[], None]
_MOST = 32
"""Threads of a kind."""
_MOST_LATER = 8
"""Long prompts yet to be counted: one more is counted at once, while all clients wait."""


class Waiters:
    """Threads of each kind, from one on as many as are needed."""

    def __init__(self, counters: Counters) -> None:
        """OSError if there is no thread for a kind."""
        self._counters = counters
        self._pools: dict[Kind, Threads] = {kind: Threads(_MOST, f"wait-{kind}") for kind in get_args(Kind)}
        self._room = threading.Semaphore(_MOST_LATER)
        self._closed = False

    def run(self, connection: Connection, serve: Work, kind: Kind) -> Future[None]:
        """Serve on a thread of a ``kind``; a failure ends the client's connection."""
        return self._pools[kind].submit(self._guarded, connection, serve)

    def _guarded(self, connection: Connection, serve: Work) -> None:
        try:
            serve()
        except OSError:
            connection.shutdown()
        except Exception:
            if not self._closed:  # else what serves it has ended, too
                log.exception("a request of %s failed", connection)
                self._counters.add("internal_errors_total", ("wait",))
            connection.shutdown()

    def later(self, connection: Connection, count: Work) -> None:
        """Do what takes long and nobody waits for: on another thread, or at once if too much waits there."""
        if self._room.acquire(blocking=False):
            self.run(connection, count, "long").add_done_callback(lambda _: self._room.release())
        else:
            count()

    def close(self) -> None:
        """Begin nothing any more."""
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
