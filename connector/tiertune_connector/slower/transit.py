"""What is on its way from one slower tier, as its threads report, and what a fetch costs meanwhile.

The seconds of one load tell little if several share the way, as each contains parts of the others. The way as a whole
does not care whose a chunk is. So bytes are counted from when the way gets busy until it is quiet again; a long busy
time is cut into pieces, once enough has come that what is half done at both ends does not matter.
"""

import threading
from collections import Counter
from heapq import nlargest
from math import ceil

from tiertune_connector.cost import FetchCost, FetchEstimate, Predicted
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.units import Clock

FETCHED_AT_ONCE = 8
"""Chunks asked of a tier at once; the others wait."""
PIECE_CHUNKS = 2 * FETCHED_AT_ONCE
PIECE_S = 0.25


class Transit:
    """Thread-safe. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cost = FetchCost(now=clock())
        self._loads = 0
        """Waiting for any of the chunks."""
        self._chunks = self._bytes = 0
        """Under way."""
        self._sizes = Counter[int]()
        """How many of these chunks have each size, by bytes."""
        self._since = 0.0
        """When the present piece began; meaningless while the way is quiet."""
        self._came_chunks = self._came_bytes = 0
        self._lost_chunks = self._lost_bytes = 0
        """Those that timed out."""
        self._cut = False
        """Whether the present piece follows another: what came first in it was half done already."""

    def estimate(self, chunks: int = 0, nbytes: int = 0) -> FetchEstimate | None:
        """What a fetch asked for now costs; None before anything was measured.

        ``chunks`` of it, of ``nbytes`` together, are under way already, for others too: these it need not await.
        """
        with self._lock:
            now, before = self._clock(), max(0, self._chunks - chunks)
            loads = ceil(self._loads * before / self._chunks) if self._chunks else self._loads
            estimate = self._cost.estimate(now, 0.0, loads)
            if estimate is None or not before:
                return estimate
            queue_s = estimate.seconds(before, max(0, self._bytes - nbytes)) - estimate.t0_s
            return self._cost.estimate(now, queue_s, loads)

    @property
    def chunk_bytes(self) -> float:
        """Mean size of recent chunks; 0 before the first."""
        with self._lock:
            return self._cost.chunk_bytes

    def silent_s(self, chunk_bytes: int) -> float:
        """Seconds since a chunk about as large came."""
        with self._lock:
            return self._cost.silent_s(self._clock(), chunk_bytes)

    def asked(self, nbytes: int) -> Predicted:
        """A chunk is on its way from now until ``ended``, maybe behind others; both calls teach what a fetch costs.

        Returns the predicted seconds until all are here; None: unknown.
        """
        with self._lock:
            now = self._clock()
            if not self._chunks:
                self._begin(now)
            self._chunks += 1
            self._bytes += nbytes
            self._sizes[nbytes] += 1
            estimate = self._cost.estimate(now)
            return None if estimate is None else estimate.seconds(self._chunks, self._bytes)

    def ended(self, nbytes: int, outcome: Outcome) -> None:
        """A chunk that was asked for is here, or will not come; an immediate failure says nothing of speed."""
        with self._lock:
            now = self._clock()
            self._chunks -= 1
            self._bytes -= nbytes
            self._sizes -= {nbytes: 1}  # which forgets one at 0
            if outcome is Outcome.OK:
                self._came_chunks += 1
                self._came_bytes += nbytes
            elif outcome is Outcome.TIMEOUT:
                self._lost_chunks += 1
                self._lost_bytes += nbytes
            whole = self._came_chunks >= PIECE_CHUNKS and now - self._since >= PIECE_S
            if whole or not self._chunks:
                self._learn(now)

    def awaited(self, loads: int) -> None:
        """So many ``loads`` more wait for the tier's chunks, or fewer: estimates count them."""
        with self._lock:
            self._loads += loads

    def loaded(self, predicted_s: Predicted, actual_s: float) -> None:
        """A load took ``actual_s``; ``predicted_s`` was told of its last chunk."""
        with self._lock:
            if predicted_s is not None:
                self._cost.judge(predicted_s, actual_s)

    def given_up(self, predicted_s: Predicted, actual_s: float) -> None:
        """The same for a load that no longer waits for chunks still on their way: the largest may be half done."""
        with self._lock:
            if predicted_s is not None and actual_s > predicted_s:
                self._cost.judge(predicted_s, actual_s)
            if self._chunks:
                now = self._clock()
                half_done = nlargest(FETCHED_AT_ONCE, self._sizes.elements())
                chunks, most = self._came_chunks + len(half_done), self._came_bytes + sum(half_done)
                self._cost.observe(chunks, most, now - self._since, now, at_least=True)

    def stalled(self) -> None:
        """Nothing comes for long: forget what loads that waited in vain taught, as it is not a fetch's cost."""
        with self._lock:
            now = self._clock()
            self._cost = FetchCost(now=now)
            self._begin(now)

    def answered(self, seconds: float) -> None:
        """A question that brought no bytes took ``seconds``."""
        with self._lock:
            self._cost.observe_latency(seconds)

    def came_alone(self, nbytes: int, seconds: float) -> None:
        """A chunk came alone in ``seconds``: that counts only if faster than believed; alone it may be slower."""
        with self._lock:
            now = self._clock()
            known = self._cost.estimate(now)
            if known is not None and seconds < known.seconds(1, nbytes):
                self._cost.observe(1, nbytes, seconds, now)
            self._cost.heard(nbytes, now)

    def took(self, nbytes: int, seconds: float, *, at_least: bool = False) -> None:
        """A chunk alone would take ``seconds``, or ``at_least`` so many."""
        with self._lock:
            self._cost.observe(1, nbytes, seconds, self._clock(), at_least=at_least)

    def _begin(self, now: float) -> None:
        """Begin a piece."""
        self._since = now
        self._came_chunks = self._came_bytes = self._lost_chunks = self._lost_bytes = 0
        self._cut = self._chunks > 0

    def _learn(self, now: float) -> None:
        """What the piece that ends teaches."""
        if self._came_chunks and self._cut and self._came_chunks < PIECE_CHUNKS:
            pass  # the rest of a load: a few nearly arrived chunks look many times too fast
        elif self._came_chunks:
            self._cost.observe(self._came_chunks, self._came_bytes, now - self._since, now)
        elif self._lost_bytes:
            self._cost.observe(self._lost_chunks, self._lost_bytes, now - self._since, now, at_least=True)
        self._begin(now)
