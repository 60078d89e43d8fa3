"""Collect, remember, tune, guard, apply, judge: one round per window."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tiertune_agent.changes.control import ChangeControl
from tiertune_agent.changes.judge import Judge
from tiertune_agent.changes.operators import Operators
from tiertune_agent.changes.round import Round
from tiertune_agent.changes.rounds import Rounds
from tiertune_agent.collector.direct_commands import DirectCommands
from tiertune_agent.collector.observer import Observer
from tiertune_agent.collector.stores import Collector, Heard, Trouble
from tiertune_agent.fields import REMOTE_CAPACITY, read
from tiertune_agent.followed import Followed
from tiertune_agent.history.store import History
from tiertune_agent.incidents.watch import Watch
from tiertune_agent.policy.document import LoadedPolicy, Policy, rates
from tiertune_agent.published import LATEST, Published
from tiertune_agent.records import FLEET, REMOTE, Now, Rates, Snapshot, Target, parts
from tiertune_agent.remote.managed import KIND, UNNAMED, Remote
from tiertune_agent.remote.split import Managed
from tiertune_agent.tuners.base import models
from tiertune_agent.whatif.fleet import FleetWhatif
from tiertune_agent.whatif.shapes import Split

SILENT = ("store_unreachable", KIND)
"""Troubles after which a store is not asked again in the same round: many absent ones would hold it up."""


@dataclass
class Loop:
    collector: Collector
    history: History
    file: Followed[LoadedPolicy]
    changes: ChangeControl
    operators: Operators
    rounds: Rounds
    judge: Judge
    watch: Watch
    whatif: FleetWhatif
    now: Now
    window_s: float
    observer: Observer
    direct: DirectCommands
    remote: Remote | None
    published: Published
    _met: object = field(default=None, init=False)
    """Whom the last round met, and where; None: there was none since this agent leads."""
    _split: Split | None = field(default=None, init=False)
    """That of the last round in which all stores answered: a store that misses a round does not change it."""

    def begin(self) -> None:
        """Forget what was read when this agent led before: another one may have led since."""
        self._met = None
        self.collector.forget()
        if self.remote:
            self.remote.forget()
        self.watch.forget()
        self.rounds.forget()
        self.judge.forget()
        self.whatif.resume()
        self.observer.forget()

    def run_once(self) -> None:
        policy = self.file.look().policy
        self.collector.look()
        answers = self.collector.collect()  # first: if the database is away, windows are missed, but none gets too long
        sources = self.observer.collect({answer.store for answer in answers})
        told = self.remote.read(self.now()) if self.remote else None
        answers = self._called(answers)
        revision, fleet, missing = self._revision(), *self._remember(policy, answers, told)
        met = self.collector.addresses, {answer.store for answer in (*answers, *sources)}
        if met != self._met:
            self._meet(met)
        managed, remote = self._look(policy, told)
        shared = Managed(policy, remote, fleet, missing) if remote else None
        this = Round(policy, revision, fleet, managed, shared, missing)
        self.operators.deliver()
        silent = {one.store for one in (*answers, told) if isinstance(one, Trouble) and one.kind in SILENT}
        under_way, went_on = self.changes.settle(this, silent)
        this.note(under_way)
        uncertain = {part.target.store for one in went_on for part in (one, *parts(one))}
        if FLEET in uncertain or not self.rounds.tune_remote(this):
            self.rounds.tune([snapshot for snapshot in this.fleet if snapshot.store not in uncertain], this)
        self.judge.run(this)
        self.judge.review(this)
        self._simulate(this)  # from here on, errors stop no tuning
        self.rounds.advise(self._observe(policy, sources), this)

    def _simulate(self, this: Round) -> None:
        """Read the fleet's samples, and remember what other sizes of the tiers would have cost, for tuners to read."""
        if not this.managed:
            self._split = None
        elif this.shared and this.shared.complete:
            self._split = this.shared.budget
        every_s = this.policy.tuners.tier_size.look_s - self.window_s / 2  # rounds are not punctual
        told = self.whatif.round(this.fleet, self.now(), every_s=every_s, managed=this.managed, split=self._split)
        self.history.measured.remember_prospects(told)

    def _meet(self, met: tuple[object, set[str]]) -> None:
        """Export what was changed, also of stores that came back, and leave out who has left the fleet."""
        self.published.changed(self.history.decisions.find(limit=LATEST))
        if not self.collector.roster.unknown:  # else it is not known yet which have
            called = {*self.collector.addresses.values(), *self.observer.addresses.values()}
            self.published.leave_out(met[1] | self.history.leave_out(called))
            self._met = met

    def _called(self, answers: Sequence[Heard]) -> list[Heard]:
        """The answers; stores that this agent never heard, but another one did, are called as they were then."""
        told, stores = {one.store for one in answers}, self.collector.roster.stores
        away = {one.store for one in answers if isinstance(one, Trouble)}
        addresses = self.collector.addresses.items()
        strange = {url: name for url, name in addresses if name in away and not stores[url].name}
        known = self.history.called(strange).items()
        names = {strange[url]: name for url, name in known if name not in told}
        return [replace(one, store=names.get(one.store, one.store)) for one in answers]

    def _revision(self) -> int:
        """Number of the policy in force. A bad edit of a file is an incident; the last good one stays in force."""
        loaded = self.file.content
        problems = {"policy_invalid": self.file.problem, **self.collector.roster.problems()}
        told = {(kind, ""): problem for kind, problem in problems.items()}
        self.history.journal.tell_incidents(told, self.now())
        return self.history.journal.policy_revision(loaded.digest, loaded.source, loaded.text, self.now())

    def _look(self, policy: Policy, answer: Heard | None) -> tuple[bool, Snapshot | None]:
        """Whether the remote is managed, and its snapshot if it answers."""
        remote = answer if isinstance(answer, Snapshot) else None
        managed = policy.for_target(REMOTE).remote.manage
        if not managed or answer is None:
            self._let_go(UNNAMED if managed else "")
            self.published.remote(remote)
            return False, None
        if remote and self.remote and (refusal := self.remote.unmanaged()):
            answer = Trouble(FLEET, KIND, refusal)
        if isinstance(answer, Trouble):
            self.watch.look([], [answer])
            self.published.remote(remote)
            return True, None
        answer = replace(answer, windows=())  # they are booked by now, and kept nowhere else
        self.history.remember([(answer, Rates())])
        self.watch.look([answer])
        expected = self.history.expectations([FLEET])[FLEET].tuning
        self.published.remote(answer, read(expected, REMOTE_CAPACITY))
        return True, answer

    def _let_go(self, unnamed: str) -> None:
        """Forget the remote: it is not managed (any more), or it should be, but is ``unnamed``."""
        if self.history.store(FLEET) is not None:
            self.rounds.leave_remote("remote.manage is off")
            self.history.forget(FLEET)
        self.history.journal.tell_incidents({(KIND, FLEET): unnamed}, self.now())

    def _remember(
        self, policy: Policy, answers: Sequence[Heard], remote: Heard | None
    ) -> tuple[list[Snapshot], list[str]]:
        """Remember the answers; returns the stores that answered, and the names of those still to be waited for."""
        snapshots, troubles = _apart(answers)
        self._keep(policy, snapshots, remote if isinstance(remote, Snapshot) else None)
        self.direct.look(snapshots)
        self.watch.look(snapshots, troubles)
        return snapshots, [*(trouble.store for trouble in troubles if not trouble.gone), *self.collector.roster.unknown]

    def _observe(self, policy: Policy, answers: Sequence[Heard]) -> list[Snapshot]:
        """The sources that answered. They are not part of the fleet: nothing that tunes sees them."""
        snapshots, troubles = _apart(answers)
        if snapshots or troubles:
            self._keep(policy, snapshots)
            self.watch.look_at_sources(snapshots, troubles)
        return snapshots

    def _keep(self, policy: Policy, snapshots: Sequence[Snapshot], remote: Snapshot | None = None) -> None:
        """Remember and book the answers; if the ``remote`` answered, its rent is booked once for all stores."""

        def price(target: Target) -> Rates:
            return replace(rates(policy.for_target(target).prices), remote_apart=remote is not None)

        priced = [(each, price(Target(each.store, "", models=models(each.status)))) for each in snapshots]
        held = remote.windows if remote else ()
        entries = self.history.remember(priced, [(window, price(REMOTE)) for window in held])
        self.rounds.heard(snapshots)
        self.published.booked(entries)


def _apart(answers: Sequence[Heard]) -> tuple[list[Snapshot], list[Trouble]]:
    snapshots = [answer for answer in answers if isinstance(answer, Snapshot)]
    return snapshots, [answer for answer in answers if isinstance(answer, Trouble)]
