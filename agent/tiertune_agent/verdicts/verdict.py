"""Was a change right? Pure: the old and the new setting on the same samples, or the windows before and after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import hypot, sqrt
from statistics import fmean
from typing import ClassVar, NamedTuple

from tiertune_agent.fields import Json
from tiertune_agent.records import State
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, ERRORS, Summand, ratio
from tiertune_connector.units import format_count


@dataclass(frozen=True)
class Verdict:
    """``state``: kept, rolled back or inconclusive. ``reason``: one sentence with figures."""

    state: State
    reason: str
    evidence: Json


class Pair(NamedTuple):
    """What one window tells of the old and of the new setting; lower is better."""

    before: float
    after: float
    weight: float
    """Above 0, such as its requests."""


@dataclass(frozen=True)
class Trial:
    """The old and the new setting on the same samples, a pair per window."""

    pairs: Sequence[Pair]
    of: str
    """What the values are, such as ``seconds per request``."""
    few: ClassVar = "told anything"
    """What is told of its windows if they are too few."""

    @property
    def windows(self) -> int:
        return len(self.pairs)

    def compared(self) -> "Compared":
        """The means, the mean of the paired differences, and its error; that grows if few windows have most weight."""
        before, after, weights = zip(*self.pairs, strict=True)
        differences = [pair.after - pair.before for pair in self.pairs]
        change, total, squares = fmean(differences, weights), sum(weights), sum(weight**2 for weight in weights)
        products = 2 * sum(
            each * sum_before for each, sum_before in zip(weights[1:], accumulate(weights), strict=False)
        )
        spread = sum(weight * (each - change) ** 2 for each, weight in zip(differences, weights, strict=True))
        error = sqrt(spread * squares / products / total)
        told = f"{self.windows} windows"
        return Compared(fmean(before, weights), fmean(after, weights), change, error, "with the old setting", told)


class Groups(Trial):
    """A pair is of requests that were drawn by lot, as a holdout's groups are: others, but of the same window.

    The error is that of a ratio of sums: a pair of few requests is far off as a rule, and has little weight. It is
    larger as Student's t has it: what few pairs tell of how far they are off is in doubt itself.
    """

    def compared(self) -> "Compared":
        parts = [Summand(pair.after - pair.before, 1.0, pair.weight) for pair in self.pairs]
        return super().compared()._replace(error=ratio(parts).error * student(self.windows - 1))


def student(freedom: int) -> float:
    """How many times as many standard errors as a normal variable has a t of so many degrees of ``freedom``.

    At ``ERRORS`` of them: Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5), 3 % short at 2 degrees.
    """
    x = ERRORS**2
    return (
        1
        + (x + 1) / (4 * freedom)
        + ((5 * x + 16) * x + 3) / (96 * freedom**2)
        + (((3 * x + 19) * x + 17) * x - 15) / (384 * freedom**3)
    )


@dataclass(frozen=True)
class Spells:
    """The windows before and after a change, with different requests; ratios of sums, lower is better."""

    before: Sequence[Summand]
    after: Sequence[Summand]
    of: str
    few: ClassVar = "of the shorter spell, before or after the change, told anything"

    @property
    def windows(self) -> int:
        """Windows of the shorter spell."""
        return min(len(self.before), len(self.after))

    def compared(self) -> "Compared":
        """Both ratios, each with its own error; changes of the traffic between them are not separated."""
        old, new = ratio(self.before), ratio(self.after)
        told = f"{new.windows} windows against {old.windows}, not of the same requests"
        change, error = new.value - old.value, hypot(old.error, new.error)
        return Compared(old.value, new.value, change, error, "before the change", told)


class Compared(NamedTuple):
    """What a trial tells; the error is one standard error of the change."""

    before: float
    after: float
    change: float
    error: float
    against: str
    """What ``before`` is of, in words."""
    windows: str
    """In words."""


def weigh(trial: Trial | Spells, *, worse_by: float) -> Verdict:
    """The verdict on a trial.

    Kept: better by two standard errors. Rolled back: worse by two standard errors and by more than ``worse_by``, a
    share of what the old setting costs. Everything else is inconclusive, and that is an answer.
    """
    if trial.windows < ENOUGH_WINDOWS:
        few = f"{format_count(trial.windows, 'window')} {trial.few}, {ENOUGH_WINDOWS} are needed"
        return Verdict(State.INCONCLUSIVE, few, {"windows": trial.windows})
    before, after, change, error, against, windows = trial.compared()
    state = State.INCONCLUSIVE
    if change + ERRORS * error < 0:
        state = State.KEPT
    elif change - ERRORS * error > 0 and change > worse_by * abs(before):
        state = State.ROLLED_BACK
    moved = f"standard error {error:.3g}"
    if before > 0:
        more = "more" if after > before else "less"
        moved = f"{abs(after / before - 1):.1%} {more} (standard error {error / before:.1%})"
    figures = {"windows": trial.windows, "of": trial.of, "before": before, "after": after, "standard_error": error}
    told = f"{trial.of}: {after:.4g} against {before:.4g} {against}, {moved}, {windows}"
    return Verdict(state, told, figures)
