"""Seconds that a fetch from a tier takes, learned from loads and probes: t0 + per chunk + bytes / bandwidth + queue."""

import msgspec

PLAUSIBLE_S = (1e-9, 1e9)
"""Seconds outside are a clock's mistake and teach nothing."""


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
    """EWMA of one tier's bandwidth; its latency from probes of hardly any bytes.

    No line through loads of different sizes tells the two apart in practice: after a slowdown, probes of one chunk and
    older loads of many lie on one that says large loads are still fast, and loads cut off at one deadline look like
    latency alone. So every load, of whatever size, gives a bandwidth sample: what its seconds are beyond the latency.
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
        self._latency_seen = False
        self._updated = now

    def observe(self, chunks: int, nbytes: int, seconds: float, now: float) -> None:
        """A load or probe took ``seconds``, or was cut off after them with so much done, at time ``now``."""
        if chunks <= 0 or nbytes <= 0 or not PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            return
        transfer_s = max(seconds - self._per_chunk_s * chunks, 0.1 * seconds)
        if self._learn_t0:
            self._t0_s = min(self._t0_s, 0.9 * transfer_s)
        sample = nbytes / max(transfer_s - self._t0_s, 0.1 * transfer_s)
        if self._bytes_per_s is None:
            self._bytes_per_s = sample
        else:
            weight = self._weight(sample < self._bytes_per_s, now)
            self._bytes_per_s = (1.0 - weight) * self._bytes_per_s + weight * sample
        self.samples += 1
        self._updated = now

    def observe_latency(self, seconds: float) -> None:
        """A probe of hardly any bytes took ``seconds``: less is believed at once, more by and by.

        A probe may have waited for a busy link, but none is faster than the way there and back.
        """
        if self._learn_t0 and PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            known = self._latency_seen and seconds > self._t0_s
            self._t0_s += (0.2 if known else 1.0) * (seconds - self._t0_s)
            self._latency_seen = True

    def age_s(self, now: float) -> float:
        """Seconds since the newest observation."""
        return max(0.0, now - self._updated)

    def estimate(self, now: float, queue_s: float = 0.0) -> FetchEstimate | None:
        """What a fetch costs at ``now`` behind ``queue_s`` of waiting transfers; None: unknown."""
        if self._bytes_per_s is None:
            return None
        return FetchEstimate(self._t0_s, self._per_chunk_s, self._bytes_per_s, queue_s, self.age_s(now), self.samples)

    def _weight(self, slower: bool, now: float) -> float:
        alpha = self._slower_alpha if slower else self._alpha
        silence = (now - self._updated) / self._stale_s
        return alpha if silence <= 1 else 1.0 - (1.0 - alpha) ** silence
