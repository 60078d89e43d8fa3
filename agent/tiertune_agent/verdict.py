"""Was an applied change right? Pure. This version judges remote_fetch, and never rolls back by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from tiertune_agent.records import Decision, State, Window
from tiertune_agent.tuners.base import Candidate
from tiertune_agent.tuners.remote_fetch import FIELD, Evidence, asked, estimated

ENOUGH_WINDOWS = 3


@dataclass(frozen=True)
class Verdict:
    state: State
    reason: str
    evidence: Mapping[str, Any]


def judge(decision: Decision, soak: Sequence[Window], typical: Candidate | None) -> Verdict:
    """Keep what the windows of the soak confirm by two standard errors; everything else is inconclusive."""
    if decision.field != FIELD:
        return Verdict(State.INCONCLUSIVE, f"this version has no measure for {decision.field}", {})
    look = asked if decision.after == "on" else lambda window: estimated(window, typical)
    gains = [_share(evidence) for window in soak if (evidence := look(window)) and evidence.recompute_s > 0]
    if len(gains) < ENOUGH_WINDOWS:
        return Verdict(State.INCONCLUSIVE, f"only {len(gains)} windows of the soak tell anything", {"gains": gains})
    middle, error = mean(gains), stdev(gains) / len(gains) ** 0.5
    right = middle - 2 * error > 0 if decision.after == "on" else middle + 2 * error < 0
    told = f"fetching saves {middle:.1%} of recomputing (standard error {error:.1%}, {len(gains)} windows of the soak)"
    return Verdict(State.KEPT if right else State.INCONCLUSIVE, told, {"gains": gains, "standard_error": error})


def _share(evidence: Evidence) -> float:
    return evidence.gain_s / evidence.recompute_s
