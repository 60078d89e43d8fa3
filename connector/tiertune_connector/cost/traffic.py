"""Traffic of one way as a whole: how fast it is while busy, and how long it will stay busy. Pure.

The seconds of one load tell little if several share the way, as each contains parts of the others. The way as a whole
does not care whose a chunk is. So bytes are counted from when the way gets busy until it is quiet again; a long busy
time is cut into pieces, once enough has come that what is half done at both ends does not matter.
"""

from collections import Counter
from heapq import nlargest
from math import ceil

from tiertune_connector.cost.fetch import FetchCost, FetchEstimate, Predicted

FETCHED_AT_ONCE = 8
"""Chunks asked of a tier at once; the others wait."""
PIECE_CHUNKS = 2 * FETCHED_AT_ONCE
PIECE_S = 0.25


class Traffic:
    """Chunks under way on one tier, and the fetch cost that they teach."""

    def __init__(self, cost: FetchCost) -> None:
        self.cost = cost
        self.transfers = 0
        """Loads waiting for any of the chunks."""
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

    def asked(self, nbytes: int, now: float) -> Predicted:
        """A chunk of ``nbytes`` is wanted, maybe behind others; predicted seconds until all are here, if known."""
        if not self._chunks:
            self._begin(now)
        self._chunks += 1
        self._bytes += nbytes
        self._sizes[nbytes] += 1
        estimate = self.cost.estimate(now)
        return None if estimate is None else estimate.seconds(self._chunks, self._bytes)

    def ended(self, nbytes: int, now: float, *, came: bool, timed_out: bool = False) -> None:
        """A chunk that was asked for is here, or will not come; an immediate failure says nothing of speed."""
        self._chunks -= 1
        self._bytes -= nbytes
        self._sizes[nbytes] -= 1
        if not self._sizes[nbytes]:
            del self._sizes[nbytes]
        if came:
            self._came_chunks += 1
            self._came_bytes += nbytes
        elif timed_out:
            self._lost_chunks += 1
            self._lost_bytes += nbytes
        whole = self._came_chunks >= PIECE_CHUNKS and now - self._since >= PIECE_S
        if whole or not self._chunks:
            self._learn(now)

    def loaded(self, predicted_s: Predicted, actual_s: float) -> None:
        """A load took ``actual_s``; ``predicted_s`` was predicted for its last chunk."""
        if predicted_s is not None:
            self.cost.judge(predicted_s, actual_s)

    def given_up(self, predicted_s: Predicted, actual_s: float, now: float) -> None:
        """A load waited in vain for chunks still under way, the largest of which may be half done."""
        if predicted_s is not None and actual_s > predicted_s:
            self.cost.judge(predicted_s, actual_s)
        if self._chunks:
            sizes = [size for size, count in self._sizes.items() for _ in range(min(count, FETCHED_AT_ONCE))]
            half_done = nlargest(FETCHED_AT_ONCE, sizes)
            chunks, most = self._came_chunks + len(half_done), self._came_bytes + sum(half_done)
            self.cost.observe(chunks, most, now - self._since, now, at_least=True)

    def stalled(self, now: float) -> None:
        """Nothing came for long, and loads waited in vain: forget what that taught, as it is not a fetch's cost."""
        self.cost = FetchCost(now=now)
        self._begin(now)
        self._cut = self._chunks > 0

    def estimate(self, now: float, chunks: int = 0, nbytes: int = 0) -> FetchEstimate | None:
        """What a fetch asked for now costs; None: unknown.

        ``chunks`` of it, of ``nbytes`` together, are under way already, for others too: these it need not await.
        """
        before = max(0, self._chunks - chunks)
        transfers = ceil(self.transfers * before / self._chunks) if self._chunks else self.transfers
        estimate = self.cost.estimate(now, 0.0, transfers)
        if estimate is None or not before:
            return estimate
        queue_s = estimate.seconds(before, max(0, self._bytes - nbytes)) - estimate.t0_s
        return self.cost.estimate(now, queue_s, transfers)

    def _begin(self, now: float) -> None:
        self._since = now
        self._came_chunks = self._came_bytes = self._lost_chunks = self._lost_bytes = 0

    def _learn(self, now: float) -> None:
        if self._came_chunks and self._cut and self._came_chunks < PIECE_CHUNKS:
            pass  # the rest of a load: a few nearly arrived chunks look many times too fast
        elif self._came_chunks:
            self.cost.observe(self._came_chunks, self._came_bytes, now - self._since, now)
        elif self._lost_bytes:
            self.cost.observe(self._lost_chunks, self._lost_bytes, now - self._since, now, at_least=True)
        self._begin(now)
        self._cut = self._chunks > 0
