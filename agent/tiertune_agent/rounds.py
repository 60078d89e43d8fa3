"""One round of tuning: asks every tuner whose period is over, passes what it wishes through the guard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import chain

from tiertune_agent.change import ChangeControl, Refused, Wish
from tiertune_agent.fields import read
from tiertune_agent.guard import Recent, Rules, guard
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.history.store import History
from tiertune_agent.policy import Policy, Rule, frozen_by, rates, rules_for
from tiertune_agent.records import FLEET, Made, Snapshot, State, Target, Window, unbroken
from tiertune_agent.shapes import remote_bytes
from tiertune_agent.split import NO_LIMIT, REMOTE, SPLIT, Managed
from tiertune_agent.tuners.admission import Admission
from tiertune_agent.tuners.advice import Balance, Routing, Sharing
from tiertune_agent.tuners.base import Answer, Candidate, Current, NoChange, Proposal, Tuner
from tiertune_agent.tuners.eviction import Eviction
from tiertune_agent.tuners.gate_settings import GateSettings
from tiertune_agent.tuners.holdout import Holdout
from tiertune_agent.tuners.remote_fetch import RemoteFetch, typical_candidate
from tiertune_agent.tuners.remote_policy import RemotePolicy
from tiertune_agent.tuners.tier_size import TierSize, horizon_s

HOUR = timedelta(hours=1)
POOL_PERIODS = 10
"""Of a tuner that reads the ghosts of a pool: so far back."""
MEMORY = timedelta(days=30)
"""Rollbacks are remembered for so long."""


def tuners(rule: Rule) -> tuple[Tuner, ...]:
    """All tuners, as the rules set them."""
    return (
        RemoteFetch(rule.tuners.remote_fetch),
        GateSettings(rule.tuners.remote_fetch),
        Holdout(rule.tuners.remote_fetch, rule.guard.holdout),
        TierSize(rule.tuners.tier_size),
        Eviction(rule.tuners.eviction),
        Admission(rule.tuners.admission),
        Routing(rule.tuners.advice),
        Sharing(rule.tuners.advice),
        Balance(rule.tuners.advice),
    )


def typical(history: History, target: Target) -> Candidate | None:
    """What a typical candidate of the tier was, when there last were any."""
    return typical_candidate(history.candidate_windows(target.store, target.tier))


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

    @property
    def known(self) -> dict[str, Snapshot]:
        """All that decisions may concern, by name; the fleet only where all of it answered."""
        known = {snapshot.store: snapshot for snapshot in self.fleet}
        return {**known, FLEET: self.shared.snapshot} if self.shared and self.shared.complete else known

    @property
    def splits(self) -> bool:
        """Whether one budget is split between DRAM and the remote, so that no host's DRAM is set by itself."""
        return self.managed and self.policy.for_target(REMOTE).budgets.total is not None

    def elsewhere(self, target: Target) -> dict[str, int]:
        """Capacity by tier that does not belong to the target."""
        paid: dict[str, int] = {"remote": self.shared.capacity or 0} if self.shared else {}
        for tier in ("dram", "disk"):
            if self.fleet:
                own = self._capacities.get(target.store, {}).get(tier, 0) if target.tier == tier else 0
                paid[tier] = self._paid[tier] - own
        return paid

    @cached_property
    def _capacities(self) -> dict[str, dict[str, int]]:
        """By store and tier."""
        return {
            snapshot.store: {
                tier: int(read(snapshot.tuning, f"tiers.{tier}.capacity_bytes") or 0) for tier in ("dram", "disk")
            }
            for snapshot in self.fleet
        }

    @cached_property
    def _paid(self) -> dict[str, int]:
        """By tier, of the whole fleet: summed up once, for every target asks."""
        return {tier: sum(held[tier] for held in self._capacities.values()) for tier in ("dram", "disk")}


class Rounds:
    def __init__(
        self,
        history: History,
        changes: ChangeControl,
        frozen: Callable[[], str],
        *,
        now: Callable[[], datetime],
        window_s: float,
    ) -> None:
        self._history = history
        self._changes = changes
        self._frozen = frozen
        self._now = now
        self._slack = timedelta(seconds=window_s / 2)
        self._asked: dict[tuple[str, Target], datetime] = {}

    def tune(self, snapshot: Snapshot, this: Round) -> None:
        """Ask about every target of a store. After a change the other tuners wait for the next window."""
        for index, every in enumerate(tuners(this.policy)):
            for target in every.targets(snapshot.store, snapshot.status):
                rule = this.policy.for_target(target)
                tuner = tuners(rule)[index]
                if self._due(tuner, target) and self._changed(tuner, target, snapshot, rule=rule, this=this):
                    return

    def tune_remote(self, this: Round) -> bool:
        """Ask about the remote, and the split of one budget. Whether anything was, or may have been changed."""
        shared = this.shared
        if shared is None:
            return False
        rule = shared.rule
        asked: list[tuple[Tuner, Target]] = [
            (TierSize(rule.tuners.tier_size), REMOTE if shared.overspent() else shared.target),
            (RemotePolicy(rule.tuners.eviction), REMOTE),
        ]
        return any(
            self._due(tuner, target) and self._changed(tuner, target, shared.snapshot, rule=rule, this=this)
            for tuner, target in asked
        )

    def leave_remote(self, why: str) -> None:
        """What was wished of it is wished no more."""
        now, decisions = self._now(), self._history.decisions
        for name, target in ((TierSize.name, SPLIT), (TierSize.name, REMOTE), (RemotePolicy.name, REMOTE)):
            decisions.answer(name, target, NoChange(why), now)
            decisions.withdraw(name, target, why, now=now)

    def _due(self, tuner: Tuner, target: Target) -> bool:
        now, last = self._now(), self._asked.get((tuner.name, target))
        if last is not None and now < last + timedelta(seconds=tuner.settings.period) - self._slack:
            return False
        self._asked[tuner.name, target] = now
        return True

    def _changed(self, tuner: Tuner, target: Target, snapshot: Snapshot, *, rule: Rule, this: Round) -> bool:
        """Ask, and take what is wished. Whether the store was changed, or may have been."""
        try:
            return self._taken(tuner, target, snapshot, rule=rule, this=this)
        except DatabaseError:
            self._asked.pop((tuner.name, target), None)  # ask again when the database is back
            raise

    def _taken(self, tuner: Tuner, target: Target, snapshot: Snapshot, *, rule: Rule, this: Round) -> bool:
        answer, rules = self._answer(tuner, target, snapshot, rule=rule, this=this)
        self._history.decisions.answer(tuner.name, target, answer, self._now())
        if not isinstance(answer, Proposal):
            self._history.decisions.withdraw(tuner.name, target, answer.reason, now=self._now())
            return False
        version = int(snapshot.tuning["version"])
        try:
            made = self._changes.take(Wish(tuner.name, target, answer, rules.mode, version, this.revision))
        except Refused:  # an operator was quicker
            return True
        return made.state != State.PROPOSED

    def _answer(
        self, tuner: Tuner, target: Target, snapshot: Snapshot, *, rule: Rule, this: Round
    ) -> tuple[Answer, Rules]:
        last = self._history.decisions.last_change(tuner.name, target)
        current = self._current(tuner, target, snapshot, last, this)
        elsewhere = this.elsewhere(target)
        rules = rules_for(rule, tuner.name, target.tier, advisory=tuner.advisory, elsewhere=elsewhere)
        if tuner.name == TierSize.name and target.store == FLEET and this.shared is not None:
            return self._shared(tuner, current, this.shared, self._recent(rule, target, last))
        if tuner.name == TierSize.name and target.tier == "dram" and this.splits:
            return NoChange("dram is set by the split of budgets.total between all hosts and the remote"), rules
        wished = tuner.evaluate(self._windows(tuner, target), current)
        if not isinstance(wished, Proposal):
            return wished, rules
        return guard(wished, rules, self._recent(rule, target, last)), rules

    def _shared(self, tuner: Tuner, current: Current, shared: Managed, recent: Recent) -> tuple[Answer, Rules]:
        target, rules, silence = current.target, shared.rules(current.target), shared.silence
        if silence is not None or rules.most is None:
            return silence or NoChange(NO_LIMIT), rules
        wished = guard(shared.overspent() or tuner.evaluate((), current), rules, recent)
        if isinstance(wished, Proposal) and target == SPLIT:
            wished = shared.split(wished)
        return wished, rules

    def _current(self, tuner: Tuner, target: Target, snapshot: Snapshot, last: Made | None, this: Round) -> Current:
        now, period_s = self._now(), tuner.settings.period
        wide, history, shared = tuner.scope in ("store", "fleet"), self._history, this.shared
        split = shared.budget if shared and target == SPLIT else None
        return Current(
            target,
            snapshot.tuning,
            snapshot.status,
            changed_at=last.at if last else None,
            goal=last.goal if last else None,
            typical=typical(history, target),
            prospects=history.prospects(target.namespace, now - timedelta(seconds=horizon_s(period_s))) if wide else (),
            hosts=len(this.fleet),
            rates=rates(this.policy.for_target(target).prices),
            budget_bytes=split.budget if split else None,
            remote_bytes=(shared.capacity or 0) if shared else remote_bytes(this.fleet),
            stages=history.stage_windows(now - HOUR) if tuner.scope == "fleet" else (),
        )

    def _windows(self, tuner: Tuner, target: Target) -> list[Window]:
        if tuner.scope == "fleet":
            return []
        if tuner.scope == "tier":
            windows = self._history.windows(target.store, tier=target.tier, namespace=target.namespace)
            return unbroken(windows, self._now())
        period = timedelta(seconds=tuner.settings.period)
        if tuner.scope == "pool":
            since = self._now() - POOL_PERIODS * period
            found = [
                self._history.windows_since(target.store, since, tier=tier, namespace=target.namespace)
                for tier in (target.tier, "")
            ]  # ghosts are counted with no tier
            return sorted(chain(*found), key=lambda window: window.start)
        return self._history.store_windows(target.store, self._now() - 2 * period)

    def _recent(self, rule: Rule, target: Target, last: Made | None) -> Recent:
        now, decisions = self._now(), self._history.decisions
        watched = decisions.watched(target)
        return Recent(
            now=now,
            frozen=self._frozen() or frozen_by(rule, now),
            soaking=f"decision {watched.id} ({watched.field})" if watched else "",
            last=last,
            undone=decisions.undone(target, now - MEMORY),
            changes_last_hour=decisions.changes_since(target.store, now - HOUR),
        )
