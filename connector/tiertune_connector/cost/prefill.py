"""Seconds that a prefill takes, learned from the steps that were seen: overhead + seconds per FLOP.

FLOPs and not tokens are the feature, because attention makes late tokens dearer than early ones.
"""

from dataclasses import dataclass

from tiertune_connector.cost.fetch import PLAUSIBLE_S


@dataclass(frozen=True)
class ModelShape:
    """What of a model its prefill cost depends on."""

    params: float
    """Parameters active per token."""
    layers: int
    """Layers with attention over the whole context."""
    width: int
    """Attention width: heads times head dimension."""
    kv_bytes: int
    """Bytes of KV per token, all layers."""

    def flops(self, h: int, n: int) -> float:
        """Of prefilling tokens ``h`` to ``n``: 2 P (n-h) + 2 L d (n² - h²)."""
        return 2 * self.params * (n - h) + 2 * self.layers * self.width * (n * n - h * h)


TOKENS_ONLY = ModelShape(params=0.5, layers=0, width=0, kv_bytes=0)
"""For an engine that cannot tell its shape: one "FLOP" per token, so that the cost is overhead + seconds per token."""


class PrefillCost:
    """Online estimate: exponentially weighted least squares, with one weak pseudo-observation of the overhead.

    A step that took more than ``outlier`` times (or less than that part of) its prediction is held back until the
    next one agrees with it: one hiccup changes nothing, a real change is followed from its second step on.
    """

    def __init__(
        self,
        shape: ModelShape = TOKENS_ONLY,
        *,
        overhead_s: float = 0.0,
        seconds_per_flop: float | None = None,
        decay: float = 0.95,
        min_samples: int = 3,
        outlier: float = 3.0,
    ) -> None:
        """``overhead_s`` and ``seconds_per_flop`` are the prior; without the latter the cost is unknown at first.

        ``decay`` is the weight that an observation keeps with each new one; ``min_samples`` end the unknown time.
        """
        self.shape = shape
        self.samples = 0
        self._overhead_s = self._prior_overhead_s = overhead_s
        self._per_flop = seconds_per_flop
        self._decay, self._min_samples, self._outlier = decay, min_samples, outlier
        self._held: tuple[int, float, float] | None = None  # surprise, FLOPs, seconds
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._per_flop is not None

    @property
    def overhead_s(self) -> float:
        """Seconds of a step whatever its length."""
        return self._overhead_s

    @property
    def seconds_per_flop(self) -> float | None:
        return self._per_flop

    def seconds(self, h: int, n: int, backlog_s: float = 0.0) -> float | None:
        """Predicted seconds until tokens ``h`` to ``n`` are prefilled behind ``backlog_s`` of work; None: unknown."""
        if self._per_flop is None:
            return None
        return backlog_s + self._overhead_s + self._per_flop * self.shape.flops(h, n)

    def observe(self, h: int, n: int, seconds: float) -> None:
        """A step prefilled tokens ``h`` to ``n`` in ``seconds``; what cannot be true is ignored."""
        flops = self.shape.flops(h, n)
        if flops <= 0 or not PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            return
        surprise = self._surprise(flops, seconds)
        if surprise and (self._held is None or self._held[0] != surprise):
            self._held = (surprise, flops, seconds)
            return
        if surprise and self._held is not None:
            self._follow(self._held[1] + flops, self._held[2] + seconds)
            self._add(*self._held[1:])
        self._held = None
        self._add(flops, seconds)

    def _surprise(self, flops: float, seconds: float) -> int:
        """1 for a step far slower than predicted, -1 for one far faster, else 0."""
        if self._per_flop is None or self.samples < self._min_samples:
            return 0
        predicted = self._overhead_s + self._per_flop * flops
        return (seconds > predicted * self._outlier) - (seconds < predicted / self._outlier)

    def _follow(self, flops: float, seconds: float) -> None:
        """Two steps, together of ``flops`` in ``seconds``, tell that the engine is another now.

        What was learned is taken as if it had been so much slower or faster, and weighs little from now on.
        """
        self._scale(min(1.0, 3.0 / self._w))
        ratio = seconds / (2 * self._overhead_s + (self._per_flop or 0.0) * flops)
        self._y *= ratio
        self._xy *= ratio

    def _scale(self, factor: float) -> None:
        self._w *= factor
        self._x *= factor
        self._y *= factor
        self._xx *= factor
        self._xy *= factor

    def _add(self, flops: float, seconds: float) -> None:
        self._scale(self._decay)
        self._w += 1.0
        self._x += flops
        self._y += seconds
        self._xx += flops * flops
        self._xy += flops * seconds
        self.samples += 1
        if self.samples >= self._min_samples:
            self._solve()

    def _solve(self) -> None:
        """Least squares over the observations and the point (0 FLOPs, prior overhead) of weight 0.1; both terms >= 0.

        The point keeps the line determined while all steps are alike.
        """
        w, y = self._w + 0.1, self._y + 0.1 * self._prior_overhead_s
        slope = (w * self._xy - self._x * y) / (w * self._xx - self._x * self._x)
        overhead = (y - slope * self._x) / w
        if slope <= 0:
            slope, overhead = 0.0, y / w
        elif overhead < 0:
            slope, overhead = self._xy / self._xx, 0.0
        self._per_flop, self._overhead_s = slope, overhead
