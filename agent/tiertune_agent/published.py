"""The agent's metrics of its own work, and of the remote, of which no store can tell but its own part."""

from collections.abc import Container, Iterable
from datetime import datetime

from tiertune_agent.catalogue import AgentMetrics
from tiertune_agent.fields import JsonDict, read
from tiertune_agent.records import CHANGED, Decision, Snapshot, State, Window, direction, parts
from tiertune_agent.verdicts.ledger import Entry

LATEST = 100
"""Newest decisions that are looked through when an agent begins to lead, or meets others; else those that move."""
_CHANGED, _MONEY = "agent_change_timestamp_seconds", "agent_money_total"
_CAPACITY, _RESIDENT, _EVICTIONS = "tier_capacity_bytes", "tier_resident_bytes", "tier_evictions_total"
REMOTE = "remote"
_FIGURES = {1: "up", 0: "same", -1: "down"}
Labels = tuple[str, str, str, str, str, str]
"""Of ``agent_change_timestamp_seconds``: tuner, store, tier, setting, change, state."""


class Published:
    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics = metrics
        self._evicted: dict[str, dict[str, int]] = {}
        """By server of the remote: keys evicted in each run, by its id. Sentinels may return to an earlier one."""

    def moved(self, decision: Decision) -> None:
        """A decision entered a state."""
        self._metrics.count("agent_decisions_total", decision.tuner, decision.state)
        self.changed([decision])

    def changed(self, decisions: Iterable[Decision]) -> None:
        for labels, at in changes(decisions).items():  # one with the same labels that is newer may be known already
            self._metrics.set_later(_CHANGED, at.timestamp(), *labels)

    def booked(self, entries: Iterable[tuple[Window, Entry]]) -> None:
        """Add to counters what the ledger booked.

        If it is not known what was saved, nothing is added: costs alone would look like a loss.
        """
        for window, booked in entries:
            for kind, amount in booked.amounts.items() if booked.money is not None else ():
                self._metrics.count(_MONEY, window.store, window.tier, kind, amount=max(0.0, amount or 0.0))

    def leave_out(self, stores: Container[str]) -> None:
        """Export nothing more of stores other than these."""
        for name in (_CHANGED, _MONEY):
            self._metrics.keep(name, "store", stores)

    def remote(self, remote: Snapshot | None, desired: int | None = None) -> None:
        """What the remote holds and may hold, ``desired`` if managed; None: it is silent, or nobody named it.

        A figure that is not known now is not exported: neither its last value nor zero.
        """
        state = (read(remote.status, "tiers.remote") if remote else None) or {}
        self._metrics.set(_CAPACITY, desired if state else None, REMOTE, "desired")
        self._metrics.set(_CAPACITY, state.get("capacity_bytes"), REMOTE, "effective")
        self._metrics.set(_RESIDENT, state.get("resident_bytes"), REMOTE)
        for server in state.get("servers", ()):
            self._count(server)

    def forget(self) -> None:
        """Drop it all, but what is counted: another agent leads and exports it."""
        self._metrics.clear(_CHANGED)
        self._metrics.clear("agent_incidents")
        self.remote(None)
        self._evicted.clear()

    def _count(self, server: JsonDict) -> None:
        """Redis counts from its start, or its last reset of statistics; we count from when we first saw it."""
        run, evicted = str(server["run_id"]), int(server["evicted_keys"])
        runs = self._evicted.setdefault(server["server"], {run: evicted})
        before = runs.get(run, 0)
        runs[run] = evicted
        more = evicted - before if evicted >= before else evicted
        self._metrics.count(_EVICTIONS, REMOTE, str(server["policy"]), "room", amount=more)


def changes(decisions: Iterable[Decision]) -> dict[Labels, datetime]:
    """When each kind of change was last made. A change that was rolled back is two: there and back. Pure."""
    made: dict[Labels, datetime] = {}
    for decision in decisions:
        if decision.state not in CHANGED:
            continue
        moments = [(State.APPLIED, decision.made_at)]
        if decision.state == State.ROLLED_BACK:
            moments.append((State.ROLLED_BACK, decision.updated_at))
        for part in parts(decision):
            for state, at in moments:
                labels = _labels(part, state)
                made[labels] = max(at, made.get(labels, at))
    return made


def _labels(part: Decision, state: State) -> Labels:
    """Label values are few: a setting's values are a few words, and figures only go up or down."""
    there = (part.before, part.after)
    was, became = there if state == State.APPLIED else there[::-1]
    moved = direction(was, became)
    change = "default" if moved is None else _FIGURES[moved] if isinstance(moved, int) else str(moved)
    return part.tuner, part.target.store, part.target.tier, part.field.rpartition(".")[2], change, str(state)
