"""The managed remote: its place in the fleet, and one budget split between it and the hosts' DRAM. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tiertune_agent.fields import REMOTE_CAPACITY, JsonDict, capacity_field, capacity_of, read, replaced
from tiertune_agent.policy.document import Policy, Rule, rules_for, split_rules
from tiertune_agent.policy.guard import Rules
from tiertune_agent.records import FLEET, REMOTE, Snapshot, Target
from tiertune_agent.tuners.base import Answer, NoChange, Proposal, models
from tiertune_agent.whatif.shapes import Split, held
from tiertune_connector.tuning import LOCAL
from tiertune_connector.units import format_size

SPLIT = Target(FLEET, "dram")
DRAM = capacity_field("dram")
LITTLE = 0.01
"""Share of the hosts' DRAM that is not worth giving back: disks beside it give theirs in rounds of their own."""
NO_BOUND = "the remote has no bound (maxmemory 0): set one by hand first, to start from and to go back to"
NO_LIMIT = (
    "remote stays: nobody said how large it may get; set budgets.remote, budgets.total or tuners.tier_size.max.remote"
)


@dataclass(frozen=True)
class Managed:
    """The remote and all hosts, as they answered in one round."""

    policy: Policy
    remote: Snapshot
    fleet: Sequence[Snapshot]
    missing: Sequence[str] = ()
    """Stores that did not answer."""

    @property
    def rule(self) -> Rule:
        return self.policy.for_target(REMOTE)

    @property
    def complete(self) -> bool:
        return bool(self.fleet) and not self.missing

    @property
    def budget(self) -> Split | None:
        """What one budget leaves to both after the disks; None: DRAM and remote share none."""
        total = self.rule.budgets.total
        return None if total is None else Split(max(0, total - held(self.fleet, "disk")), max(1, len(self.fleet)))

    @property
    def target(self) -> Target:
        """What tier_size changes: all hosts' DRAM if one budget is split, else, or if it must give back, the remote."""
        wish = self.overspent()
        return REMOTE if self.budget is None or (wish and wish.field == REMOTE_CAPACITY) else SPLIT

    @property
    def capacity(self) -> int:
        """Bytes that the remote may hold; 0 also where Redis has no bound, which ``silence`` tells."""
        return int(read(self.remote.tuning, REMOTE_CAPACITY) or 0)

    @property
    def snapshot(self) -> Snapshot:
        """The remote, with the hosts' mean capacities of local tiers: the shape of the fleet."""
        tuning = self.remote.tuning
        for tier in LOCAL:
            tuning = replaced(tuning, capacity_field(tier), held(self.fleet, tier) // max(1, len(self.fleet)))
        return replace(self.remote, tuning=tuning)

    @property
    def silence(self) -> NoChange | None:
        """Why its size cannot be reasoned about now; None: it can."""
        if read(self.remote.tuning, REMOTE_CAPACITY) is None:
            return NoChange(NO_BOUND)
        if not self.complete:
            away = ", ".join(self.missing) or "no store"
            return NoChange(f"{away} did not answer: without all hosts nobody knows what is spent")
        bypassed = [snapshot.store for snapshot in self.fleet if snapshot.tuning.get("bypass")]
        return (
            NoChange(f"{', '.join(bypassed)} is bypassed: what is seen now is not what will be") if bypassed else None
        )

    def spent(self, sizes: Mapping[Target, int]) -> int:
        """Bytes of the hosts' DRAM and the remote, if some had these ``sizes``."""
        hosts = (sizes.get(Target(one.store, SPLIT.tier), capacity_of(one.tuning, SPLIT.tier)) for one in self.fleet)
        return sum(hosts) + sizes.get(REMOTE, self.capacity)

    @property
    def spare(self) -> int:
        """Bytes that the remote can give back."""
        return max(0, self.capacity - (self.rule.tuners.tier_size.min.remote or 0))

    def overspent(self) -> Proposal | None:
        """Have the remote give back what exceeds the budget, then the hosts' DRAM its share; None: they need not."""
        split, capacity, dram = self.budget, self.capacity, held(self.fleet, "dram")
        if split is None or dram + capacity <= split.budget:
            return None
        told = f"DRAM of all hosts has {format_size(dram)} and the remote {format_size(capacity)}"
        told += f", the budget leaves them {format_size(split.budget)}"
        if self.spare:
            return Proposal(REMOTE_CAPACITY, capacity, _left(split, dram), told)
        left, local = max(0, (self.rule.budgets.total or 0) - capacity), dram + held(self.fleet, "disk")
        before, after = dram // split.hosts, left * dram // max(1, local) // split.hosts
        return Proposal(DRAM, before, after, told) if after < (1 - LITTLE) * before else None

    def rules(self, target: Target) -> Rules:
        """Rules of tier_size. Bounds of a split apply to one host's DRAM; the remote has the rest of the budget."""
        rules = rules_for(self.rule, "tier_size", target.tier, elsewhere={})
        split = self.budget
        if target != SPLIT or split is None:
            return rules
        rules, wish = split_rules(rules, self.rule.tuners.tier_size, *split), self.overspent()
        if wish is None or wish.field != DRAM or rules.most is None:
            return rules
        return replace(rules, most=max(rules.most, wish.after))  # disks give their share, too, and not all of it DRAM

    def split(self, proposal: Proposal) -> Answer:
        """Change the hosts' DRAM, and give the remote what that leaves of the budget; steps that shrink come first."""
        split, capacity, sizes = self.budget, self.capacity, self.rule.tuners.tier_size
        now = held(self.fleet, "dram")  # the proposal has the mean, which is rounded
        factor = proposal.after * len(self.fleet) / now if now else None
        steps = list(self._hosts(factor, int(proposal.after)))
        if split is None or not steps:
            return NoChange(f"no host may change; wished {proposal.before} to {proposal.after}: {proposal.reason}")
        dram = now + sum(step["to"] - step["from"] for step in steps)
        remote = _within(_left(split, dram), capacity, sizes.min.remote, sizes.max.remote)
        if remote != capacity:
            steps.append(_step(REMOTE, REMOTE_CAPACITY, capacity, remote))
        steps.sort(key=lambda step: bool(step["to"] > step["from"]))
        told = f"{proposal.reason}; remote {format_size(capacity)} to {format_size(remote)}"
        evidence = {**proposal.evidence, "split": steps}
        return replace(proposal, after=dram // split.hosts, reason=told, evidence=evidence)

    def _hosts(self, factor: float | None, each: int) -> Iterator[JsonDict]:
        """Steps in which hosts keep their proportions, within what the policy allows each."""
        for snapshot in self.fleet:
            target = host(snapshot)
            sizes = self.policy.for_target(target).tuners.tier_size
            before = capacity_of(snapshot.tuning, "dram")
            wanted = each if factor is None else int(factor * before)
            after = _within(wanted, before, sizes.min.dram, sizes.max.dram)
            if after != before:
                yield _step(target, DRAM, before, after)


def _left(split: Split, dram: int) -> int:
    """Bytes of the budget that DRAM leaves to the remote; of what rounding leaves none: a byte holds nothing."""
    left = split.budget - dram
    return left if left > 2 * split.hosts else 0


def host(snapshot: Snapshot) -> Target:
    """DRAM of one host."""
    return Target(snapshot.store, SPLIT.tier, models=models(snapshot.status))


def _step(target: Target, field: str, before: int, after: int) -> JsonDict:
    served = {"models": [*target.models]} if target.models else {}
    return {"store": target.store, "tier": target.tier, "field": field, "from": before, "to": after, **served}


def _within(wanted: int, before: int, least: int | None, most: int | None) -> int:
    """``wanted`` within bounds; a size outside them is neither moved further out nor forced back in."""
    raised = wanted if least is None else max(wanted, min(before, least))
    return raised if most is None else min(raised, max(before, most))
