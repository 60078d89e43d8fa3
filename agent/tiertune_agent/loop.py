"""Collect, remember, tune, guard, apply, judge: one round per window."""

from collections.abc import Callable
from datetime import datetime

from tiertune_agent.change import ChangeControl
from tiertune_agent.collector.stores import Collector, Trouble
from tiertune_agent.history.store import History
from tiertune_agent.judge import Judge
from tiertune_agent.operators import Operators
from tiertune_agent.policy import Policy, PolicyFile, frozen_by, rates
from tiertune_agent.prospects import Prospects
from tiertune_agent.records import FLEET, Rates, Snapshot, Target
from tiertune_agent.remote import KIND, UNNAMED, Remote
from tiertune_agent.rounds import Round, Rounds
from tiertune_agent.split import REMOTE, Managed
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
        remote: Remote | None = None,
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
        self._remote = remote

    def run_once(self) -> None:
        policy = self._file.reload()
        revision, fleet, missing = self._revision(), *self._collect(policy)
        managed, remote = self._look(policy)
        shared = Managed(policy, remote, fleet, missing) if remote else None
        this = Round(policy, revision, fleet, managed, shared)
        self._operators.deliver()
        uncertain = self._changes.settle(lambda target: self._frozen(policy, target))
        if FLEET in uncertain or not self._rounds.tune_remote(this):
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

    def _frozen(self, policy: Policy, target: Target) -> str:
        return self._operators.frozen() or frozen_by(policy.for_target(target), self._now())

    def _look(self, policy: Policy) -> tuple[bool, Snapshot | None]:
        """Whether the remote is managed, and what it is set to where it answers."""
        if not policy.for_target(REMOTE).remote.manage or self._remote is None:
            self._let_go(policy)
            return False, None
        answer = self._remote.read(self._now())
        if isinstance(answer, Trouble):
            self._watch.missed(answer)
            return True, None
        self._history.remember(answer, Rates())
        self._watch.seen(answer)
        return True, answer

    def _let_go(self, policy: Policy) -> None:
        """The remote is not managed (any more); or it ought to be, and nobody said where it is."""
        if self._history.store(FLEET) is not None:
            self._rounds.leave_remote("remote.manage is off")
            self._history.forget(FLEET)
        if policy.for_target(REMOTE).remote.manage:
            self._watch.missed(Trouble(FLEET, KIND, UNNAMED))
        else:
            self._history.close_incidents([KIND], [FLEET], self._now())

    def _collect(self, policy: Policy) -> tuple[list[Snapshot], list[str]]:
        """The stores that answered, and the names of those that did not."""
        snapshots, missing = [], []
        for answer in self._collector.collect():
            if isinstance(answer, Trouble):
                self._watch.missed(answer)
                missing.append(answer.store)
            else:
                rule = policy.for_target(Target(answer.store, "", models=models(answer.status)))
                self._history.remember(answer, rates(rule.prices))
                self._watch.seen(answer)
                snapshots.append(answer)
        return snapshots, missing
