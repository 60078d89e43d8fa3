"""What the fleet's budgets pay for, and what they leave to one tier of one store. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import model_validator

from tiertune_agent.fields import capacity_field, capacity_of
from tiertune_agent.records import Decision, Snapshot, Target, parts
from tiertune_agent.tuners.base import Answer, NoChange, Proposal
from tiertune_connector.documents import Document
from tiertune_connector.tuning import LOCAL
from tiertune_connector.units import Size, format_size


class Budgets(Document):
    """Bytes of the whole fleet. What is above one is given back; nothing grows while a store is away."""

    dram: Size | None = None
    """For all stores together; None: no bound."""
    disk: Size | None = None
    """For all stores together; None: no bound."""
    remote: Size | None = None
    """For the Redis, if ``remote.manage`` is on; None: no bound."""
    total: Size | None = None
    """For all tiers together, instead of the others; with ``remote.manage`` it is split between DRAM and remote."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Budgets":
        if self.total is not None and (self.dram, self.disk, self.remote) != (None, None, None):
            raise ValueError("give either total or budgets by tier")
        return self


@dataclass(frozen=True)
class Budgeted:
    """One tier of one store, and the budget that pays for it."""

    tier: str
    budget: str
    """Its name."""
    nbytes: int
    """Bytes of the whole budget."""
    elsewhere: int
    """Bytes that the budget pays for outside of this tier."""
    own: int
    """Bytes of this tier."""

    @property
    def overspent(self) -> bool:
        return self.own + self.elsewhere > self.nbytes

    @property
    def left(self) -> int:
        """Bytes that this tier may have: all that others leave, or its proportional share of an overspent budget."""
        paid = self.own + self.elsewhere
        return self.nbytes * self.own // paid if self.overspent else self.nbytes - self.elsewhere

    def given_back(self, answer: Answer) -> Answer:
        """If the budget is overspent: give back at least this tier's share, whatever else is wished."""
        wished = answer.after if isinstance(answer, Proposal) else self.own
        if not self.overspent or wished <= self.left:
            return answer
        spent = f"{format_size(self.own + self.elsewhere)} of {format_size(self.nbytes)}"
        told = f"budgets.{self.budget} is overspent, {spent}: every tier gives back its share"
        return Proposal(capacity_field(self.tier), self.own, self.left, told)

    def known(self, answer: Answer, away: str) -> Answer:
        """Refuse growth while somebody is ``away`` (who; empty: nobody)."""
        if not away or not isinstance(answer, Proposal) or answer.after <= self.own:
            return answer
        told = f"{away} did not answer: nobody knows what of budgets.{self.budget} is spent"
        return NoChange(f"{told}; wished {answer.before} to {answer.after}: {answer.reason}", answer.evidence)


def budgeted(budgets: Budgets, tier: str, elsewhere: Mapping[str, int], own: int) -> Budgeted | None:
    """The budget for a tier; None: no budget pays for it. ``elsewhere``: bytes by tier."""
    if budgets.total is not None:
        return Budgeted(tier, "total", budgets.total, sum(elsewhere.values()), own)
    nbytes: int | None = getattr(budgets, tier)
    return None if nbytes is None else Budgeted(tier, tier, nbytes, elsewhere.get(tier, 0), own)


class Capacities:
    """What every store may hold in its local tiers, as last read.

    Until the next reading, a change that may have grown a tier counts already, and one that shrank it does not yet.
    """

    def __init__(self, fleet: Iterable[Snapshot]) -> None:
        self._held: Mapping[str, dict[str, int]] = {
            snapshot.store: {tier: capacity_of(snapshot.tuning, tier) for tier in LOCAL} for snapshot in fleet
        }
        self._paid: dict[str, int] = {tier: sum(held[tier] for held in self._held.values()) for tier in LOCAL}

    def note(self, decision: Decision) -> None:
        """Count a change that was made, or may be made."""
        for part in parts(decision):
            held, tier = self._held.get(part.target.store), part.target.tier
            if held is not None and part.field == capacity_field(tier):
                more = max(0, int(part.before) - held[tier], int(part.after) - held[tier])
                held[tier] += more
                self._paid[tier] += more

    def own(self, target: Target) -> int:
        """Bytes of the target; 0 where nothing was read of it."""
        return self._held.get(target.store, {}).get(target.tier, 0)

    def elsewhere(self, target: Target) -> dict[str, int]:
        """Bytes by tier that do not belong to the target; the sums are kept, as every target asks."""
        return {tier: paid - (self.own(target) if tier == target.tier else 0) for tier, paid in self._paid.items()}
