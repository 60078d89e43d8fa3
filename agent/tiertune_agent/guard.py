"""What a proposal must pass before anything changes. Pure; clamps last."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tiertune_agent.tuners.base import Answer, Mode, NoChange, Proposal
from tiertune_connector.units import format_duration, format_size


@dataclass(frozen=True)
class Rules:
    """The policy, as it stands for one tuner and target."""

    mode: Mode
    min_requests: int
    changes_per_hour: int
    """Per store."""
    hold_off: float = 0.0
    """Seconds after a change of the same target."""
    max_step: float | None = None
    """Share of a capacity; None: not a capacity."""
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Recent:
    """What happened lately."""

    now: datetime
    frozen: str = ""
    """Why nothing may change now; empty: it may."""
    last_change: datetime | None = None
    changes_last_hour: int = 0


def guard(answer: Answer, rules: Rules, recent: Recent) -> Answer:
    """The proposal, bounded; or NoChange saying what forbids it and what was wished."""
    if isinstance(answer, NoChange):
        return answer
    refusal = _refusal(answer, rules, recent)
    if refusal:
        return NoChange(f"{refusal}; wished {answer.before} to {answer.after}: {answer.reason}", answer.evidence)
    return answer if rules.max_step is None else _bounded(answer, rules)


def _refusal(proposal: Proposal, rules: Rules, recent: Recent) -> str:
    if proposal.requests is not None and proposal.requests < rules.min_requests:
        return f"too little evidence: {proposal.requests} requests, the guard asks for {rules.min_requests}"
    if rules.mode != "auto":
        return ""
    if recent.frozen:
        return f"frozen: {recent.frozen}"
    if recent.last_change and recent.now < recent.last_change + timedelta(seconds=rules.hold_off):
        rest = recent.last_change + timedelta(seconds=rules.hold_off) - recent.now
        return f"held off for another {format_duration(rest.total_seconds())} after the last change"
    if recent.changes_last_hour >= rules.changes_per_hour:
        return f"the budget of {rules.changes_per_hour} changes per hour is spent"
    return ""


def _bounded(proposal: Proposal, rules: Rules) -> Answer:
    """Within the bounds, and at most one step from where it stands (which may itself lie outside the bounds)."""
    before, wish = proposal.before, proposal.after
    goal = max(wish, rules.least) if rules.least is not None else wish
    goal = min(goal, rules.most) if rules.most is not None else goal
    step = (rules.max_step or 0.0) * (before or goal)
    after = int(max(before - step, min(before + step, goal)))
    if (after - before) * (wish - before) <= 0:
        bounds = f"{_size(rules.least)} to {_size(rules.most)}"
        return NoChange(
            f"stays at {format_size(before)}, bounds {bounds}; wished {format_size(wish)}: {proposal.reason}"
        )
    if after == wish:
        return proposal
    return replace(proposal, after=after, reason=f"{proposal.reason}; bounded to {format_size(after)}")


def _size(bound: float | None) -> str:
    return "none" if bound is None else format_size(bound)
