"""One round of tuning: asks every tuner whose period is over, passes what it wishes through the guard."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from itertools import product

from tiertune_agent.changes.control import ChangeControl, Refused, Wish
from tiertune_agent.changes.survey import Hours, Survey, TierWindows, concerning, unbroken
from tiertune_agent.fields import read
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.history.store import History
from tiertune_agent.policy.budgets import Budgeted, Capacities, budgeted
from tiertune_agent.policy.document import Policy, Rule, frozen_by, made, mode_of, rates, rules_for
from tiertune_agent.policy.guard import Recent, Rules, guard
from tiertune_agent.policy.rulings import Rulings
from tiertune_agent.records import FLEET, Decision, Made, Snapshot, State, Target, Window, parts
from tiertune_agent.remote.split import NO_LIMIT, REMOTE, SPLIT, Managed
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, Tuner, TypicalCandidate, served
from tiertune_agent.tuners.registry import OF_REMOTE, OF_SOURCES, OF_STORES, check
from tiertune_agent.tuners.remote_fetch import FIELD as FETCH
from tiertune_agent.tuners.remote_fetch import RemoteFetch, typical_candidate
from tiertune_agent.tuners.tier_size import horizon_s
from tiertune_agent.whatif.shapes import remote_bytes
from tiertune_agent.whatif.terms import mean_prompt

POOL_PERIODS = 10
"""Of a tuner that reads the ghosts of a pool, or the prompts of a store: so far back."""


def typical(history: History, target: Target) -> TypicalCandidate | None:
    """What a typical candidate of the tier was, when there last were any."""
    return typical_candidate(history.measured.candidate_windows(target.store, target.tier))


@dataclass(frozen=True)
class Round:
    """What holds for one round: the policy in force, and every store that answered."""

    policy: Policy
    revision: int
    fleet: Sequence[Snapshot]
    managed: bool = False
    """Whether the remote's capacity is the agent's to set."""
    shared: Managed | None = None
    """None: the remote is not managed, or does not answer now."""
    missing: Sequence[str] = ()
    """Stores that did not answer."""

    @cached_property
    def rules(self) -> Rulings:
        return Rulings(self.policy)

    @property
    def known(self) -> dict[str, Snapshot]:
        """All that decisions may concern, by name; the fleet only where all of it answered."""
        known = {snapshot.store: snapshot for snapshot in self.fleet}
        return {**known, FLEET: self.shared.snapshot} if self.shared and self.shared.complete else known

    @cached_property
    def splits(self) -> bool:
        """Whether one budget is split between DRAM and the remote, so that no host's DRAM is set by itself."""
        return self.managed and self.policy.for_target(REMOTE).budgets.total is not None

    @cached_property
    def remote_bytes(self) -> int:
        """Capacity of the remote tier."""
        return (self.shared.capacity or 0) if self.shared else remote_bytes(self.fleet)

    def sharing(self, snapshot: Snapshot) -> int:
        """Stores that serve any of this one's namespaces; at least itself."""
        mine = served(snapshot.status).keys()
        return max(1, sum(count for theirs, count in self._served.items() if not theirs.isdisjoint(mine)))

    def within(self, target: Target) -> Sequence[Target]:
        """What a change of the target changes: of a split, the remote and each host's DRAM as well."""
        hosts = [Target(snapshot.store, SPLIT.tier) for snapshot in self.fleet]
        return (target, REMOTE, *hosts) if target == SPLIT else (target,)

    def elsewhere(self, target: Target, *, wished: bool = False) -> dict[str, int]:
        """Capacity by tier that does not belong to the target; with what is ``wished``: as if that was approved."""
        remote = {"remote": self.shared.capacity or 0} if self.shared else {}
        return {**remote, **(self._wished if wished else self._made).elsewhere(target)}

    def own(self, target: Target) -> int:
        """Capacity of the target."""
        return self._made.own(target)

    def disallowed(self, decision: Decision) -> str:
        """Why its tuner may not make it by itself, nor a verdict set it back; empty: they may."""
        if decision.target.store == FLEET and not self.managed:
            return "the policy's remote.manage is off by now"
        mode = mode_of(self.rules.for_target(decision.target), decision.tuner)
        return "" if mode == "auto" else f"the policy's mode is {mode} by now"

    def note(self, decisions: Iterable[Decision]) -> set[str]:
        """Budgets pay for what these make larger from now on. Returns the stores that they concern."""
        concerned = set()
        for decision in decisions:
            for capacities in (self._wished,) if decision.state == State.PROPOSED else (self._wished, self._made):
                capacities.note(decision)
            concerned |= {decision.target.store, *(part.target.store for part in parts(decision))}
        return concerned

    def allowed(self, answer: Answer, paid: Budgeted | None) -> Answer:
        """By the budget that pays for the target. What a split has overspent the remote gives back."""
        if paid is None:
            return answer
        silent = self.managed and self.shared is None and paid.budget == "total"
        away = ", ".join([*self.missing, *(["the remote"] if silent else [])])
        return paid.known(answer if self.splits else paid.given_back(answer), away)

    @cached_property
    def _served(self) -> Counter[frozenset[str]]:
        """How many stores serve just these namespaces."""
        return Counter(frozenset(served(snapshot.status)) for snapshot in self.fleet)

    @cached_property
    def _made(self) -> Capacities:
        return Capacities(self.fleet)

    @cached_property
    def _wished(self) -> Capacities:
        return Capacities(self.fleet)


class Rounds:
    def __init__(
        self,
        history: History,
        changes: ChangeControl,
        frozen: Callable[[], str],
        *,
        now: Callable[[], datetime],
        window_s: float,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``timer`` counts seconds: a round asks for at most half a window. TunerError as of ``check``."""
        check()
        self._history = history
        self._changes = changes
        self._frozen = frozen
        self._now = now
        self._timer = timer
        self._half_s = window_s / 2
        self._slack = timedelta(seconds=window_s / 2)
        self._asked: dict[tuple[str, Target], tuple[datetime, datetime]] = {}
        """When each was, and when it is due again."""
        self._windows = TierWindows(history)
        self._hours = Hours()
        self._next = ""
        """The store that the last round had no time for."""

    def forget(self) -> None:
        """Read what is kept of windows from history again."""
        self._windows.forget()

    def heard(self, snapshots: Iterable[Snapshot]) -> None:
        """New windows, which history has already."""
        self._windows.heard(snapshots)

    def tune(self, snapshots: Sequence[Snapshot], this: Round) -> None:
        """Ask about stores, those first that the last round had no time for."""
        now = self._now()  # what is due, or of another time, is as if it was never asked; it may be there no more
        self._asked = {key: (at, due) for key, (at, due) in self._asked.items() if at <= now < due}
        with self._survey() as survey:
            started = self._timer()
            first = next((index for index, each in enumerate(snapshots) if each.store == self._next), 0)
            for snapshot in (*snapshots[first:], *snapshots[:first]):
                if self._timer() - started > self._half_s:
                    self._next = snapshot.store
                    break
                self._tune(snapshot, this, survey)

    def _tune(self, snapshot: Snapshot, this: Round, survey: Survey) -> None:
        """Ask about every target of a store. After a change the other tuners wait for the next window."""
        there = set()
        for kind in OF_STORES:
            for target in made(kind, this.policy).targets(snapshot.store, snapshot.status):
                there.add((kind.name, target))
                tuner = made(kind, this.rules.for_target(target))
                if self._due(tuner, target) and self._taken(tuner, target, snapshot, this, survey):
                    return
        survey.withdraw_gone(snapshot.store, there)

    def advise(self, sources: Sequence[Snapshot], this: Round) -> None:
        """Ask about what is only observed: nothing there can be set, so there is nothing but advice."""
        with self._survey() as survey:
            for snapshot, kind in product(sources, OF_SOURCES):
                for target in made(kind, this.policy).targets(snapshot.store, snapshot.status):
                    tuner = made(kind, this.rules.for_target(target))
                    if self._due(tuner, target):
                        self._taken(tuner, target, snapshot, this, survey)

    def tune_remote(self, this: Round) -> bool:
        """Ask about the remote, and the split of one budget. Whether anything was, or may have been changed."""
        shared = this.shared
        if shared is None:
            return False
        rule = shared.rule
        sized = REMOTE if shared.overspent() else shared.target
        asked = [(made(kind, rule), sized if kind.scope == "size" else REMOTE) for kind in OF_REMOTE]
        with self._survey() as survey:
            return any(
                self._due(tuner, target) and self._taken(tuner, target, shared.snapshot, this, survey)
                for tuner, target in asked
            )

    def leave_remote(self, why: str) -> None:
        """What was wished of it is wished no more."""
        with self._survey() as survey:
            for kind in OF_REMOTE:
                for target in (SPLIT, REMOTE) if kind.scope == "size" else (REMOTE,):
                    survey.answered(kind.name, target, NoChange(why))
                    survey.withdraw(kind.name, target, why)

    def _due(self, tuner: Tuner, target: Target) -> bool:
        now, (last, _) = self._now(), self._asked.get((tuner.name, target), (None, None))
        waits = timedelta(seconds=tuner.settings.look_s) - self._slack
        if last is not None and last <= now < last + waits:  # a clock that went back makes nothing wait
            return False
        self._asked[tuner.name, target] = now, now + waits
        return True

    @contextmanager
    def _survey(self) -> Iterator[Survey]:
        """Whose answers cannot be written are asked again when the database is back."""
        survey = Survey(self._history, self._now(), self._hours)
        try:
            try:
                yield survey
            finally:
                survey.write()
        except DatabaseError:
            for key in survey.asked:
                self._asked.pop(key, None)
            raise

    def _taken(self, tuner: Tuner, target: Target, snapshot: Snapshot, this: Round, survey: Survey) -> bool:
        """Ask, and take what is wished. Whether the store was changed, or may have been."""
        survey.asked.append((tuner.name, target))
        answer, rules = self._answer(tuner, target, snapshot, this, survey)
        survey.answered(tuner.name, target, answer)
        if not isinstance(answer, Proposal):
            survey.withdraw(tuner.name, target, answer.reason)
            return False
        version = int(snapshot.tuning.get("version", 0))
        try:
            made = self._changes.take(Wish(tuner.name, target, answer, rules.mode, version, this.revision))
        except Refused:  # an operator was quicker
            return True
        if made.state not in (State.FAILED, State.EXPIRED):
            this.note([made])
        return made.state != State.PROPOSED

    def _answer(
        self, tuner: Tuner, target: Target, snapshot: Snapshot, this: Round, survey: Survey
    ) -> tuple[Answer, Rules]:
        rule, last = this.rules.for_target(target), survey.last_change(tuner.name, *this.within(target))
        current = self._current(tuner, target, snapshot, this, survey)
        elsewhere, own = this.elsewhere(target, wished=mode_of(rule, tuner.name) != "auto"), this.own(target)
        rules = rules_for(rule, tuner.name, target.tier, elsewhere=elsewhere, own=own)
        sizes = tuner.scope == "size"
        if sizes and target.store == FLEET and this.shared is not None:
            return self._shared(tuner, current, this.shared, self._recent(rule, rules, target, last, survey))
        if sizes and target.tier == "dram" and this.splits:
            return NoChange("dram is set by the split of budgets.total between all hosts and the remote"), rules
        wished = tuner.evaluate(self._read(tuner, target, survey), _bounded(current, rules))
        if sizes:
            wished = this.allowed(wished, budgeted(rule.budgets, target.tier, elsewhere, own))
        if not isinstance(wished, Proposal):
            return wished, rules
        return guard(wished, rules, self._recent(rule, rules, target, last, survey)), rules

    def _shared(self, tuner: Tuner, current: Current, shared: Managed, recent: Recent) -> tuple[Answer, Rules]:
        target, rules, silence = current.target, shared.rules(current.target), shared.silence
        if silence is not None or rules.most is None:
            return silence or NoChange(NO_LIMIT), rules
        wished = guard(shared.overspent() or tuner.evaluate((), _bounded(current, rules)), rules, recent)
        if isinstance(wished, Proposal) and target == SPLIT:
            wished = shared.split(wished)
        return wished, rules

    def _current(self, tuner: Tuner, target: Target, snapshot: Snapshot, this: Round, survey: Survey) -> Current:
        rule, shared = this.rules.for_target(target), this.shared
        last = survey.last_change(tuner.name, *this.within(target))
        wide = tuner.scope in ("store", "fleet", "size")
        off = isinstance(tuner, RemoteFetch) and read(snapshot.tuning, FETCH) != "on"
        split = shared.budget if shared and target == SPLIT else None
        told = survey.prospects(target.namespace, horizon_s(tuner.settings.period)) if wide else ()
        return Current(
            target,
            snapshot.tuning,
            snapshot.status,
            changed_at=last.at if last else None,
            typical=self._typical(tuner, snapshot, target, survey) if off else None,
            prospects=concerning(told, target, snapshot),
            hosts=len(this.fleet) if target.store == FLEET else this.sharing(snapshot),
            rates=rates(rule.prices),
            holdout=rule.guard.holdout,
            budget_bytes=split.budget if split else None,
            remote_bytes=this.remote_bytes,
            stages=survey.stages() if tuner.scope == "fleet" else (),
        )

    def _typical(self, tuner: Tuner, snapshot: Snapshot, target: Target, survey: Survey) -> TypicalCandidate | None:
        """Where no request has ever found chunks in the tier, and while it is off none can, its prompts of late."""
        lately = POOL_PERIODS * timedelta(seconds=tuner.settings.period)
        return typical(self._history, target) or mean_prompt(snapshot, survey.store_windows(target.store, lately))

    def _read(self, tuner: Tuner, target: Target, survey: Survey) -> Sequence[Window]:
        """The windows that a tuner looks at."""
        if tuner.scope in ("fleet", "size"):
            return []
        if tuner.scope == "tier":
            return unbroken(self._windows.of(target.store, target.tier), self._now())
        period = timedelta(seconds=tuner.settings.period)
        if tuner.scope == "pool":
            since = self._now() - POOL_PERIODS * period
            return self._history.measured.pool_windows(
                target.store, since, tier=target.tier, namespace=target.namespace
            )
        return survey.store_windows(target.store, 2 * period)

    def _recent(self, rule: Rule, rules: Rules, target: Target, last: Made | None, survey: Survey) -> Recent:
        """A freeze is looked for when a change is near: it may be of this very moment."""
        now, watched = self._now(), survey.watched(target)
        return Recent(
            now=now,
            frozen=(self._frozen() or frozen_by(rule, now)) if rules.mode == "auto" else "",
            soaking=f"decision {watched.id} ({watched.field})" if watched else "",
            last=last,
            undone=survey.undone(target),
            changes_last_hour=survey.changes(target.store),
        )


def _bounded(current: Current, rules: Rules) -> Current:
    """The same with the capacities that the guard lets pass."""
    return replace(current, least_bytes=rules.least, most_bytes=rules.most)
