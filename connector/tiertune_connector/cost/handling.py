"""The cost of handling a chunk, beside its bytes, learned from chunks of several sizes over one way. Pure."""

from math import log

SIZES = (0.0, *(float(1 << shift) for shift in range(14, 25)))
"""Bytes that come in the time of handling one chunk: nothing, or 16 KiB to 16 MiB."""
APART = 2.0
"""Ratio from which chunks count as of another size: less tells hardly more than noise."""
REMEMBERED = 0.95
"""Share of its weight that a pair of samples keeps with each new one: the last twenty count."""
SEEN = 2
"""Pairs that must agree: one of them may be a moment when the way changed."""


class Handling:
    """Finds the handling that makes two successive samples, with chunks of different sizes, equally fast.

    It is in bytes (Hockney's half-performance length: chunks so long come at half of the way's speed), so a way that
    gets slower does so for chunks of every size. Only neighbours are compared: for older samples the way may have been
    another. It may change between neighbours too, but gets slower before small chunks as often as before large ones.
    """

    __slots__ = ("_errors", "_last", "_pairs", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0.0
        self._errors = [0.0] * len(SIZES)
        """Errors in predicting each pair's second from its first, older ones weighing less. Not squared: a median."""
        self._pairs = 0
        self._last: tuple[float, float] | None = None
        """Bytes and seconds of a chunk."""

    def learn(self, chunk_bytes: float, chunk_s: float) -> float:
        """A sample came at ``chunk_s`` a chunk; returns the factor by which bandwidths learned before change."""
        last, self._last = self._last, (chunk_bytes, chunk_s)
        if last is None or 1.0 / APART < chunk_bytes / last[0] < APART:
            return 1.0
        slower, before = log(chunk_s / last[1]), self.nbytes
        for index, size in enumerate(SIZES):
            error = abs(slower - log((chunk_bytes + size) / (last[0] + size)))
            self._errors[index] = REMEMBERED * self._errors[index] + error
        self._pairs += 1
        if self._pairs >= SEEN:
            self.nbytes = SIZES[self._errors.index(min(self._errors))]
        return (last[0] + self.nbytes) / (last[0] + before)
