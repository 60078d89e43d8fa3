"""How certain figures over several windows are: ratios of sums with a standard error. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple

ENOUGH_WINDOWS = 3
ERRORS = 2.0
"""Standard errors that a difference must have before it counts."""


class Summand(NamedTuple):
    """What one window adds to a ratio of sums."""

    of: float
    """Part of the numerator."""
    per: float
    """Part of the denominator."""
    weight: float = 1.0


@dataclass(frozen=True)
class Ratio:
    """``error``: one standard error; infinite on too few windows."""

    value: float
    error: float
    windows: int

    def document(self, name: str) -> dict[str, float | int | None]:
        """The ratio as evidence; an infinite error is null."""
        error = self.error if isfinite(self.error) else None
        return {name: self.value, f"{name}_standard_error": error}

    @property
    def above(self) -> bool:
        """Whether it is clearly above zero."""
        return self.value > ERRORS * self.error

    @property
    def below(self) -> bool:
        """Whether it is clearly below zero."""
        return -self.value > ERRORS * self.error


def ratio(parts: Sequence[Summand]) -> Ratio:
    """The weighted sum of ``of`` divided by that of ``per``, windows oldest first.

    The error is that of a ratio estimator (linearised) over windows that may depend on their neighbours (Newey and
    West 1987, with the cube root of their number as lag). It is never less than that of independent windows.
    """
    count, below = len(parts), sum(part.weight * part.per for part in parts)
    if below <= 0:
        return Ratio(0.0, float("inf"), count)
    value = sum(part.weight * part.of for part in parts) / below
    if count < ENOUGH_WINDOWS:
        return Ratio(value, float("inf"), count)
    off = [part.weight * (part.of - value * part.per) for part in parts]
    alone, lags = sum(each * each for each in off), int(count ** (1 / 3) + 1e-9)
    together = sum(
        2 * (1 - lag / (lags + 1)) * sum(one * other for one, other in zip(off, off[lag:], strict=False))
        for lag in range(1, lags + 1)
    )
    return Ratio(value, sqrt(alone + max(0.0, together)) / below * sqrt(count / (count - 1)), count)
