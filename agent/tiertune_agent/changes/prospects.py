"""Records what other sizes of the tiers would have cost, for the tuners to read."""

from dataclasses import dataclass, field

from tiertune_agent.changes.round import Round
from tiertune_agent.history.store import History
from tiertune_agent.records import Now
from tiertune_agent.whatif.fleet import FleetWhatif
from tiertune_agent.whatif.shapes import Split


@dataclass
class Prospects:
    history: History
    whatif: FleetWhatif
    now: Now
    window_s: float
    _last: Split | None = field(default=None, init=False)

    def forget(self) -> None:
        """Skip the time since this agent last led: another one has reported on it."""
        self.whatif.resume()

    def run(self, this: Round) -> None:
        """Read the fleet's samples, and remember the prospects that are due."""
        told = self.whatif.round(
            this.fleet,
            self.now(),
            every_s=this.policy.tuners.tier_size.look_s - self.window_s / 2,  # rounds are not punctual
            managed=this.managed,
            split=self._split(this),
        )
        if told:
            self.history.measured.remember_prospects(told)

    def _split(self, this: Round) -> Split | None:
        """The split of the last round in which all stores answered: a store that misses a round does not change it."""
        if not this.managed:
            self._last = None
        elif this.shared is not None and this.shared.complete:
            self._last = this.shared.budget
        return self._last
