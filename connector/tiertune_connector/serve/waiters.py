"""What waits or takes long, as the thread that serves all clients must not."""

import logging
import threading
from collections.abc import Callable
from typing import Literal, get_args

from tiertune_connector.counters import Counters
from tiertune_connector.serve.connection import Connection
from tiertune_connector.threads import Threads

log = logging.getLogger(__name__)
Kind = Literal["lookup", "disk", "remote", "damage", "store"]
"""Each has threads of its own, so that none holds up a faster one: lookups; loads, by their slowest tier; summing what
a client says is damaged; storing many chunks."""
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
        self._long = Threads(_MOST_LATER, "wait-long")
        """For ``later`` alone."""
        self._room = threading.Semaphore(_MOST_LATER)
        self._closed = False

    def run(self, connection: Connection, serve: Work, kind: Kind) -> None:
        """Serve on a thread of a ``kind``; a failure ends the client's connection."""
        self._pools[kind].submit(self._guarded, connection, serve)

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
        if not self._room.acquire(blocking=False):
            count()
            return

        def counted() -> None:
            try:
                count()
            finally:
                self._room.release()

        self._long.submit(self._guarded, connection, counted)

    def close(self) -> None:
        """Begin nothing any more."""
        self._closed = True
        for pool in (*self._pools.values(), self._long):
            pool.shutdown(wait=False, cancel_futures=True)
