"""Collect, remember, tune, guard, apply, judge: one round per window."""

from collections.abc import Callable, Iterable
from datetime import datetime

from tiertune_agent.change import ChangeControl
from tiertune_agent.collector.stores import Collector, Trouble
from tiertune_agent.fields import read
from tiertune_agent.history.store import History
from tiertune_agent.judge import Judge
from tiertune_agent.operators import Operators
from tiertune_agent.policy import Policy, PolicyFile, frozen_by, rates
from tiertune_agent.prospects import Prospects
from tiertune_agent.records import FLEET, Rates, Snapshot, Target, Window
from tiertune_agent.remote import KIND, UNNAMED, Remote
from tiertune_agent.rounds import Round, Rounds
from tiertune_agent.split import CAPACITY, REMOTE, Managed
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
        booked: Callable[[Iterable[Window], Rates], None] = lambda _windows, _rates: None,
        seen: Callable[[Snapshot | None, int | None], None] = lambda _remote, _desired: None,
    ) -> None:
        """``booked`` hears of windows in the ledger and their rates; ``seen`` of the remote and the capacity wished."""
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
        self._booked = booked
        self._seen = seen

    def begin(self) -> None:
        """Forget what was read when this agent led before: another one may have led since."""
        self._collector.forget()
        self._watch.forget()

    def run_once(self) -> None:
        policy = self._file.reload()
        answers = self._collector.collect()  # first: without the database windows are missed, but none is too long
        revision, fleet, missing = self._revision(), *self._remember(policy, answers)
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
        answer = self._remote.read(self._now()) if self._remote else None
        remote = answer if isinstance(answer, Snapshot) else None
        if not policy.for_target(REMOTE).remote.manage or answer is None:
            self._let_go(policy)
            self._seen(remote, None)
            return False, None
        if isinstance(answer, Trouble):
            self._watch.missed(answer)
            self._seen(None, None)
            return True, None
        self._history.remember(answer, Rates())
        self._watch.seen(answer)
        self._seen(answer, read(self._watch.wanted(FLEET), CAPACITY))
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

    def _remember(self, policy: Policy, answers: Iterable[Snapshot | Trouble]) -> tuple[list[Snapshot], list[str]]:
        """The stores that answered, and the names of those that did not."""
        snapshots, missing = [], []
        for answer in answers:
            if isinstance(answer, Trouble):
                self._watch.missed(answer)
                missing.append(answer.store)
            else:
                rule = policy.for_target(Target(answer.store, "", models=models(answer.status)))
                priced = rates(rule.prices)
                self._history.remember(answer, priced)
                self._booked(answer.windows, priced)
                self._watch.seen(answer)
                snapshots.append(answer)
        return snapshots, missing
