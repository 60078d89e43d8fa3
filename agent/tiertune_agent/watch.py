"""Opens and closes incidents: what the collector met, and what the detectors tell of stores that answer."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from tiertune_agent.collector.stores import Trouble
from tiertune_agent.drift import ADOPTED_AFTER, drift, expected, overlooking, unsettled
from tiertune_agent.history.store import History
from tiertune_agent.incidents import Sight, incidents
from tiertune_agent.records import Snapshot, Window
from tiertune_agent.remote import KIND

TROUBLES = ("store_unreachable", "store_nonsense", "stale_counters", "store_misnamed", "duplicate_store", KIND)
LOOKED_AT = timedelta(hours=1)
REMEMBERED = timedelta(hours=6)
"""Decisions younger than this may be followed by an effect, or by their undoing."""


class Watch:
    def __init__(self, history: History, now: Callable[[], datetime]) -> None:
        self._history = history
        self._now = now
        self._windows: dict[str, list[Window]] = {}
        """By store, those looked at: read from history once, for a round must not read hours of them."""

    def forget(self) -> None:
        """Read the windows from history again."""
        self._windows = {}

    def missed(self, trouble: Trouble) -> None:
        """A store that gave no snapshot."""
        self._history.open_incident(trouble.kind, trouble.store, trouble.message, self._now())

    def seen(self, snapshot: Snapshot) -> None:
        """Close the incidents that an answer disproves, open those that it tells."""
        names = {snapshot.store, snapshot.url, snapshot.url.partition("://")[2]}
        self._history.close_incidents(TROUBLES, names, self._now())
        tiers = (snapshot.status.get("tiers") or {}).items()
        dead = [f"{tier}: {why}" for tier, state in tiers if (why := _dead(state))]
        told = {"tier_dead": "; ".join(dead), **incidents(self._sight(snapshot))}
        over = [kind for kind, message in told.items() if not message]
        self._history.close_incidents(over, [snapshot.store], self._now())
        for kind in told.keys() - over:
            self._history.open_incident(kind, snapshot.store, told[kind], self._now())

    def wanted(self, store: str) -> dict[str, Any]:
        """The tuning that decisions left there."""
        base, since, _ = self._history.expectation(store)
        return expected(base, since, self._history.decisions.of_store(store, since))

    def _sight(self, snapshot: Snapshot) -> Sight:
        now, store = self._now(), snapshot.store
        base, since, differs = self._history.expectation(store)
        decisions = self._history.decisions.of_store(store, min(since, now - REMEMBERED))
        unknown = unsettled(decisions, snapshot.at)
        wanted = overlooking(unknown, expected(base, since, decisions), snapshot.tuning)
        differing = any(drift(wanted, snapshot.tuning))
        meant = differing and differs is not None and now - differs >= ADOPTED_AFTER
        renewed = not differing and not unknown and now - since >= REMEMBERED
        if meant or renewed:
            self._history.expect(store, snapshot.tuning, snapshot.at)
            wanted = dict(snapshot.tuning)
        elif differing != (differs is not None):
            self._history.differs_since(store, now if differing else None)
        lately = [decision for decision in decisions if decision.updated_at >= now - REMEMBERED]
        lately += self._history.decisions.emptied(store)
        return Sight(snapshot, self._looked_at(snapshot), lately, wanted, now)

    def _looked_at(self, snapshot: Snapshot) -> list[Window]:
        store, since = snapshot.store, self._now() - LOOKED_AT
        known = self._windows.get(store)
        if known is None:
            known = self._history.store_windows(store, since)
        else:
            known = [window for window in (*known, *snapshot.windows) if window.start >= since]
        self._windows[store] = known
        return known


def _dead(state: Mapping[str, Any]) -> str:
    """Why a tier is dead, or a part of it; empty: nothing is."""
    servers = [f"{one['server']} ({one['reason']})" for one in state.get("servers", ()) if one.get("health") == "dead"]
    if state.get("health") == "dead" or servers:
        return str(state.get("reason") or ", ".join(servers) or "dead")
    return ""
