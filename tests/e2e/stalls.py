"""Whether this machine ran who was to run: what took long while it did not tells nothing of what is tested."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Told = TypeVar("Told")
_EVERY_S = 0.005
_LATE_S = 0.02
"""Far more than threads of this process keep each other from running."""


class Stalls:
    """Spans in which one of the processors was away: a host that serves others, or a neighbour that computes."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._looked: dict[int, float] = {}
        """When each processor was last there."""
        self._stop = threading.Event()

    def during(self, started: float, ended: float) -> bool:
        """Whether a stall lay within, by the monotonic clock."""
        return self.seconds(started, ended) > 0

    def seconds(self, started: float, ended: float) -> float:
        """How long a processor or more was away within; one that is still away is waited for."""
        while not self._stop.is_set() and min(self._looked.values(), default=ended) < ended:
            time.sleep(_EVERY_S)
        away_s, told = 0.0, started
        for since, until in sorted(self._spans):  # of several at once, the time counts once
            away_s += max(0.0, min(until, ended) - max(since, told))
            told = max(told, until)
        return away_s

    def timed(self, call: Callable[[], Told]) -> tuple[float, Told]:
        """Seconds that a call took, but for those in which a processor was away, and its answer."""
        started = time.monotonic()
        told, ended = call(), time.monotonic()
        return ended - started - self.seconds(started, ended), told

    def watch(self, cpu: int) -> None:
        """One processor, until the end."""
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        while not self._stop.is_set():
            started = time.monotonic()
            time.sleep(_EVERY_S)
            if (ended := time.monotonic()) - started > _EVERY_S + _LATE_S:
                self._spans.append((started, ended))
            self._looked[cpu] = ended

    def end(self) -> None:
        self._stop.set()


@contextmanager
def stalls() -> Iterator[Stalls]:
    """Watched on every processor that this process may use."""
    made = Stalls()
    threads = [threading.Thread(target=made.watch, args=(cpu,), daemon=True) for cpu in sorted(os.sched_getaffinity(0))]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        made.end()
        for thread in threads:
            thread.join()


def timed(call: Callable[[], Told]) -> tuple[float, Told]:
    """As `Stalls.timed`, of a single call."""
    with stalls() as stood:
        return stood.timed(call)
