"""Was a change right? Pure: the old and the new setting on the same samples, or the windows before and after it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot, sqrt
from statistics import fmean

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


@dataclass(frozen=True)
class Trial:
    """The old and the new setting on the same samples, one value per window; lower is better."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    of: str = "cost"
    """What the values are, such as ``seconds per request``."""
    weights: tuple[float, ...] = ()
    """Weights of the windows, such as their requests; empty: all count alike."""

    @property
    def windows(self) -> int:
        return len(self.before)


@dataclass(frozen=True)
class Spells:
    """The windows before and after a change, with different requests; ratios of sums, lower is better."""

    before: tuple[Summand, ...]
    after: tuple[Summand, ...]
    of: str
    evidence: Json = field(default_factory=dict)
    """What else to put into the verdict's evidence."""

    @property
    def windows(self) -> int:
        """Windows of the shorter spell."""
        return min(len(self.before), len(self.after))


def weigh(trial: Trial | Spells, *, worse_by: float) -> Verdict:
    """The verdict on a trial; paired if the samples are the same."""
    return compare(trial, worse_by=worse_by) if isinstance(trial, Trial) else contrast(trial, worse_by=worse_by)


def compare(trial: Trial, *, worse_by: float) -> Verdict:
    """Judge by the mean of the paired differences and its standard error, windows by their weights.

    Kept: better by two standard errors. Rolled back: worse by two standard errors and by more than ``worse_by``, a
    share of what the old setting costs. Everything else is inconclusive, and that is an answer.
    """
    pairs = list(zip(trial.before, trial.after, strict=True))
    if len(pairs) < ENOUGH_WINDOWS:
        return _too_few(len(pairs), "told anything")
    weights = trial.weights or (1.0,) * len(pairs)
    old, new = fmean(trial.before, weights), fmean(trial.after, weights)
    differences = [after - before for before, after in pairs]
    change, error = fmean(differences, weights), _error(differences, weights)
    evidence = {"windows": len(pairs), "of": trial.of, "before": old, "after": new, "standard_error": error}
    told = f"{trial.of}: {new:.4g} against {old:.4g} with the old setting, {_change(old, new, error)}"
    return Verdict(_state(change, error, worse_by * old), f"{told}, {len(pairs)} windows", evidence)


def contrast(spells: Spells, *, worse_by: float) -> Verdict:
    """``compare`` for two spells, each with its own error; changes of the traffic between them are not separated."""
    if spells.windows < ENOUGH_WINDOWS:
        return _too_few(spells.windows, "of the shorter spell, before or after the change, told anything")
    old, new = ratio(spells.before), ratio(spells.after)
    error = hypot(old.error, new.error)
    told = (
        f"{spells.of}: {new.value:.4g} against {old.value:.4g} before the change, "
        f"{_change(old.value, new.value, error)}, {new.windows} windows against {old.windows}, not of the same requests"
    )
    figures = {"of": spells.of, "before": old.value, "after": new.value, "standard_error": error}
    evidence = {"windows": spells.windows, **figures, **spells.evidence}
    return Verdict(_state(new.value - old.value, error, worse_by * abs(old.value)), told, evidence)


def _error(values: Sequence[float], weights: Sequence[float]) -> float:
    """Standard error of a weighted mean; it grows if few windows have most of the weight."""
    mean, total, squares = fmean(values, weights), sum(weights), sum(weight**2 for weight in weights)
    spread = sum(weight * (value - mean) ** 2 for value, weight in zip(values, weights, strict=True))
    return sqrt(spread * squares / (total**2 - squares) / total)


def _too_few(windows: int, of: str) -> Verdict:
    few = f"{format_count(windows, 'window')} {of}, {ENOUGH_WINDOWS} are needed"
    return Verdict(State.INCONCLUSIVE, few, {"windows": windows})


def _state(change: float, error: float, allowed: float) -> State:
    if change + ERRORS * error < 0:
        return State.KEPT
    if change - ERRORS * error > 0 and change > allowed:
        return State.ROLLED_BACK
    return State.INCONCLUSIVE


def _change(old: float, new: float, error: float) -> str:
    if old > 0:
        return f"{abs(new / old - 1):.1%} {'more' if new > old else 'less'} (standard error {error / old:.1%})"
    return f"standard error {error:.3g}"
