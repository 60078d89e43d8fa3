"""Opens and closes incidents: trouble that the collector met, and what detectors find in stores that answer."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import chain

from tiertune_agent.collector.stores import Trouble
from tiertune_agent.fields import capacity_field, in_force, read
from tiertune_agent.history.decisions import MOST_MOVED
from tiertune_agent.history.store import History
from tiertune_agent.incidents import sources
from tiertune_agent.incidents.detectors import Sight, incidents
from tiertune_agent.incidents.drift import compared
from tiertune_agent.incidents.seen import SeenWindows
from tiertune_agent.records import CHANGED, Decision, Now, Snapshot, State, Window, grouped, parts, total
from tiertune_agent.remote.managed import KIND
from tiertune_agent.tuners.base import present
from tiertune_connector.tuning import TIERS

TROUBLES = ("store_unreachable", "store_nonsense", "stale_counters", "store_misnamed", "duplicate_store", KIND)
REMEMBERED = timedelta(hours=6)
"""Decisions younger than this may still take effect."""
LATELY = timedelta(minutes=10)
"""Windows of observed sources younger than this are kept one by one."""
MEANT = (*CHANGED, State.APPROVED, State.FAILED)
"""States of decisions that changed a store, or were to."""
SPLITS = 100
"""Splits that are remembered to have emptied a host; each names only the hosts that it changed."""


class Watch:
    def __init__(self, history: History, now: Now) -> None:
        self._history = history
        self._now = now
        self.windows, self._sources = SeenWindows(history, now), SeenWindows(history, now)
        """What detectors read of the last hour of stores, and of observed sources."""
        self._recent: dict[str, list[Window]] = {}
        """The last windows of observed sources, one by one."""

    def forget(self) -> None:
        """Read the windows from history again."""
        self.windows.forget()
        self._sources.forget()
        self._recent.clear()

    def look(self, snapshots: Sequence[Snapshot], troubles: Sequence[Trouble] = ()) -> None:
        """Close incidents that answers disprove, open those that they show, and those of stores without an answer.

        Of stores whose windows have not been read yet, what windows show is left as it is.
        """
        found = {snapshot.store: {"tier_dead": _dead_tiers(snapshot)} for snapshot in snapshots}
        for store, drift in self._drifts(snapshots).items():
            found[store]["tuning_drift"] = drift
        missing = [trouble.store for trouble in troubles]
        now, windows = self._now(), self.windows.heard(snapshots, missing)
        unread = not windows.keys() >= {*missing, *found}
        decisions, emptied = self._lately(now), self._emptied(snapshots)
        reading = {
            store
            for store, seen in windows.items()
            if total((one for one in seen if one.tier == "remote"), "tier_lookup_tokens_total", result="hit") > 0
        }
        for snapshot in snapshots:
            store = snapshot.store
            if store in windows:
                served = bool(reading - {store})
                sight = Sight(snapshot, windows[store], decisions.get(store, ()), now, emptied, served)
                told = incidents(sight)
                if unread:  # one of them may read what this store writes
                    del told["tier_unused"]
                found[store] |= told
        self._history.journal.tell_incidents(messages(snapshots, troubles, found), self._now())

    def look_at_sources(self, snapshots: Sequence[Snapshot], troubles: Sequence[Trouble]) -> None:
        """The same for observed sources, as far as they report; history must already have the snapshots."""
        hours, since, found = self._sources.heard(snapshots), self._now() - LATELY, {}
        for one in snapshots:
            kept = (*self._recent.get(one.store, ()), *one.windows)
            lately = self._recent[one.store] = [window for window in kept if window.start >= since]
            found[one.store] = sources.incidents(one, hours.get(one.store, ()), lately)
        self._history.journal.tell_incidents(messages(snapshots, troubles, found), self._now())

    def _drifts(self, snapshots: Sequence[Snapshot]) -> dict[str, str]:
        """What drifted, by store; without those that were changed after they had answered."""
        decisions = self._history.decisions
        under_way = [*decisions.in_state(State.APPROVED), *decisions.undoing()]  # first: what ends now is expected then
        moving = [part for decision in under_way for part in parts(decision)]
        expected = self._history.expectations(snapshot.store for snapshot in snapshots)
        now, told, anew = self._now(), {}, {}
        for snapshot in snapshots:
            store, known = snapshot.store, expected[snapshot.store]
            if not snapshot.at < known.since <= now:
                mine = (part for part in moving if part.target.store == store)
                fields = {one.field for one in mine if in_force(snapshot.tuning, one.field) in (one.before, one.after)}
                told[store], then = compared(known, snapshot, fields, now)
                if then != known:
                    anew[store] = known.since, then
        self._history.expect(anew)
        return told

    def _lately(self, now: datetime) -> dict[str, list[Decision]]:
        """What was, or was to be, changed lately by each store, oldest first."""
        found = self._history.decisions.find(states=MEANT, since=now - REMEMBERED, limit=MOST_MOVED)
        return grouped(chain.from_iterable(map(parts, reversed(found))), lambda part: part.target.store)

    def _emptied(self, snapshots: Sequence[Snapshot]) -> set[tuple[str, str]]:
        """Stores and fields of their capacities that a decision set to zero, or is about to."""
        stores = [
            one.store
            for one in snapshots
            if any(present(one.status, tier) and read(one.tuning, capacity_field(tier)) == 0 for tier in TIERS)
        ]
        if not stores:
            return set()
        last = self._history.changed.last(stores, splits=SPLITS)
        under_way = chain.from_iterable(map(parts, self._history.decisions.in_state(State.APPROVED)))
        emptied = {(store, made.field) for (_, store, _, _), made in last.items() if made.after == 0}
        return emptied | {(part.target.store, part.field) for part in under_way if part.after == 0}


def messages(
    snapshots: Sequence[Snapshot], troubles: Sequence[Trouble], found: Mapping[str, Mapping[str, str]]
) -> dict[tuple[str, str], str]:
    """Messages of incidents by kind and store; empty if an answer disproves one, or it is over.

    ``found``: messages by store and kind, from its answer. A store without an answer has the name from the settings.
    """
    closed = {
        (kind, name): ""
        for one in snapshots
        for name in (one.store, one.url, one.url.partition("://")[2])
        for kind in TROUBLES
    }
    opened = {(kind, store): message for store, kinds in found.items() for kind, message in kinds.items()}
    return closed | opened | {(trouble.kind, trouble.store): trouble.message for trouble in troubles}


def _dead_tiers(snapshot: Snapshot) -> str:
    """Which tiers are dead, or servers of one, and why; empty: none is."""
    told = []
    for tier, state in (snapshot.status.get("tiers") or {}).items():
        dead = [one for one in state.get("servers") or () if one.get("health") == "dead"]
        servers = ", ".join(f"{one.get('server')} ({one.get('reason')})" for one in dead)
        if state.get("health") == "dead" or servers:
            told.append(f"{tier}: {state.get('reason') or servers or 'dead'}")
    return "; ".join(told)
