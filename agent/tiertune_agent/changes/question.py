"""One tuner asked about one target: what it reads, what it answers, and what of that the guard lets pass."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from tiertune_agent.changes.round import Round
from tiertune_agent.changes.survey import Survey, concerning
from tiertune_agent.fields import read
from tiertune_agent.policy.budgets import budgeted
from tiertune_agent.policy.document import Rule, frozen_by, mode_of, rates, rules_for
from tiertune_agent.policy.guard import Recent, Rules, forbidden, guard
from tiertune_agent.records import FLEET, Made, Now, Snapshot, Target, Windows
from tiertune_agent.remote.split import NO_LIMIT, SPLIT, Managed, host
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, Tuner, pools
from tiertune_agent.tuners.gate_settings import TRIED_AGAIN
from tiertune_agent.tuners.remote_fetch import FIELD as FETCH
from tiertune_agent.tuners.remote_fetch import RemoteFetch
from tiertune_agent.tuners.tier_size import horizon
from tiertune_agent.whatif.terms import mean_prompt

POOL_PERIODS = 10
"""Periods that a tuner looks back when it reads a pool's ghosts or a store's prompts."""


@dataclass(frozen=True)
class Question:
    tuner: Tuner
    target: Target
    snapshot: Snapshot
    """Of the store that has the target."""
    this: Round
    survey: Survey
    now: Now
    frozen: Callable[[], str]
    """Why a command forbids changes; empty: none does."""

    def answer(self) -> Answer:
        """The tuner's answer, bounded or refused by the guard."""
        if self._of_fleet is not None:
            return self._shared(self._of_fleet)
        if self._sizes and self.target.tier == "dram" and self.this.splits:
            return NoChange("dram is set by the split of budgets.total between all hosts and the remote")
        wished = self.tuner.evaluate(self._windows(), self._current())
        if self._sizes:
            spent = self.this.elsewhere(self.target)
            paid = budgeted(self._rule.budgets, self.target.tier, spent, self.this.own(self.target))
            wished = self.this.allowed(wished, paid)
        return guard(wished, self.rules, self._recent()) if isinstance(wished, Proposal) else wished

    @cached_property
    def rules(self) -> Rules:
        """The guard's rules for this tuner and target."""
        if self._of_fleet is not None:
            return self._of_fleet.rules(self.target)
        elsewhere = self.this.elsewhere(self.target, mode_of(self._rule, self.tuner.name))
        own = self.this.own(self.target)
        return rules_for(self._rule, self.tuner.name, self.target.tier, elsewhere=elsewhere, own=own)

    def _shared(self, shared: Managed) -> Answer:
        """The answer on the remote's size, or on the split of one budget."""
        if shared.silence is not None or self.rules.most is None:
            return shared.silence or NoChange(NO_LIMIT)
        wished = shared.overspent() or self.tuner.evaluate((), self._current())
        wished = guard(wished, self.rules, self._recent())
        if not isinstance(wished, Proposal) or self.target != SPLIT:
            return wished
        split = shared.split(wished)
        why = self._spared(split) if isinstance(split, Proposal) and self.rules.mode == "auto" else ""
        return NoChange(f"nothing is split: {why}; wished {wished.reason}", wished.evidence) if why else split

    def _spared(self, split: Proposal) -> str:
        """Why the policy forbids a change of some host that the split would change; empty: it does not."""
        changed = {step["store"] for step in split.evidence["split"]}
        for target in (host(snapshot) for snapshot in self.this.fleet if snapshot.store in changed):
            store = target.store
            rule = self.this.rule(target)
            rules = rules_for(rule, self.tuner.name, target.tier, elsewhere={})
            if rules.mode != "auto":
                return f"{store} is in mode {rules.mode}"
            recent = Recent(self.now(), frozen_by(rule, self.now()), changes_last_hour=self.survey.changes[store])
            if why := forbidden(rules, recent):
                return f"{store}: {why}"
        return ""

    @property
    def _sizes(self) -> bool:
        """Whether the question is about capacities, which budgets pay for."""
        return self.tuner.scope == "size"

    @property
    def _of_fleet(self) -> Managed | None:
        """What the question is about if that is the remote's size or a split; None: neither."""
        return self.this.shared if self._sizes and self.target.store == FLEET else None

    @cached_property
    def _rule(self) -> Rule:
        return self.this.rule(self.target)

    @cached_property
    def _last(self) -> Made | None:
        """The tuner's last change of anything that this question may change."""
        return self.survey.last_change(self.tuner.name, *self.this.within(self.target))

    def _windows(self) -> Windows:
        """The windows that the tuner looks at."""
        scope, period = self.tuner.scope, timedelta(seconds=self.tuner.settings.period)
        if scope in ("fleet", "size"):
            return []
        if scope == "tier":
            return self.survey.tier_windows(self.target)
        if scope == "pool":
            return self.survey.pool_windows(self.target, POOL_PERIODS * period)
        return self.survey.store_windows(self.target.store, 2 * period)

    def _current(self) -> Current:
        """How things stand, with the capacities that the guard lets pass."""
        tuner, target, snapshot, this = self.tuner, self.target, self.snapshot, self.this
        wide = tuner.scope in ("store", "fleet", "size")
        off = isinstance(tuner, RemoteFetch) and read(snapshot.tuning, FETCH) != "on"
        split = this.shared.budget if this.shared and target == SPLIT else None
        told = self.survey.prospects(target.namespace, horizon(tuner.settings.period)) if wide else ()
        typical = self.survey.typical(target) if off else None
        fresh = typical and self._last and self.now() - self._last.at < TRIED_AGAIN
        if off and not fresh:  # none is seen while off, and engines may serve another model by now
            back = POOL_PERIODS * timedelta(seconds=tuner.settings.period)
            lately = self.survey.prompts(target.store, pools(snapshot.status), back)
            typical = mean_prompt(snapshot, lately) or typical
        return Current(
            target,
            snapshot.tuning,
            snapshot.status,
            last=self._last,
            typical=typical,
            prospects=concerning(told, target, snapshot),
            hosts=this.hosts(target, snapshot),
            rates=rates(self._rule.prices),
            holdout=self._rule.guard.holdout,
            budget_bytes=split.budget if split else None,
            remote_bytes=this.remote_bytes,
            least_bytes=self.rules.least,
            most_bytes=self.rules.most,
            stages=self.survey.stages if tuner.scope == "fleet" else (),
        )

    def _recent(self) -> Recent:
        """What happened lately. Freezes are read only now that a change is near, so that even a new one counts."""
        now, watched = self.now(), self.survey.watched(self.target)
        return Recent(
            now=now,
            frozen=(self.frozen() or frozen_by(self._rule, now)) if self.rules.mode == "auto" else "",
            soaking=f"decision {watched.id} ({watched.field})" if watched else "",
            last=self._last,
            undone=self.survey.undone(self.target),
            changes_last_hour=self.survey.changes[self.target.store],
        )
