"""The agent's metrics of the remote: exported once for the fleet, since no store can tell them for its own part."""

from typing import Any

from tiertune_agent.catalogue import AgentMetrics
from tiertune_agent.fields import read
from tiertune_agent.records import Snapshot

REMOTE = "remote"
CAPACITY, RESIDENT, EVICTIONS = "tier_capacity_bytes", "tier_resident_bytes", "tier_evictions_total"


class RemoteGauges:
    """A figure that is not known now is not exported: neither its last value nor zero."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics = metrics
        self._evicted: dict[str, tuple[str, int]] = {}
        """By server: its run id, and the keys evicted in that run."""

    def tell(self, remote: Snapshot | None, desired: int | None = None) -> None:
        """Export what the remote holds and may hold, ``desired`` if managed; None: it is silent, or nobody named it."""
        state = (read(remote.status, "tiers.remote") if remote else None) or {}
        self._show(CAPACITY, desired if state else None, REMOTE, "desired")
        self._show(CAPACITY, state.get("capacity_bytes"), REMOTE, "effective")
        self._show(RESIDENT, state.get("resident_bytes"), REMOTE)
        for server in state.get("servers", ()):
            self._count(server)

    def forget(self) -> None:
        """Another agent leads, and exports the figures."""
        self.tell(None)
        self._evicted.clear()

    def _show(self, name: str, value: int | None, *labels: str) -> None:
        if value is None:
            self._metrics.unset(name, *labels)
        else:
            self._metrics.set(name, value, *labels)

    def _count(self, server: dict[str, Any]) -> None:
        """Redis counts from its start, or its last reset of statistics; we count from when we first saw it."""
        run, evicted = str(server["run_id"]), int(server["evicted_keys"])
        known, before = self._evicted.get(server["server"], (run, evicted))
        self._evicted[server["server"]] = run, evicted
        more = evicted - before if run == known and evicted >= before else evicted
        self._metrics.count(EVICTIONS, REMOTE, str(server["policy"]), "room", amount=more)
