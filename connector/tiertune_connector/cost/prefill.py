"""Seconds that a prefill takes, learned from the steps that were seen: an overhead, and seconds per FLOP.

The feature is FLOPs, not tokens, because attention makes late tokens dearer than early ones. The FLOPs of the requests
in a step add up, so every step that prefills teaches, whoever shares it.

If the processor that prepares a step also computes it, overhead and FLOPs add up. A GPU computes while its work is
being launched, and reads all weights however few tokens there are: there a step takes the longer of the two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import frexp, log
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiertune_connector.cost.fetch import PLAUSIBLE_S, Predicted

Floats = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
Spans = Sequence[tuple[int, int]]
"""Tokens that a step computes, one span (first, end) per request."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its prefill cost depends on."""

    params: float
    """Parameters active per token."""
    layers: int
    """Layers with attention over the whole context."""
    width: int
    """Attention width: heads times head dimension."""

    def flops(self, h: Number, n: int) -> Number:
        """FLOPs of prefilling tokens ``h`` to ``n``: 2 P (n-h) + 2 L d (n² - h²)."""
        return 2 * self.params * (n - h) + 2 * self.layers * self.width * (n * n - h * h)


TOKENS_ONLY = ModelShape(params=0.5, layers=0, width=0)
"""For an engine that cannot tell its shape: one "FLOP" per token, so that the cost is overhead + seconds per token."""

Sums = Sequence[float]
"""Over observations: 1, w, w x, w y, w x², w x y, w y²; x FLOPs, y seconds, w weight."""
NOTHING: Sums = (0.0,) * 7
RIDGE = 1e-3
"""Weight, relative to the data, of the point (0 FLOPs, prior overhead): it sets the line while all steps are alike."""
EARLY = 0.1
"""Weight of the steps before the cost is known: an engine's first ones are slow (compilation, cold memory)."""
FADE = 0.05
"""Weight left to what was learned before the engine's speed changed."""
FORGOTTEN = 1e-6
"""A size with fewer steps than this (counts fade) is dropped, before anything is divided by zero."""
DECAY = 0.9
"""Weight that a step keeps with each new one of its size."""
MIN_SAMPLES = 3
"""Steps until the cost is known."""
OUTLIER = 3.0
"""A step that took over this many times its prediction, or less than the prediction divided by it, is held back."""
TOLERANCE = 0.05
"""A line whose relative error is no larger is not replaced."""
EXACT = 1e-9
"""Mean square of errors that come from rounding."""
REACH = 8.0
"""The line is believed up to this many times the FLOPs of the largest step seen."""


class PrefillCost:
    """Online estimate by weighted least squares of relative errors, over steps of all sizes.

    It is a line, overhead + seconds per FLOP, unless the longer of the two explains the steps better.

    An error counts in proportion to the step's own seconds, so a step that was slow by accident (warm-up, compilation)
    hardly counts. Each power of two of FLOPs forgets by itself: a thousand small steps leave what large ones taught.

    A step of a size seen before that took more than ``OUTLIER`` times (or less than that part of) its prediction is
    held back until the next one agrees with it: one hiccup changes nothing, a real change is followed from its second
    step on.

    The line is not believed beyond ``REACH`` times the FLOPs of the largest step seen: a prefill costs no more than
    that, however long. This may be too little: then a fetch that would pay is declined once, but that prefill is seen,
    and the cost known. Too much would stay for ever: what is fetched never shows what computing it would take.
    """

    def __init__(
        self,
        shape: ModelShape = TOKENS_ONLY,
        *,
        overhead_s: float = 0.0,
        seconds_per_flop: float | None = None,
        step_tokens: int = 0,
        decode_tokens: int = 1,
    ) -> None:
        """``overhead_s`` and ``seconds_per_flop`` are the prior; without the latter the cost is unknown at first.

        ``step_tokens`` is the most that the engine computes in one step (0: a whole prompt): a longer prefill pays
        the overhead again and again. ``decode_tokens`` is the most of one request that may be decode (more than 1 with
        speculation).
        """
        self.shape = shape
        self.samples = 0
        self._overhead_s = self._prior_overhead_s = overhead_s
        self._per_flop = seconds_per_flop
        self._hidden = False
        """Whether a step takes the longer of overhead and FLOPs, instead of their sum."""
        self.step_tokens, self._decode_tokens = step_tokens, decode_tokens
        self._sizes: dict[int, Sums] = {}  # by the binary exponent of the FLOPs
        self._largest = 0.0
        self._held: tuple[int, float, float] | None = None  # surprise, FLOPs, seconds

    @property
    def line(self) -> tuple[float, float] | None:
        """Overhead of a step (if FLOPs hide it: the least that one takes), and seconds per FLOP; None: unknown."""
        return None if self._per_flop is None else (self._overhead_s, self._per_flop)

    @property
    def added_s(self) -> float:
        """Overhead that each step of a long prefill adds to its FLOPs; 0 if they hide it."""
        return 0.0 if self._hidden else self._overhead_s

    def seconds(self, h: int, n: int) -> Predicted:
        """Predicted seconds of prefilling tokens ``h`` to ``n``; None: unknown."""
        return self.work_s(self.shape.flops(h, n), n - h)

    def work_s(self, flops: float, tokens: int, requests: int = 1) -> Predicted:
        """Predicted seconds of prefilling ``tokens`` of several ``requests``, ``flops`` in all; None: unknown.

        Short requests share their steps.
        """
        if self._per_flop is None:
            return None
        steps = max(1.0, tokens / self.step_tokens) if self.step_tokens else 1.0
        if self.samples >= MIN_SAMPLES:
            flops = min(flops, REACH * self._largest * max(steps, requests))
        return self._both(self._overhead_s * steps, self._per_flop * flops)

    def each_s(self, h: Floats, n: int) -> Floats | None:
        """`seconds` for each ``h``."""
        if self._per_flop is None:
            return None
        steps = np.maximum(1.0, (n - h) / self.step_tokens) if self.step_tokens else 1.0
        flops = self.shape.flops(h, n)
        if self.samples >= MIN_SAMPLES:
            flops = np.minimum(flops, REACH * self._largest * steps)
        form = np.maximum if self._hidden else np.add
        seconds: Floats = form(self._overhead_s * steps, self._per_flop * flops)
        return seconds

    def observe_step(self, spans: Spans, seconds: float) -> None:
        """A step computed the tokens ``spans`` (first, end), one span per request, in ``seconds``.

        It teaches if at least half of its tokens are of spans longer than a decode's: decoding is bound by memory, not
        by FLOPs. Implausible seconds are ignored.
        """
        if not self._prefills(spans) or not PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            return
        flops = sum(self.shape.flops(first, end) for first, end in spans)
        if flops <= 0:
            return
        held, self._held = self._held, None
        if surprise := self._surprise(flops, seconds):
            if held is None or held[0] != surprise:
                self._held = (surprise, flops, seconds)
                return
            self._follow(self._step_s(held[1]) + self._step_s(flops), held[2] + seconds)
            self._add(*held[1:])
        self._add(flops, seconds)
        if self.samples >= MIN_SAMPLES:
            self._solve()

    def _prefills(self, spans: Spans) -> bool:
        tokens = [end - first for first, end in spans]
        prefill = sum(each for each in tokens if each > self._decode_tokens)
        return prefill >= max(sum(tokens) - prefill, 1)

    def _both(self, overhead_s: float, computing_s: float) -> float:
        return max(overhead_s, computing_s) if self._hidden else overhead_s + computing_s

    def _step_s(self, flops: float) -> float:
        return self._both(self._overhead_s, (self._per_flop or 0.0) * flops)

    def _expected(self, flops: float) -> Predicted:
        """Predicted seconds of a step whose size was seen before; else None."""
        seen = self._sizes.get(frexp(flops)[1], NOTHING)[0]
        known = seen >= 1 and self.samples >= MIN_SAMPLES
        return self._step_s(flops) if known else None

    def _surprise(self, flops: float, seconds: float) -> int:
        """1 for a step far slower than predicted, -1 for one far faster, else 0, also for a size that was not seen."""
        predicted = self._expected(flops)
        if predicted is None:
            return 0
        return (seconds > predicted * OUTLIER) - (seconds < predicted / OUTLIER)

    def _follow(self, predicted_s: float, seconds: float) -> None:
        """Two steps, together predicted to take ``predicted_s``, took ``seconds``: the engine's speed has changed.

        What was learned is scaled to the new speed, and weighs little from now on.
        """
        slower = seconds / predicted_s
        light, heavy = FADE / slower**2, FADE / slower
        factors = (FADE, light, light, heavy, light, heavy, FADE)
        self._sizes = {
            size: [factor * value for factor, value in zip(factors, sums, strict=True)]
            for size, sums in self._sizes.items()
            if sums[0] > FORGOTTEN
        }
        self._overhead_s *= slower
        self._per_flop = slower * (self._per_flop or 0.0)

    def _add(self, flops: float, seconds: float) -> None:
        trust = 1.0 if self.samples >= MIN_SAMPLES else EARLY
        weight = trust / max(seconds, self._expected(flops) or 0.0) ** 2
        x, y = weight * flops, weight * seconds
        new = (trust, weight, x, y, x * flops, x * seconds, y * seconds)
        size = frexp(flops)[1]
        old = self._sizes.get(size, NOTHING)
        self._sizes[size] = [DECAY * value + more for value, more in zip(old, new, strict=True)]
        self._largest = max(self._largest, flops)
        self.samples += 1

    def _solve(self) -> None:
        sizes = [self._sizes[size] for size in sorted(self._sizes)]
        sums = [sum(column) for column in zip(*sizes, strict=True)]
        line, count = _added(sums, self._prior_overhead_s), sums[0]
        off = line.error / count
        best = min(_hidden(sizes), default=line) if off > TOLERANCE**2 else line
        left = max(best.error / count, EXACT)
        # The hidden fit has one parameter more, the first large size: Schwarz's criterion (1978), or Akaike's.
        # Once believed it stays as long as it explains more: if neither is right they would take turns.
        enough = 0.0 if self._hidden else max(log(count), 2.0)
        self._hidden = left < off and count * log(off / left) > enough
        _, self._overhead_s, self._per_flop = best if self._hidden else line


class _Fit(NamedTuple):
    error: float
    """Weighted sum of squared errors."""
    overhead_s: float
    per_flop: float


def _error(sums: Sums, overhead_s: float, per_flop: float) -> float:
    _, w, x, y, xx, xy, yy = sums
    twice = 2 * (overhead_s * y + per_flop * xy - overhead_s * per_flop * x)
    return yy - twice + overhead_s**2 * w + per_flop**2 * xx


def _added(sums: Sums, prior_overhead_s: float) -> _Fit:
    """The line of least squares with both terms at least zero."""
    _, seen_w, x, seen_y, xx, xy, _ = sums
    w, y = (1 + RIDGE) * seen_w, seen_y + RIDGE * seen_w * prior_overhead_s
    slope = (w * xy - x * y) / (w * xx - x * x)
    overhead = (y - slope * x) / w
    if slope <= 0:
        slope, overhead = 0.0, y / w
    elif overhead < 0:
        slope, overhead = xy / xx, 0.0
    return _Fit(_error(sums, overhead, slope), overhead, slope)


def _hidden(sizes: Sequence[Sums]) -> Iterator[_Fit]:
    """Fits: small steps take the overhead, large ones their FLOPs; one per border of the two that the fit confirms."""
    columns = list(zip(*sizes, strict=True))
    small = zip(*map(accumulate, columns), strict=True)
    large = list(zip(*(accumulate(reversed(column)) for column in columns), strict=True))
    for short, long, last, first in zip(small, large[-2::-1], sizes, sizes[1:], strict=False):
        overhead, slope = short[3] / short[1], long[5] / long[4]
        if slope * last[2] <= overhead * last[1] and overhead * first[1] <= slope * first[2]:
            yield _Fit(_error(short, overhead, 0.0) + _error(long, 0.0, slope), overhead, slope)
