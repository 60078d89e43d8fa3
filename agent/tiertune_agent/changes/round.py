"""The facts of one round of tuning: the policy, who answered, what their tiers may hold; and what these permit."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from math import inf
from typing import get_args

from tiertune_agent.fields import in_force
from tiertune_agent.policy.budgets import Budgeted, Capacities
from tiertune_agent.policy.document import Policy, Rule, frozen_by, mode_of, rules_for
from tiertune_agent.records import FLEET, REMOTE, Decision, Snapshot, State, Target, parts
from tiertune_agent.remote.split import SPLIT, Managed, host
from tiertune_agent.tuners.base import Answer, Mode, served
from tiertune_agent.tuners.tier_size import TierSize
from tiertune_agent.whatif.shapes import remote_bytes
from tiertune_connector.units import format_size


@dataclass(frozen=True)
class Round:
    """The facts of one round: the policy in force, and every store that answered; and what these permit."""

    policy: Policy
    revision: int
    fleet: Sequence[Snapshot]
    managed: bool = False
    """Whether the agent sets the remote's capacity."""
    shared: Managed | None = None
    """None: the remote is not managed, or does not answer now."""
    missing: Sequence[str] = ()
    """Stores that did not answer."""

    def rule(self, target: Target) -> Rule:
        """The policy's rules for a target."""
        return self.policy.for_target(target)

    @cached_property
    def snapshots(self) -> dict[str, Snapshot]:
        """The fleet by name."""
        return {snapshot.store: snapshot for snapshot in self.fleet}

    def snapshot_of(self, target: Target) -> Snapshot | None:
        """Of the store that has the target; of a split only if the whole fleet answered, as it is of all hosts."""
        if target.store != FLEET:
            return self.snapshots.get(target.store)
        return self.shared.snapshot if self.shared and (self.shared.complete or target == REMOTE) else None

    @cached_property
    def splits(self) -> bool:
        """Whether one budget is split between DRAM and the remote, so that no host's DRAM is set by itself."""
        return self.managed and self.policy.for_target(REMOTE).budgets.total is not None

    @cached_property
    def remote_bytes(self) -> int:
        """Capacity of the remote tier."""
        return self.shared.capacity if self.shared else remote_bytes(self.fleet)

    def hosts(self, target: Target, snapshot: Snapshot) -> int:
        """Number of stores that a target's sizes are simulated for: of a store, those that serve any namespace of its.

        At least one, itself.
        """
        if target.store == FLEET:
            return len(self.fleet)
        mine = served(snapshot.status).keys()
        return max(1, sum(count for theirs, count in self._served.items() if not theirs.isdisjoint(mine)))

    def within(self, target: Target) -> Sequence[Target]:
        """What a change of the target changes: for a split, the remote and each host's DRAM as well."""
        hosts = [Target(snapshot.store, SPLIT.tier) for snapshot in self.fleet]
        return (target, REMOTE, *hosts) if target == SPLIT else (target,)

    def elsewhere(self, target: Target, mode: Mode = "auto") -> dict[str, int]:
        """Bytes by tier that do not belong to the target, for one in this mode.

        On recommend as if what may be approved was, too; on observe as if all was that is wished.
        """
        remote = {"remote": self.shared.capacity} if self.shared else {}
        return {**remote, **self._capacities[mode].elsewhere(target)}

    def own(self, target: Target) -> int:
        """Capacity of the target in bytes."""
        return self._capacities["auto"].own(target)

    def note(self, decisions: Iterable[Decision]) -> None:
        """Count what these grow against the budgets from now on."""
        for decision in decisions:
            made = decision.state != State.PROPOSED
            for mode, capacities in self._capacities.items():
                if made or mode == "observe" or (mode == "recommend" and decision.mode != "observe"):
                    capacities.note(decision)

    def allowed(self, answer: Answer, paid: Budgeted | None) -> Answer:
        """Limit the answer to the budget that pays for the target. Of a split, the remote gives back first."""
        if paid is None:
            return answer
        silent = self.managed and self.shared is None and paid.budget == "total"
        away = ", ".join([*self.missing, *(["the remote"] if silent else [])])
        later = self.splits and (self.shared is None or self.shared.spare > 0)
        return paid.known(answer if later else paid.given_back(answer), away)

    @cached_property
    def _served(self) -> Counter[frozenset[str]]:
        """Number of stores by the exact set of namespaces that they serve."""
        return Counter(frozenset(served(snapshot.status)) for snapshot in self.fleet)

    @cached_property
    def _capacities(self) -> Mapping[Mode, Capacities]:
        """What stores may hold, by the mode of the tuner that asks."""
        return {mode: Capacities(self.fleet) for mode in get_args(Mode)}

    def frozen(self, decision: Decision, now: datetime) -> str:
        """Why the policy's calendar forbids now to make a decision, or to set it back; empty: it does not."""
        return next(filter(None, (frozen_by(rule, now) for rule in self._rules(decision))), "")

    def mode(self, decision: Decision) -> Mode:
        """The policy's mode for a decision by now; of a split, auto only if it is for each host that it sets."""
        modes = (mode_of(rule, decision.tuner) for rule in self._rules(decision))
        return next((mode for mode in modes if mode != "auto"), "auto")

    def disallowed(self, decision: Decision) -> str:
        """Why neither its tuner may make a decision by itself, nor a verdict set it back; empty: they may."""
        if decision.target.store == FLEET and not self.managed:
            return "the policy's remote.manage is off by now"
        mode = self.mode(decision)
        if mode != "auto":
            return f"the policy's mode is {mode} by now"
        return self.unpaid(decision, back=decision.undo is not None)

    def unpaid(self, decision: Decision, *, back: bool) -> str:
        """Why bounds and budgets forbid what a decision sets, with ``back`` what its undo sets; empty: they do not."""
        if decision.tuner != TierSize.name:
            return ""
        shared = self.shared
        moves = [
            (part.target, part.after, part.before) if back else (part.target, part.before, part.after)
            for part in parts(decision)
        ]
        if shared and shared.budget and decision.target == SPLIT:
            held = {replace(target, models=()): to for target, _, to in moves}
            spent = shared.spent(held) - len(moves)  # each is rounded to bytes
            sizes: list[tuple[float, float]] = [(spent, max(shared.budget.budget, shared.spent({})))]
            for target, was, to in moves:
                most = getattr(self._rule_of_part(target).tuners.tier_size.max, target.tier)
                grows = to > was and not self._left(target)
                sizes += [(to, max(was, most))] if most is not None and grows else []
        else:
            sizes = [(to, self._most(target)) for target, was, to in moves if to > was]
        told = (f"bounds and budgets leave {format_size(most)} by now" for size, most in sizes if size > most)
        return next(told, "")

    def makeable(self, wish: Decision) -> bool:
        """Whether all that a wish sets has the value from before: else it cannot be approved any more."""
        found = ((part, self.snapshot_of(part.target)) for part in parts(wish))
        return all(there and in_force(there.tuning, part.field) == part.before for part, there in found)

    def _rules(self, decision: Decision) -> list[Rule]:
        """The rules for a decision's target; for a split, also those for each host that it sets."""
        others = [part.target for part in parts(decision) if part.target.store != decision.target.store]
        return [self.rule(decision.target), *(self._rule_of_part(one) for one in others if not self._left(one))]

    def _left(self, target: Target) -> bool:
        """Whether it is a host's that has left the fleet, where nothing is set any more."""
        return target.store not in {FLEET, *self.snapshots} and not self.missing

    def _rule_of_part(self, target: Target) -> Rule:
        """The rules for a part of a split, by what models its host serves by now; if it does not say, served then."""
        snapshot = self.snapshots.get(target.store)
        return self.rule(host(snapshot) if snapshot else target)

    def _most(self, target: Target) -> float:
        """Bytes that a tier may have: those it has, or more if the policy allows more."""
        shared = self.shared
        if target == REMOTE:
            own, rules = (shared.capacity, shared.rules(target)) if shared else (0, None)
        else:
            own, elsewhere = self.own(target), self.elsewhere(target)
            rules = rules_for(self._rule_of_part(target), TierSize.name, target.tier, elsewhere=elsewhere, own=own)
        return inf if rules is None or rules.most is None else max(own, rules.most)
