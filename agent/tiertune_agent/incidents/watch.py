"""Opens and closes incidents: trouble that the collector met, and what detectors find in stores that answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tiertune_agent.collector.stores import Trouble
from tiertune_agent.fields import Json, JsonDict, capacity_field, read
from tiertune_agent.history.store import History
from tiertune_agent.incidents.detectors import Sight, incidents
from tiertune_agent.incidents.drift import ADOPTED_AFTER, drift, expected, overlooking, unsettled
from tiertune_agent.incidents.seen import SeenWindows
from tiertune_agent.records import Decision, Expectation, Now, Snapshot, Window, total
from tiertune_agent.remote.managed import KIND
from tiertune_agent.tuners.base import present
from tiertune_connector.tuning import TIERS

TROUBLES = ("store_unreachable", "store_nonsense", "stale_counters", "store_misnamed", "duplicate_store", KIND)
REMEMBERED = timedelta(hours=6)
"""Decisions younger than this may still take effect, or be undone."""


class Watch:
    def __init__(self, history: History, now: Now) -> None:
        self._history = history
        self._now = now
        self._windows = SeenWindows(history, now)

    def forget(self) -> None:
        """Read the windows from history again."""
        self._windows.forget()

    def look(self, snapshots: Sequence[Snapshot], troubles: Sequence[Trouble] = ()) -> None:
        """Close incidents that answers disprove, open those that they show, and those of stores without an answer."""
        found = {snapshot.store: {"tier_dead": _dead_tiers(snapshot)} for snapshot in snapshots}
        for store, sight in self._sights(snapshots).items():
            found[store] |= incidents(sight)
        self._history.journal.tell_incidents(messages(snapshots, troubles, found), self._now())

    def wanted(self, store: str) -> JsonDict:
        """The tuning that decisions left in a store."""
        base = self._history.expectations([store])[store]
        decisions = self._history.changed.made_since(base.since, [store])
        return expected(base.tuning, base.since, decisions.get(store, ()))

    def _sights(self, snapshots: Sequence[Snapshot]) -> dict[str, Sight]:
        """Sights by store, without stores whose windows have not been read yet."""
        now, windows = self._now(), self._windows.heard(snapshots)  # first: history has them already
        bases = self._history.expectations(snapshot.store for snapshot in snapshots)
        oldest = min((base.since for base in bases.values()), default=now)
        decisions = self._history.changed.made_since(min(oldest, now - REMEMBERED), bases)
        empty = [one.store for one in snapshots if _without_capacity(one)]
        last = self._history.changed.last(empty) if empty else {}
        sights, renewed, reading = {}, {}, {store for store, seen in windows.items() if _found_in_remote(seen)}
        for snapshot in snapshots:
            store, base = snapshot.store, bases[snapshot.store]
            mine = [one for one in decisions.get(store, ()) if one.updated_at >= min(base.since, now - REMEMBERED)]
            wanted, now_expected = _compared(snapshot, base, mine, now)
            if now_expected != base:
                renewed[store] = now_expected
            lately = [decision for decision in mine if decision.updated_at >= now - REMEMBERED]
            if store in windows:
                made = [change for (_, where, *_), change in last.items() if where == store]
                sights[store] = Sight(snapshot, windows[store], lately, wanted, now, bool(reading - {store}), made)
        self._history.expect(renewed)
        return sights


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


def _compared(
    snapshot: Snapshot, base: Expectation, decisions: Sequence[Decision], now: datetime
) -> tuple[JsonDict, Expectation]:
    """The tuning that is wanted, and what is expected from now on."""
    unknown, should = unsettled(decisions, snapshot.at), expected(base.tuning, base.since, decisions)
    wanted = overlooking(unknown, should, snapshot.tuning)
    if base.since > snapshot.at:  # the clock was set back: what is decided now would seem to be older
        base = replace(base, tuning=should, since=snapshot.at)
    differing = any(drift(wanted, snapshot.tuning))
    meant = differing and base.differs is not None and now - base.differs >= ADOPTED_AFTER
    renewed = not differing and not unknown and now - base.since >= REMEMBERED
    if meant or renewed:
        return dict(snapshot.tuning), Expectation(dict(snapshot.tuning), snapshot.at)
    if differing != (base.differs is not None):
        return wanted, replace(base, differs=now if differing else None)
    return wanted, base


def _without_capacity(snapshot: Snapshot) -> bool:
    """Whether a configured tier has a capacity of 0."""
    tiers = [tier for tier in TIERS if present(snapshot.status, tier)]
    return any(read(snapshot.tuning, capacity_field(tier)) == 0 for tier in tiers)


def _found_in_remote(windows: Iterable[Window]) -> bool:
    remote = (window for window in windows if window.tier == "remote")
    return total(remote, "tier_lookup_tokens_total", result="hit") > 0


def _dead_tiers(snapshot: Snapshot) -> str:
    tiers = (snapshot.status.get("tiers") or {}).items()
    return "; ".join(f"{tier}: {why}" for tier, state in tiers if (why := _dead(state)))


def _dead(state: Json) -> str:
    """Why a tier is dead, or a part of it; empty: nothing is."""
    dead = [one for one in state.get("servers") or () if one.get("health") == "dead"]
    servers = [f"{one.get('server')} ({one.get('reason')})" for one in dead]
    if state.get("health") == "dead" or servers:
        return str(state.get("reason") or ", ".join(servers) or "dead")
    return ""
