"""Seconds that a fetch from a tier takes, learned from loads and probes: t0 + per chunk + bytes / bandwidth + queue."""

import msgspec

PLAUSIBLE_S = (1e-9, 1e9)
"""Seconds outside are a clock's mistake and teach nothing."""
TELLING_RATIO = 4.0
"""Two loads tell latency from bandwidth if one has at least this many times the other's bytes."""


class FetchEstimate(msgspec.Struct, frozen=True):
    """What a tier costs now; goes over the wire with every lookup."""

    t0_s: float
    """Seconds before the first byte."""
    per_chunk_s: float
    """Seconds of handling per chunk, beside its bytes."""
    bytes_per_s: float
    queue_s: float = 0.0
    """Seconds of transfers that wait before this one."""
    age_s: float = 0.0
    """Seconds since the newest observation."""
    samples: int = 0
    """Observations behind it; 0: a prior alone."""

    def seconds(self, chunks: int, nbytes: int) -> float:
        """Predicted seconds of fetching ``chunks`` of together ``nbytes``; nothing takes no time."""
        if not chunks:
            return 0.0
        return self.queue_s + self.t0_s + self.per_chunk_s * chunks + nbytes / self.bytes_per_s


class FetchCost:
    """EWMA of one tier's bandwidth, and slowly of its latency.

    A least-squares line is not used: after a slowdown, probes of one chunk and older loads of many lie on a line that
    says large loads are still fast. Instead every observation, of whatever size, gives a bandwidth sample (what is left
    of its seconds after latency), and latency is learned from pairs of a small and a large load.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        slower_alpha: float = 0.8,
        t0_s: float | None = None,
        per_chunk_s: float = 0.0,
        bytes_per_s: float | None = None,
        stale_s: float = 60.0,
        now: float = 0.0,
    ) -> None:
        """``alpha`` is the weight of a new sample, ``slower_alpha`` of one worse than the estimate (in doubt: off).

        ``t0_s`` given is held fixed, else it is learned. ``bytes_per_s`` is the nominal bandwidth; without it the cost
        is unknown until the first observation. After more than ``stale_s`` of silence a new sample weighs more.
        """
        self.samples = 0
        self._alpha, self._slower_alpha, self._stale_s = alpha, slower_alpha, stale_s
        self._learn_t0, self._t0_s = t0_s is None, t0_s or 0.0
        self._per_chunk_s, self._bytes_per_s = per_chunk_s, bytes_per_s
        self._updated = now
        self._previous: tuple[int, float, float] | None = None  # bytes, seconds without per-chunk part, time

    def observe(self, chunks: int, nbytes: int, seconds: float, now: float, *, whole: bool = True) -> None:
        """A load or probe of ``chunks`` took ``seconds`` at time ``now``.

        Not ``whole``: it was cut off after that time, with so much done. That tells of bandwidth, but nothing of
        latency: two loads of different sizes that end at one deadline would look like latency alone.
        """
        if chunks <= 0 or nbytes <= 0 or not PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            return
        transfer_s = max(seconds - self._per_chunk_s * chunks, 0.1 * seconds)
        if self._learn_t0 and whole:
            self._learn_latency(nbytes, transfer_s, now)
        sample = nbytes / max(transfer_s - self._t0_s, 0.1 * transfer_s)
        if self._bytes_per_s is None:
            self._bytes_per_s = sample
        else:
            weight = self._weight(sample < self._bytes_per_s, now)
            self._bytes_per_s = (1.0 - weight) * self._bytes_per_s + weight * sample
        self.samples += 1
        self._updated = now

    def estimate(self, now: float, queue_s: float = 0.0) -> FetchEstimate | None:
        """What a fetch costs at ``now`` behind ``queue_s`` of waiting transfers; None: unknown."""
        if self._bytes_per_s is None:
            return None
        age_s = max(0.0, now - self._updated)
        return FetchEstimate(self._t0_s, self._per_chunk_s, self._bytes_per_s, queue_s, age_s, self.samples)

    def _weight(self, slower: bool, now: float) -> float:
        alpha = self._slower_alpha if slower else self._alpha
        silence = (now - self._updated) / self._stale_s
        return alpha if silence <= 1 else 1.0 - (1.0 - alpha) ** silence

    def _learn_latency(self, nbytes: int, transfer_s: float, now: float) -> None:
        """Move t0 a fifth of the way to where the line through this and the previous telling load meets 0 bytes."""
        self._t0_s = min(self._t0_s, 0.9 * transfer_s)
        previous = self._previous
        if previous is not None and now - previous[2] <= self._stale_s:
            (small, small_s), (large, large_s) = sorted([(nbytes, transfer_s), previous[:2]])
            if large < TELLING_RATIO * small:
                return
            seconds_per_byte = (large_s - small_s) / (large - small)
            if seconds_per_byte > 0:
                self._t0_s += 0.2 * (max(0.0, small_s - seconds_per_byte * small) - self._t0_s)
        self._previous = (nbytes, transfer_s, now)
