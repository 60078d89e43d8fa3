"""What is on its way from one slower tier, as its threads tell it, and what a fetch costs meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tiertune_connector.cost import FetchCost, FetchEstimate, Traffic
from tiertune_connector.tiers.base import Outcome


class Transit:
    """Thread-safe. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._traffic = Traffic(FetchCost(now=clock()))

    def estimate(self, chunks: int = 0, nbytes: int = 0) -> FetchEstimate | None:
        """What a fetch costs now, behind those under way but for its own ``chunks`` among them, of ``nbytes``.

        None before anything was measured.
        """
        with self._lock:
            return self._traffic.estimate(self._clock(), chunks, nbytes)

    @property
    def chunk_bytes(self) -> float:
        """Of the mean chunk that came lately; 0 before one."""
        with self._lock:
            return self._traffic.cost.chunk_bytes

    def silent_s(self, chunk_bytes: int) -> float:
        """Seconds since a chunk about as large came."""
        with self._lock:
            return self._traffic.cost.silent_s(self._clock(), chunk_bytes)

    def asked(self, nbytes: int) -> float | None:
        """A chunk is on its way from now on, until ``ended``: both teach what a fetch costs.

        Predicted seconds until it is here; None: unknown.
        """
        with self._lock:
            return self._traffic.asked(nbytes, self._clock())

    def ended(self, nbytes: int, outcome: Outcome) -> None:
        """A chunk that was asked for is here, or why not."""
        with self._lock:
            timed_out = outcome is Outcome.TIMEOUT
            self._traffic.ended(nbytes, self._clock(), came=outcome is Outcome.OK, timed_out=timed_out)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """A load waits for chunks of the tier; until it does no more, estimates count it."""
        with self._lock:
            self._traffic.transfers += 1
        try:
            yield
        finally:
            with self._lock:
                self._traffic.transfers -= 1

    def loaded(self, predicted_s: float | None, actual_s: float) -> None:
        """A load took so long, of whose last chunk ``predicted_s`` were told."""
        with self._lock:
            self._traffic.loaded(predicted_s, actual_s)

    def given_up(self, predicted_s: float | None, actual_s: float) -> None:
        """The same of one that waits no longer for chunks that are still on their way."""
        with self._lock:
            self._traffic.given_up(predicted_s, actual_s, self._clock())

    def stalled(self) -> None:
        """Nothing comes for long: what loads in vain have taught is not what a fetch costs."""
        with self._lock:
            self._traffic.stalled(self._clock())

    def answered(self, seconds: float) -> None:
        """A question took so long that brought no bytes."""
        with self._lock:
            self._traffic.cost.observe_latency(seconds)

    def came_alone(self, nbytes: int, seconds: float) -> None:
        """A chunk came within so long: news, if it is faster than believed. Slower it may be because it was alone."""
        with self._lock:
            cost, now = self._traffic.cost, self._clock()
            known = cost.estimate(now)
            if known is not None and seconds < known.seconds(1, nbytes):
                cost.observe(1, nbytes, seconds, now)
            cost.heard(nbytes, now)

    def unanswered(self, nbytes: int, seconds: float) -> None:
        """One that was to bring ``nbytes`` had no answer within so long: a fetch takes longer."""
        with self._lock:
            self._traffic.cost.observe(1, nbytes, seconds, self._clock(), at_least=True)
