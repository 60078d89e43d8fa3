"""Collect, remember, tune, guard, apply, judge: one round per window."""

from collections.abc import Callable
from datetime import datetime, timedelta

from tiertune_agent.change import ChangeControl
from tiertune_agent.collector.stores import Collector, Trouble
from tiertune_agent.history.store import History
from tiertune_agent.operators import Operators
from tiertune_agent.policy import Policy, PolicyFile, rates
from tiertune_agent.records import Decision, Snapshot, State, Target
from tiertune_agent.rounds import Round, Rounds, typical
from tiertune_agent.tuners.base import models
from tiertune_agent.verdict import Verdict, judge

TROUBLES = ("store_unreachable", "store_nonsense", "stale_counters", "store_misnamed", "duplicate_store")


class Loop:
    def __init__(
        self,
        collector: Collector,
        history: History,
        policy: PolicyFile,
        *,
        changes: ChangeControl,
        operators: Operators,
        rounds: Rounds,
        now: Callable[[], datetime],
    ) -> None:
        self._collector = collector
        self._history = history
        self._file = policy
        self._changes = changes
        self._operators = operators
        self._rounds = rounds
        self._now = now

    def run_once(self) -> None:
        policy = self._file.reload()
        this = Round(policy, self._revision(), self._collect(policy))
        self._operators.deliver()
        self._changes.settle()
        uncertain = self._changes.in_flight()
        for snapshot in this.fleet:
            if snapshot.store not in uncertain:
                self._rounds.tune(snapshot, this)
        self._judge(policy)

    def _revision(self) -> int:
        """Of the policy in force. A bad edit is an incident, and the last good one stays in force."""
        loaded = self._file.loaded
        if self._file.problem:
            self._history.open_incident("policy_invalid", "", self._file.problem, self._now())
        else:
            self._history.close_incidents(["policy_invalid"], [""], self._now())
        return self._history.policy_revision(loaded.digest, loaded.source, loaded.text, self._now())

    def _collect(self, policy: Policy) -> list[Snapshot]:
        snapshots = []
        for answer in self._collector.collect():
            if isinstance(answer, Trouble):
                self._history.open_incident(answer.kind, answer.store, answer.message, self._now())
            else:
                rule = policy.for_target(Target(answer.store, "", models=models(answer.status)))
                self._history.remember(answer, rates(rule.prices))
                self._note(answer)
                snapshots.append(answer)
        return snapshots

    def _note(self, snapshot: Snapshot) -> None:
        """Close the incidents that an answer disproves, open those that it tells."""
        names = {snapshot.store, snapshot.url, snapshot.url.partition("://")[2]}
        self._history.close_incidents(TROUBLES, names, self._now())
        tiers = (snapshot.status.get("tiers") or {}).items()
        dead = [f"{tier}: {state.get('reason') or 'dead'}" for tier, state in tiers if state.get("health") == "dead"]
        if dead:
            self._history.open_incident("tier_dead", snapshot.store, "; ".join(dead), self._now())
        else:
            self._history.close_incidents(["tier_dead"], [snapshot.store], self._now())

    def _judge(self, policy: Policy) -> None:
        for decision in self._history.decisions.find(states=[State.APPLIED]):
            verdict = self._verdict(decision, policy)
            if verdict:
                state, reason, evidence = verdict.state, verdict.reason, verdict.evidence
                self._history.decisions.judge(decision, state, reason, evidence, self._now())

    def _verdict(self, decision: Decision, policy: Policy) -> Verdict | None:
        """None while the change soaks."""
        if self._history.decisions.superseded(decision):
            reason = "a later change of the same field came before the soak was over"
            return Verdict(State.INCONCLUSIVE, reason, {})
        since = decision.applied_at or self._now()
        if self._now() < since + timedelta(seconds=policy.for_target(decision.target).guard.soak):
            return None
        windows = self._history.windows(decision.target.store, tier=decision.target.tier)
        soak = [window for window in windows if window.start >= since]
        return judge(decision, soak, typical(self._history, decision.target))
