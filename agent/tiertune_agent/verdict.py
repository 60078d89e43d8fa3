"""Was a change right? Pure: the old and the new setting on the same samples, window by window."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from tiertune_agent.records import State

ENOUGH_WINDOWS = 3
ERRORS = 2.0
"""Standard errors that a difference must have before it counts."""


@dataclass(frozen=True)
class Verdict:
    """``state``: kept, rolled back or inconclusive. ``reason``: one sentence with figures."""

    state: State
    reason: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """The old and the new setting on the same samples, one value per window; lower is better."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    of: str = "cost"
    """What the values are, such as ``seconds per request``."""

    def __post_init__(self) -> None:
        if len(self.before) != len(self.after):
            raise ValueError(f"{len(self.before)} windows of the old setting, {len(self.after)} of the new one")


def compare(trial: Trial, *, worse_by: float) -> Verdict:
    """Judge by the mean of the paired differences and its standard error.

    Kept: better by two standard errors. Rolled back: worse by two standard errors and by more than ``worse_by``, a
    share of what the old setting costs. Everything else is inconclusive, and that is an answer.
    """
    pairs = list(zip(trial.before, trial.after, strict=True))
    if len(pairs) < ENOUGH_WINDOWS:
        told = f"{len(pairs)} windows tell anything, {ENOUGH_WINDOWS} are needed"
        return Verdict(State.INCONCLUSIVE, told, {"windows": len(pairs)})
    old, new = mean(trial.before), mean(trial.after)
    differences = [after - before for before, after in pairs]
    change, error = mean(differences), stdev(differences) / len(pairs) ** 0.5
    evidence = {"windows": len(pairs), "of": trial.of, "before": old, "after": new, "standard_error": error}
    return Verdict(_state(change, error, worse_by * old), _told(trial.of, old, new, error, len(pairs)), evidence)


def _state(change: float, error: float, allowed: float) -> State:
    if change + ERRORS * error < 0:
        return State.KEPT
    if change - ERRORS * error > 0 and change > allowed:
        return State.ROLLED_BACK
    return State.INCONCLUSIVE


def _told(of: str, old: float, new: float, error: float, windows: int) -> str:
    if old > 0:
        change = f"{abs(new / old - 1):.1%} {'more' if new > old else 'less'} (standard error {error / old:.1%})"
    else:
        change = f"standard error {error:.3g}"
    return f"{of}: {new:.4g} against {old:.4g} with the old setting, {change}, {windows} windows"
