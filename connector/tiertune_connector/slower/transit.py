"""What is on its way from one slower tier, as its threads report, and what a fetch costs meanwhile."""

import threading

from tiertune_connector.cost import FetchCost, FetchEstimate, Predicted, Traffic
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.units import Clock


class Transit:
    """Thread-safe. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._traffic = Traffic(FetchCost(now=clock()))

    def estimate(self, chunks: int = 0, nbytes: int = 0) -> FetchEstimate | None:
        """What a fetch costs now, behind all under way except its own ``chunks`` of ``nbytes`` together.

        None before anything was measured.
        """
        with self._lock:
            return self._traffic.estimate(self._clock(), chunks, nbytes)

    @property
    def chunk_bytes(self) -> float:
        """Mean size of recent chunks; 0 before the first."""
        with self._lock:
            return self._traffic.cost.chunk_bytes

    def silent_s(self, chunk_bytes: int) -> float:
        """Seconds since a chunk about as large came."""
        with self._lock:
            return self._traffic.cost.silent_s(self._clock(), chunk_bytes)

    def asked(self, nbytes: int) -> Predicted:
        """A chunk is on its way from now until ``ended``; both calls teach what a fetch costs.

        Returns the predicted seconds until it is here; None: unknown.
        """
        with self._lock:
            return self._traffic.asked(nbytes, self._clock())

    def ended(self, nbytes: int, outcome: Outcome) -> None:
        """A chunk that was asked for is here, or did not come."""
        with self._lock:
            timed_out = outcome is Outcome.TIMEOUT
            self._traffic.ended(nbytes, self._clock(), came=outcome is Outcome.OK, timed_out=timed_out)

    def awaited(self, loads: int) -> None:
        """So many ``loads`` more wait for the tier's chunks, or fewer: estimates count them."""
        with self._lock:
            self._traffic.transfers += loads

    def loaded(self, predicted_s: Predicted, actual_s: float) -> None:
        """A load took ``actual_s``; ``predicted_s`` was told of its last chunk."""
        with self._lock:
            self._traffic.loaded(predicted_s, actual_s)

    def given_up(self, predicted_s: Predicted, actual_s: float) -> None:
        """The same for a load that no longer waits for chunks still on their way."""
        with self._lock:
            self._traffic.given_up(predicted_s, actual_s, self._clock())

    def stalled(self) -> None:
        """Nothing comes for long: forget what loads that waited in vain taught, as it is not a fetch's cost."""
        with self._lock:
            self._traffic.stalled(self._clock())

    def answered(self, seconds: float) -> None:
        """A question that brought no bytes took ``seconds``."""
        with self._lock:
            self._traffic.cost.observe_latency(seconds)

    def came_alone(self, nbytes: int, seconds: float) -> None:
        """A chunk came alone in ``seconds``: that counts only if faster than believed; alone it may be slower."""
        with self._lock:
            cost, now = self._traffic.cost, self._clock()
            known = cost.estimate(now)
            if known is not None and seconds < known.seconds(1, nbytes):
                cost.observe(1, nbytes, seconds, now)
            cost.heard(nbytes, now)

    def took(self, nbytes: int, seconds: float, *, at_least: bool = False) -> None:
        """A chunk alone would take ``seconds``, or ``at_least`` so many."""
        with self._lock:
            self._traffic.cost.observe(1, nbytes, seconds, self._clock(), at_least=at_least)
