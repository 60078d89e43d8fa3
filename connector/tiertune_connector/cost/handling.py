"""What a chunk's handling takes beside its bytes, learned where chunks of several sizes come over one way. Pure."""

from math import log

SIZES = (0.0, *(float(1 << shift) for shift in range(14, 25)))
"""Bytes that come in the time of handling one chunk: nothing, or 16 KiB to 16 MiB."""
APART = 2.0
"""Chunks are of another size if they are so many times as large: less tells hardly more than noise."""
REMEMBERED = 0.95
"""What older pairs of samples keep of their weight with each new one: the last twenty count."""
SEEN = 2
"""Pairs that must agree: one of them may be a moment in which the way changed."""


class Handling:
    """Of two samples in turn with chunks of differing sizes, that handling is right with which both went equally fast.

    It is told in bytes (Hockney's half-performance length: chunks so long come at half of the way's speed), so a way
    that gets slower does so for chunks of every size. Only neighbours are compared: before older ones the way may have
    been another. It may be between neighbours too, but gets slower before small chunks as often as before large ones.
    """

    __slots__ = ("_errors", "_last", "_pairs", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0.0
        self._errors = [0.0] * len(SIZES)
        """Of the second of each pair as predicted by the first, older ones weighing less. Not squared: a median."""
        self._pairs = 0
        self._last: tuple[float, float] | None = None
        """Bytes and seconds of a chunk."""

    def learn(self, chunk_bytes: float, chunk_s: float) -> float:
        """A sample came at so much a chunk; how many times as large others have to be told that were learned before."""
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
