"""Collect, remember, tune, guard, apply, judge: one round per window."""

from collections.abc import Callable
from datetime import datetime

from tiertune_agent.change import ChangeControl
from tiertune_agent.collector.stores import Collector, Trouble
from tiertune_agent.history.store import History
from tiertune_agent.judge import Judge
from tiertune_agent.operators import Operators
from tiertune_agent.policy import Policy, PolicyFile, rates
from tiertune_agent.prospects import Prospects
from tiertune_agent.records import Snapshot, Target
from tiertune_agent.rounds import Round, Rounds
from tiertune_agent.tuners.base import models
from tiertune_agent.watch import Watch


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
        judge: Judge,
        watch: Watch,
        prospects: Prospects,
        now: Callable[[], datetime],
    ) -> None:
        self._collector = collector
        self._history = history
        self._file = policy
        self._changes = changes
        self._operators = operators
        self._rounds = rounds
        self._judge = judge
        self._watch = watch
        self._prospects = prospects
        self._now = now

    def run_once(self) -> None:
        policy = self._file.reload()
        this = Round(policy, self._revision(), self._collect(policy))
        self._operators.deliver()
        uncertain = self._changes.settle()
        for snapshot in this.fleet:
            if snapshot.store not in uncertain:
                self._rounds.tune(snapshot, this)
        self._judge.run(this)
        self._judge.review(this)
        self._prospects.run(this)  # at last: what goes wrong here stops nothing else

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
                self._watch.missed(answer)
            else:
                rule = policy.for_target(Target(answer.store, "", models=models(answer.status)))
                self._history.remember(answer, rates(rule.prices))
                self._watch.seen(answer)
                snapshots.append(answer)
        return snapshots
