"""Seconds that a fetch from a tier takes, learned from loads and probes: t0 + per chunk + bytes / bandwidth + queue."""

from math import exp, frexp, inf, log, sqrt

import msgspec

PLAUSIBLE_S = (1e-9, 1e9)
"""Seconds outside this range are a clock's mistake and teach nothing."""
MEMORIES_S = (0.0, 10.0, 100.0, 1000.0)
"""Seconds in which a bandwidth drifts as far as one sample errs: 0 believes only the newest sample."""
REMEMBERED = 0.95
"""Share of its weight that an error keeps with each new one: the last twenty count."""
JUDGED = 0.1
"""Weight of a load's error among those before it."""
CHANGE = log(2.0)
CHANGE_DOUBTS = 4.0
"""A sample so many times further off than predictions usually are, and by a factor of two at least: the way changed."""
SURPRISE = log(10.0)
"""Most that one sample moves a belief: what is further off must be seen twice."""
STALE_S = 60.0
"""Silence after which doubt grows."""
SIZES = (0.0, *(float(1 << shift) for shift in range(14, 25)))
"""Bytes that come in the time of handling one chunk: nothing, or 16 KiB to 16 MiB."""
APART = 2.0
"""Ratio from which chunks count as of another size: less tells hardly more than noise."""
SEEN = 2
"""Pairs that must agree: one of them may be a moment when the way changed."""
DOUBT_AT_FIRST = 0.3
DOUBT_AT_MOST = 2.0

Predicted = float | None
"""Seconds; None: unknown."""


class FetchEstimate(msgspec.Struct, frozen=True):
    """What a tier costs now; goes over the wire with every lookup."""

    t0_s: float
    """Seconds before the first byte."""
    per_chunk_s: float
    """Seconds of handling per chunk, beside its bytes."""
    bytes_per_s: float
    queue_s: float = 0.0
    """Seconds of transfers waiting ahead of this one."""
    age_s: float = 0.0
    """Seconds since the newest observation."""
    samples: int = 0
    """Observations behind it; 0: a prior alone."""
    doubt: float = 0.0
    """Standard error of the predicted seconds' logarithm: with 0.4 they are a third off, either way."""
    transfers: int = 0
    """Loads waiting for the tier's chunks: how many share the way with this one."""

    def seconds(self, chunks: int, nbytes: int) -> float:
        """Predicted seconds of fetching ``chunks`` of together ``nbytes``; nothing takes no time."""
        if not chunks:
            return 0.0
        return self.queue_s + self.t0_s + self.per_chunk_s * chunks + nbytes / self.bytes_per_s

    def speed(self, chunk_bytes: float) -> float:
        """Bytes per second of many chunks of this size, their handling included."""
        if not chunk_bytes:
            return self.bytes_per_s
        return chunk_bytes / (self.per_chunk_s + chunk_bytes / self.bytes_per_s)


class Handling:
    """Finds the handling that makes two successive samples, with chunks of different sizes, equally fast.

    It is in bytes (Hockney's half-performance length: chunks so long come at half of the way's speed), so a way that
    gets slower does so for chunks of every size. Only neighbours are compared: for older samples the way may have been
    another. It may change between neighbours too, but gets slower before small chunks as often as before large ones.
    """

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


class FetchCost:
    """The bandwidth of one tier, from every load and probe; its latency from probes of hardly any bytes.

    In practice no line through loads of more and fewer chunks separates the two: after a slowdown, probes of one chunk
    and older loads of many lie on a line by which large loads are still fast, and loads cut off at one deadline look
    like latency alone. So every load, of whatever size, gives a bandwidth sample from its seconds beyond the latency.
    The handling of a chunk is learned when chunks of another size come, another model's or a probe's (`Handling`), as
    bytes that would take as long, so that a tier believed slower is slower for every size.

    How far to trust a new sample depends on why samples differ: the bandwidth moves, or noise. Nobody knows beforehand,
    so several beliefs are held at once, each a Kalman filter of the logarithm as a random walk; the one that predicted
    the last samples best is believed. Its errors are the doubt.
    """

    def __init__(
        self,
        *,
        t0_s: float | None = None,
        bytes_per_s: float | None = None,
        now: float = 0.0,
    ) -> None:
        """``t0_s`` is fixed if given, and handling takes nothing; else both are learned.

        ``bytes_per_s`` is the nominal bandwidth; without it the cost is unknown until the first observation.
        """
        self.samples = 0
        self._learns, self._t0_s = t0_s is None, t0_s or 0.0
        self._handling = Handling()
        self._latency_seen = False
        self._updated = now
        self._heard: dict[int, float] = {}
        """When chunks last came, by the power of two above their bytes."""
        self._came = 0.0, 0.0
        """Chunks and bytes, older ones weighing less."""
        self._beliefs = [] if bytes_per_s is None else _beliefs(log(bytes_per_s))
        self._weight = 1.0
        self._missed = 0.0
        """Mean squared error of loads' predictions, older ones weighing less."""
        self._believe()

    def observe(self, chunks: int, nbytes: int, seconds: float, now: float, *, at_least: bool = False) -> None:
        """A load or probe of ``chunks``, together ``nbytes``, took ``seconds`` and ended at time ``now``.

        ``at_least``: it was given up then, which teaches nothing unless it was slower than believed.
        """
        if chunks <= 0 or nbytes <= 0 or not PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            return
        if self._learns:
            self._t0_s = min(self._t0_s, 0.9 * seconds)
        transfer_s = max(seconds - self._t0_s, 0.1 * seconds)
        if self._learns and not at_least:
            self._handle(chunks, nbytes, transfer_s)
            self.heard(nbytes / chunks, now)
        bytes_per_s = (nbytes + self._handling.nbytes * chunks) / transfer_s
        if at_least and self._bytes_per_s is not None and bytes_per_s >= self._bytes_per_s:
            return
        self._learn(log(bytes_per_s), max(0.0, now - self._updated))
        self.samples += 1
        self._updated = max(now, self._updated)

    def judge(self, predicted_s: float, actual_s: float) -> None:
        """A load took ``actual_s``; ``predicted_s`` was the prediction when it began, whatever else shared its way."""
        if PLAUSIBLE_S[0] <= min(predicted_s, actual_s) and max(predicted_s, actual_s) <= PLAUSIBLE_S[1]:
            error = min(abs(log(actual_s / predicted_s)), SURPRISE)
            self._missed += JUDGED * (error * error - self._missed)
            self._believe()

    def observe_latency(self, seconds: float) -> None:
        """A probe of hardly any bytes took ``seconds``: less is believed at once, more only gradually.

        A probe may have waited for a busy link, but none is faster than the round trip.
        """
        if self._learns and PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            known = self._latency_seen and seconds > self._t0_s
            self._t0_s += (0.2 if known else 1.0) * (seconds - self._t0_s)
            self._latency_seen = True

    @property
    def chunk_bytes(self) -> float:
        """Mean size of recent chunks; 0 before the first."""
        return self._came[1] / self._came[0] if self._came[0] else 0.0

    def age_s(self, now: float) -> float:
        """Seconds since the newest observation."""
        return max(0.0, now - self._updated)

    def heard(self, chunk_bytes: float, now: float) -> None:
        """A chunk came, whatever it taught."""
        self._heard[_size(chunk_bytes)] = max(now, self._updated)

    def silent_s(self, now: float, chunk_bytes: float) -> float:
        """Seconds since a chunk about as large came; infinite before one."""
        return max(0.0, now - self._heard.get(_size(chunk_bytes), -inf))

    def estimate(self, now: float, queue_s: float = 0.0, transfers: int = 0) -> FetchEstimate | None:
        """What a fetch costs at ``now``, behind ``queue_s`` of bytes that ``transfers`` wait for; None: unknown."""
        if self._bytes_per_s is None:
            return None
        age_s = self.age_s(now)
        doubt = self._doubt if age_s <= STALE_S else self._doubt * sqrt(age_s / STALE_S)
        return FetchEstimate(
            self._t0_s,
            self._handling.nbytes / self._bytes_per_s,
            self._bytes_per_s,
            queue_s,
            age_s,
            self.samples,
            min(doubt, DOUBT_AT_MOST),
            transfers,
        )

    def _handle(self, chunks: int, nbytes: int, seconds: float) -> None:
        """Learn the handling; if it changes, keep what is believed of chunks as large as those before."""
        self._came = REMEMBERED * self._came[0] + chunks, REMEMBERED * self._came[1] + nbytes
        factor = self._handling.learn(nbytes / chunks, seconds / chunks)
        if factor != 1.0:
            for belief in self._beliefs:
                belief.level += log(factor)
            self._believe()

    def _learn(self, sample: float, elapsed_s: float) -> None:
        if not self._beliefs:
            self._beliefs = _beliefs(sample)
        else:
            changed = abs(sample - log(self._bytes_per_s or 1.0)) > max(CHANGE, CHANGE_DOUBTS * self._doubt)
            self._weight = REMEMBERED * self._weight + 1.0
            self._missed *= REMEMBERED  # if nothing is loaded any more, probes restore confidence
            for belief in self._beliefs:
                belief.learn(sample, elapsed_s, changed=changed)
        self._believe()

    def _believe(self) -> None:
        self._bytes_per_s: float | None = None
        self._doubt = DOUBT_AT_FIRST
        if self._beliefs:
            best = min(self._beliefs, key=lambda belief: belief.errors)
            self._bytes_per_s = exp(best.level)
            self._doubt = sqrt(max(best.errors / self._weight, self._missed))


class _Belief:
    """A Kalman filter of one random walk, and how well it predicted."""

    def __init__(self, memory_s: float, level: float) -> None:
        self.level = level
        self.errors = DOUBT_AT_FIRST**2
        """Sum of the squared errors of its predictions, older ones weighing less."""
        self._memory_s = memory_s
        self._spread_s = memory_s
        """Its own variance, in seconds of drift."""

    def learn(self, sample: float, elapsed_s: float, *, changed: bool) -> None:
        """Correct the level by a sample ``elapsed_s`` after the last; ``changed``: forget all before it."""
        error = max(-SURPRISE, min(SURPRISE, sample - self.level))
        self.errors = REMEMBERED * self.errors + error * error
        if changed:
            self._spread_s = self._memory_s
            self.level += error
            return
        spread_s = self._spread_s + elapsed_s
        total_s = spread_s + self._memory_s
        gain = spread_s / total_s if total_s else 1.0
        self._spread_s = gain * self._memory_s
        self.level += gain * error


def _size(chunk_bytes: float) -> int:
    return frexp(chunk_bytes)[1]


def _beliefs(level: float) -> list[_Belief]:
    return [_Belief(memory_s, level) for memory_s in MEMORIES_S]
