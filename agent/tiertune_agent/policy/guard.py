"""What a proposal must pass before anything changes. Pure; clamps last."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf

from tiertune_agent.fields import shown
from tiertune_agent.records import Made, direction
from tiertune_agent.tuners.base import REMNANT, Answer, Mode, NoChange, Proposal
from tiertune_agent.tuners.remote_fetch import protects
from tiertune_connector.units import format_count, format_duration, format_size

LONGEST_S = 7 * 86400.0
"""Longest time that a change is held off because it was rolled back before."""


@dataclass(frozen=True)
class Rules:
    """What the policy says for one tuner and target."""

    mode: Mode
    min_requests: int
    changes_per_hour: int
    """Per store. A change that protects requests counts, but does not wait for it, unless it is 0."""
    period: float = 0.0
    """Seconds of a period of the clock: in the next one a target may change again, half the ``spacing`` after its last
    change at least, unless it is a step towards the same goal; 0: there are none."""
    spacing: float = 0.0
    """Seconds from one change of a target to the next, also between steps towards the same goal."""
    hold_off: float = 0.0
    """Seconds that a target is left alone after a change; further steps towards the same goal do not wait for it."""
    soak: float = 0.0
    """Seconds for which a change is watched; a rolled back change is held off at least twice as long."""
    waits: bool = True
    """Whether a change waits until other changes of the pool have soaked."""
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
    soaking: str = ""
    """Which change of the same pool is still being watched; empty: none."""
    last: Made | None = None
    """The last change of the same target by the same tuner."""
    undone: Sequence[Made] = ()
    """Changes of the same target that were undone or refused in the last weeks, with the time."""
    changes_last_hour: int = 0


def guard(answer: Answer, rules: Rules, recent: Recent) -> Answer:
    """The proposal within bounds, or NoChange saying what forbids it and what was wished."""
    if isinstance(answer, NoChange):
        return answer
    refusal = _unfounded(answer, rules, recent) or (_untimely(answer, rules, recent) if rules.mode == "auto" else "")
    if refusal:
        before, after = (shown(answer.field, value) for value in (answer.before, answer.after))
        return NoChange(f"{refusal}; wished {before} to {after}: {answer.reason}", answer.evidence, answer.field)
    if rules.mode == "auto" and _spent(rules, recent):
        answer = replace(answer, reason=f"{answer.reason}; {_told(rules)}, and holds up nothing that protects requests")
    return answer if rules.max_step is None else _bounded(answer, rules, rules.max_step)


def forbidden(rules: Rules, recent: Recent) -> str:
    """Why nothing at all may change now, not even as part of a split; empty: it may."""
    if recent.frozen:
        return f"frozen: {recent.frozen}"
    return _told(rules) if _spent(rules, recent) else ""


def _unfounded(proposal: Proposal, rules: Rules, recent: Recent) -> str:
    """Why it may not even be recommended; empty: it may."""
    if proposal.requests is not None and proposal.requests < rules.min_requests:
        found = format_count(proposal.requests, "request")
        return f"too little evidence: {found}, the guard asks for {rules.min_requests}"
    wished = proposal.field, direction(proposal.before, proposal.after)
    same = [made.at for made in recent.undone if (made.field, made.direction) == wished]
    if same:
        held = min(LONGEST_S, max(rules.hold_off, rules.soak) * 2 ** min(len(same), 30))
        rest = (max(same) - recent.now).total_seconds() + held
        if rest > 0:
            times = "once" if len(same) == 1 else f"{len(same)} times"
            told = f"the same change was undone or refused {times}"
            return f"{told}: not tried again for another {format_duration(rest)}"
    return ""


def _untimely(proposal: Proposal, rules: Rules, recent: Recent) -> str:
    """Why it may not be made now; empty: it may."""
    if recent.frozen:
        return f"frozen: {recent.frozen}"
    spacing_s = rules.spacing
    if not _further(proposal, recent.last):
        spacing_s = _spacing_s(rules, recent)
        if recent.soaking and rules.waits:
            return f"waits for the soak of {recent.soaking}"
        if (rest_s := _rest_s(recent, rules.hold_off)) > 0:
            return f"held off for another {format_duration(rest_s)} after the last change"
    if (rest_s := _rest_s(recent, spacing_s)) > 0:
        return f"changes once in a period: not for {format_duration(rest_s)}"
    if _spent(rules, recent) and not (rules.changes_per_hour and protects(proposal.field, proposal.after)):
        return _told(rules)
    return ""


def _spent(rules: Rules, recent: Recent) -> bool:
    return recent.changes_last_hour >= rules.changes_per_hour


def _told(rules: Rules) -> str:
    return f"the budget of {format_count(rules.changes_per_hour, 'change')} per hour is spent"


def _spacing_s(rules: Rules, recent: Recent) -> float:
    """Seconds from the last change to the next one that is no step towards the same goal."""
    if recent.last is None or not rules.period:
        return rules.spacing
    over = rules.period - recent.last.at.timestamp() % rules.period
    return min(rules.spacing, max(rules.spacing / 2, over))


def _rest_s(recent: Recent, quiet_s: float) -> float:
    """Seconds until the last change is ``quiet_s`` ago; 0 or less if it is already."""
    return (recent.last.at - recent.now).total_seconds() + quiet_s if recent.last else 0.0


def _further(proposal: Proposal, last: Made | None) -> bool:
    """Whether it is the next step towards a goal that the last change was allowed only one step towards."""
    if last is None or last.goal is None or last.field != proposal.field or last.after != proposal.before:
        return False
    return direction(proposal.before, proposal.after) == last.direction


def _bounded(proposal: Proposal, rules: Rules, max_step: float) -> Answer:
    """Limit it to the bounds, and to one step from the present value (which may itself lie outside the bounds)."""
    before, wish = proposal.before, proposal.after
    goal = min(max(wish, rules.least or 0), inf if rules.most is None else rules.most)
    after = int(_stepped(before, goal, max_step, rules.most))
    if (after - before) * (wish - before) <= 0:
        bounds = f"{_size(rules.least)} to {_size(rules.most)}"
        return NoChange(
            f"stays at {format_size(before)}, bounds {bounds}; wished {format_size(wish)}: {proposal.reason}"
        )
    if after == wish:
        return proposal
    evidence = {**proposal.evidence, "goal": int(goal)} if after != int(goal) else proposal.evidence
    return replace(
        proposal, after=after, evidence=evidence, reason=f"{proposal.reason}; bounded to {format_size(after)}"
    )


def _stepped(before: float, goal: float, max_step: float, most: float | None) -> float:
    """Take one step: up by a share of the goal, else a small tier hardly grows; down by a share of the present size.

    A tier that would be left with a remnant of its upper bound goes to its goal at once.
    """
    if goal >= before:
        return min(goal, before + max_step * goal)
    after = max(goal, before - max_step * before)
    return goal if most is not None and after < REMNANT * most else after


def _size(bound: float | None) -> str:
    return "none" if bound is None else format_size(bound)
