"""Health of a tier that may hang or vanish: when to stop asking it, and when to ask again. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiertune_connector.tiers.base import Outcome

STATES = ("ok", "slow", "bypassed", "recovering", "dead")
_FAILURES_TO_OPEN = 3
_SUCCESSES_TO_CLOSE = 2
_BAD = frozenset({Outcome.ERROR, Outcome.TIMEOUT})


@dataclass
class Breaker:
    """Opens after three failures in a row; probes, which always pass, close it after two successes in a row."""

    state: str = "ok"
    """ok, slow (the last operation timed out), dead (open), recovering (one success since)."""
    reason: str = ""
    _failures: int = field(default=0, repr=False)
    _successes: int = field(default=0, repr=False)

    @property
    def open(self) -> bool:
        """Whether requests should not ask the tier."""
        return self.state in ("dead", "recovering")

    @property
    def unsettled(self) -> bool:
        """Whether one more probe would tell more: the tier has failed, or answered again, but not often enough yet."""
        return self.state == "recovering" or 0 < self._failures < _FAILURES_TO_OPEN

    def try_again(self) -> None:
        """Let requests ask a tier that has no probes: its next failure opens the breaker again."""
        if self.open:
            self.state, self.reason = "slow", "it is tried again"
            self._failures, self._successes = _FAILURES_TO_OPEN - 1, 0

    def record(self, outcome: Outcome) -> None:
        """One operation, or probe, ended so."""
        if outcome in _BAD:
            self._failures, self._successes = self._failures + 1, 0
            self.reason = f"{self._failures} operations in a row ended in {outcome.value}"
            if self.open or self._failures >= _FAILURES_TO_OPEN:
                self.state = "dead"
            elif outcome is Outcome.TIMEOUT:
                self.state = "slow"
            return
        self._failures, self._successes = 0, self._successes + 1
        if self.open and self._successes < _SUCCESSES_TO_CLOSE:
            self.state, self.reason = "recovering", "a probe succeeded"
        else:
            self.state, self.reason = "ok", ""


@dataclass(frozen=True)
class Breakers:
    """Health of a tier of several servers, each with a breaker that its own operations tell."""

    servers: Mapping[str, Breaker]

    @property
    def open(self) -> bool:
        """Only while no server is asked: else the others answer for their shares."""
        return all(breaker.open for breaker in self.servers.values())

    @property
    def unsettled(self) -> bool:
        return any(breaker.unsettled for breaker in self.servers.values())

    @property
    def state(self) -> str:
        """Slow while some servers are well and some are not."""
        states = {breaker.state for breaker in self.servers.values()}
        if len(states) == 1:
            return states.pop()
        return "recovering" if self.open else "slow"

    @property
    def reason(self) -> str:
        """Every server that is not well, by name."""
        unwell = [(name, breaker) for name, breaker in self.servers.items() if breaker.state != "ok"]
        if not unwell:
            return ""
        told = "; ".join(f"{name} is {breaker.state}: {breaker.reason}" for name, breaker in unwell)
        return f"{len(unwell)} of {len(self.servers)} servers: {told}"

    def try_again(self) -> None:
        for breaker in self.servers.values():
            breaker.try_again()

    def record(self, outcome: Outcome) -> None:
        """Nothing: what the tier answers as a whole says nothing of one server."""
