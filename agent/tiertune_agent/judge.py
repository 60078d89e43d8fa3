"""Watches applied changes through their soak, and keeps them, rolls them back, or says that nothing is clear."""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from tiertune_agent.change import ChangeControl, Refused
from tiertune_agent.fields import in_force, read
from tiertune_agent.history.store import History
from tiertune_agent.policy import frozen_by, mode_of
from tiertune_agent.records import Decision, Snapshot, State, Window
from tiertune_agent.rounds import HOUR, Round, typical
from tiertune_agent.soak import chunk_sizes, fill_seconds, soak_seconds
from tiertune_agent.trials import coarse, eviction_trial, fetch_trial, measure, shapes, size_trial
from tiertune_agent.verdict import ENOUGH_WINDOWS, Trial, Verdict, compare

PATIENCE = timedelta(days=1)
"""A store that is away for so long after a soak leaves it inconclusive."""
WEEK = timedelta(days=7)
PARTS = 168
"""A week is weighed by about its hours: neighbouring windows are much alike."""
STANDS = {State.KEPT: "still pays", State.ROLLED_BACK: "no longer pays", State.INCONCLUSIVE: "not clear"}


class Judge:
    def __init__(
        self, history: History, changes: ChangeControl, frozen: Callable[[], str], now: Callable[[], datetime]
    ) -> None:
        self._history = history
        self._decisions = history.decisions
        self._changes = changes
        self._frozen = frozen
        self._now = now

    def run(self, this: Round) -> None:
        """Begin soaks, and end those that are over."""
        fleet = {snapshot.store: snapshot for snapshot in this.fleet}
        for decision in self._decisions.find(states=[State.APPLIED]):
            self._begin(decision, this, fleet.get(decision.target.store))
        for decision in self._decisions.find(states=[State.SOAKING]):
            if decision.undo is None:
                self._end(decision, this, fleet.get(decision.target.store))

    def review(self, this: Round) -> None:
        """Once a week: does what was decided still pay? By the same trial, over the week."""
        fleet = {snapshot.store: snapshot for snapshot in this.fleet}
        since = self._now() - WEEK
        for decision in self._decisions.standing(since):
            snapshot = fleet.get(decision.target.store)
            if measure(decision) and snapshot and in_force(snapshot.tuning, decision.field) == decision.after:
                trial = coarse(self._trial(decision, since, snapshot), PARTS)
                verdict = compare(trial, worse_by=this.policy.for_target(decision.target).guard.roll_back_if_worse_by)
                self._decisions.review(decision, STANDS[verdict.state], verdict, self._now())

    def _begin(self, decision: Decision, this: Round, snapshot: Snapshot | None) -> None:
        if not measure(decision):
            told = f"there is nothing to weigh {decision.field} by"
            self._decisions.judge(decision, State.INCONCLUSIVE, told, {}, self._now())
            return
        shortest = this.policy.for_target(decision.target).guard.soak
        seconds = soak_seconds(shortest, self._fill_s(decision, snapshot))
        until = (decision.applied_at or self._now()) + timedelta(seconds=seconds)
        self._decisions.move(decision, State.SOAKING, now=self._now(), soak_until=until)

    def _fill_s(self, decision: Decision, snapshot: Snapshot | None) -> float | None:
        """None where a change does not concern what the tier holds, or where nobody knows."""
        if snapshot is None or measure(decision) == "fetch":
            return None
        target = decision.target
        capacity = decision.after if measure(decision) == "size" else _capacity(decision, snapshot)
        windows = [
            window
            for window in self._history.store_windows(target.store, self._now() - HOUR)
            if window.tier == target.tier and target.namespace in ("", window.namespace)
        ]
        return fill_seconds(windows, capacity or 0.0, chunk_sizes(snapshot.status))

    def _end(self, decision: Decision, this: Round, snapshot: Snapshot | None) -> None:
        verdict = self._verdict(decision, this, snapshot)
        if verdict is None:
            return
        state, reason = verdict.state, verdict.reason
        if state == State.ROLLED_BACK:
            rule = this.policy.for_target(decision.target)
            if self._frozen() or frozen_by(rule, self._now()):
                return  # it goes on soaking until something may change again
            if "auto" == decision.mode == mode_of(rule, decision.tuner):
                with suppress(Refused):  # an operator was quicker
                    self._changes.roll_back(decision, "verdict", reason, verdict.evidence)
                return
            state = State.INCONCLUSIVE
            reason += (
                f"; not rolled back by itself in mode {mode_of(rule, decision.tuner)}: roll back decision {decision.id}"
            )
        self._decisions.judge(decision, state, reason, verdict.evidence, self._now())

    def _verdict(self, decision: Decision, this: Round, snapshot: Snapshot | None) -> Verdict | None:
        """None while the change soaks."""
        now, until = self._now(), decision.soak_until or self._now()
        if self._decisions.superseded(decision):
            return Verdict(State.INCONCLUSIVE, "a later change of the same field came before the soak was over", {})
        if now < until or (snapshot is None and now < until + PATIENCE):
            return None
        if snapshot is None:
            return Verdict(State.INCONCLUSIVE, "the store has been away since the soak", {})
        found = in_force(snapshot.tuning, decision.field)
        if found != decision.after:
            told = f"somebody changed it within the soak: {decision.field} is {found}, not {decision.after}"
            return Verdict(State.INCONCLUSIVE, told, {})
        began = decision.applied_at or until
        trial = self._trial(decision, began, snapshot)
        if len(trial.before) < ENOUGH_WINDOWS and now < until + (until - began):
            return None  # too little traffic: once the soak's length more
        return compare(trial, worse_by=this.policy.for_target(decision.target).guard.roll_back_if_worse_by)

    def _trial(self, decision: Decision, since: datetime, snapshot: Snapshot) -> Trial:
        target = decision.target
        if measure(decision) == "size":
            return size_trial(self._history.prospects(target.namespace, since), *shapes(decision))
        if measure(decision) == "fetch":
            windows = self._history.windows_since(target.store, since, tier=target.tier)
            return fetch_trial(decision, windows, typical(self._history, target))
        windows = self._ghost_windows(decision, since)
        return eviction_trial(windows, decision.before, decision.after, _capacity(decision, snapshot))

    def _ghost_windows(self, decision: Decision, since: datetime) -> list[Window]:
        """Of the pool: its ghosts are counted with its tier, or with none."""
        target = decision.target
        found = [
            window
            for tier in (target.tier, "")
            for window in self._history.windows_since(target.store, since, tier=tier, namespace=target.namespace)
        ]
        return sorted(found, key=lambda window: window.start)


def _capacity(decision: Decision, snapshot: Snapshot) -> float | None:
    """Bytes that the pool may hold now."""
    target = decision.target
    pool = (snapshot.status.get("pools") or {}).get(target.namespace) or {}
    found = read(pool, f"{target.tier}.effective.capacity_bytes")
    return float(found) if found is not None else None
