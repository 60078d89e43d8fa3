"""Health of a tier that may hang or vanish: when to stop asking it, and when to ask again. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tiertune_connector.tiers.base import Outcome

STATES = ("ok", "slow", "bypassed", "recovering", "dead")
_FAILURES_TO_OPEN = 3
_REFUSED_TO_PAUSE = 8
"""Writes in a row: a pool with room for hardly any chunk may be wholly in use for a moment."""
_BAD = frozenset({Outcome.ERROR, Outcome.TIMEOUT})


class Breaker:
    """Opens after three failures in a row; probes, which always pass, close it after two successes in a row.

    A tier without room is read but not written, until a write that is let through finds room.
    """

    servers: Mapping[str, "Breaker"] = MappingProxyType({})
    """Those of a tier of several servers (`Breakers`)."""
    state = "ok"
    """ok, slow (the last operation timed out, or it is full), dead, recovering (one success since)."""
    reason = ""
    open = False
    """Whether requests should not ask the tier."""
    paused = False
    """Whether lack of room forbids writes."""
    _failures = _refused = 0

    @property
    def unwell(self) -> bool:
        """Whether the last operation failed, or requests should not ask."""
        return self.open or self._failures > 0

    @property
    def unsettled(self) -> bool:
        """Whether one more probe would help: the tier failed, or answered again, but not often enough yet."""
        return self.state == "recovering" or 0 < self._failures < _FAILURES_TO_OPEN

    def refuses(self, _key: bytes) -> bool:
        """Whether a chunk should not be written now."""
        return self.open or self.paused

    def try_again(self, *, asking: bool = True) -> None:
        """Let writes find out whether a full tier has room again and, if ``asking``, requests ask a dead one.

        Each until the first outcome that tells. A tier that has probes need not be asked.
        """
        self.paused = False
        self.open = self.open and not asking

    def record(self, outcome: Outcome, *, wrote: bool = False, why: str = "") -> str:
        """Record how an operation or probe ended; ``wrote``: it wrote a request's chunk. ``why`` explains an error.

        Returns what to log: that the tier died, or is dead no more; empty if neither.
        """
        before = self.state
        self._count(outcome, wrote=wrote, why=why)
        if before == self.state or "dead" not in (before, self.state):
            return ""
        return f"is {self.state}: {self.reason}" if self.reason else f"is {self.state} again"

    def _count(self, outcome: Outcome, *, wrote: bool, why: str) -> None:
        if wrote and outcome in (Outcome.OK, Outcome.FULL):
            self._refused = self._refused + 1 if outcome is Outcome.FULL else 0
            self.paused = self._refused >= _REFUSED_TO_PAUSE
        if outcome in _BAD:
            self._failures += 1
            told = f": {why}" if why and outcome is Outcome.ERROR else ""
            number = min(self._failures, _FAILURES_TO_OPEN)  # more would have every store give a reason of its own
            count = f"{number} operations in a row" if number > 1 else "an operation"
            self.reason = f"{count} ended in {outcome.value}{told}"
            if self.state in ("dead", "recovering") or self._failures >= _FAILURES_TO_OPEN:
                self.state, self.open = "dead", True
            elif outcome is Outcome.TIMEOUT:
                self.state = "slow"
            return
        self._failures = 0
        if self.open and self.state == "dead":
            self.state, self.reason = "recovering", "a probe succeeded"
            return
        self.open = False
        if self._refused >= _REFUSED_TO_PAUSE:
            self.state, self.reason = "slow", f"full: {_REFUSED_TO_PAUSE} writes in a row found no room"
        else:
            self.state, self.reason = "ok", ""


@dataclass(frozen=True)
class Breakers:
    """Health of a tier of several servers, each with a breaker fed by its own operations."""

    servers: Mapping[str, Breaker]
    owner: Callable[[bytes], str]
    """The server of a key."""

    @property
    def open(self) -> bool:
        """Only if no server is asked: else the others answer for their shares."""
        return all(breaker.open for breaker in self.servers.values())

    @property
    def paused(self) -> bool:
        """Only if no server has room: else the others are written."""
        return all(breaker.paused for breaker in self.servers.values())

    @property
    def unwell(self) -> bool:
        return any(breaker.unwell for breaker in self.servers.values())

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

    def refuses(self, key: bytes) -> bool:
        """What the key's server says."""
        return self.servers[self.owner(key)].refuses(key)

    def try_again(self, *, asking: bool = True) -> None:
        for breaker in self.servers.values():
            breaker.try_again(asking=asking)

    def record(self, outcome: Outcome, *, wrote: bool = False, why: str = "") -> str:  # noqa: ARG002
        """Do nothing: the tier's outcome as a whole says nothing of one server."""
        return ""
