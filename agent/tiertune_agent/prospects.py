"""Keeps what other sizes of the tiers would have cost, for the tuners to read."""

from collections.abc import Callable
from datetime import datetime

from tiertune_agent.history.store import History
from tiertune_agent.rounds import Round
from tiertune_agent.whatif import FleetWhatif


class Prospects:
    def __init__(self, history: History, whatif: FleetWhatif, now: Callable[[], datetime]) -> None:
        self._history = history
        self._whatif = whatif
        self._now = now

    @property
    def missed(self) -> int:
        """Samples that stores dropped before they were read."""
        return self._whatif.missed

    def run(self, this: Round) -> None:
        """Read the fleet's samples; remember the prospects that are due."""
        policy = this.policy
        told = self._whatif.round(
            this.fleet,
            self._now(),
            every_s=policy.tuners.tier_size.period,
        )
        if told:
            self._history.remember_prospects(told)
