"""Windows of each store's last hour, summed up per five minutes, for the detectors of incidents and the judge."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tiertune_agent.history.rollup import summed
from tiertune_agent.history.store import History
from tiertune_agent.incidents.detectors import READ
from tiertune_agent.records import FLEET, Now, Snapshot, Window

KEPT = READ | {"tier_resident_bytes"}
"""Metrics that are kept: how soon a tier fills, the judge asks too."""
LOOKED_AT = timedelta(hours=1)
STEP_MIN = 5
STEP = timedelta(minutes=STEP_MIN)
READ_AT_ONCE = 25
"""At most this many stores are read from history in one round: it stays short after a large fleet's agent restarts."""

Place = tuple[datetime, str, str]
"""Step, tier and namespace."""


class SeenWindows:
    """Windows, read from history once for each store, then kept up to date from its answers."""

    def __init__(self, history: History, now: Now) -> None:
        self._history = history
        self._now = now
        self._stores: dict[str, dict[Place, Window]] = {}

    def forget(self) -> None:
        """Read all from history again."""
        self._stores = {}

    def heard(self, snapshots: Sequence[Snapshot], missing: Iterable[str] = ()) -> dict[str, list[Window]]:
        """Windows by store, with those that the snapshots brought; history has these already.

        Also of stores that are ``missing`` in this round; those still to be read from history are left out.
        """
        now = self._now()
        since = now - LOOKED_AT
        here: dict[str, Sequence[Window]] = dict.fromkeys(missing, ())
        here |= {snapshot.store: snapshot.windows for snapshot in snapshots}
        unread = [store for store in here if store not in self._stores]
        for store in here.keys() - unread:
            _add(self._stores[store], here[store])
        for store in unread[:READ_AT_ONCE]:
            self._read(store)
        for kept in self._stores.values():
            for place in [place for place in kept if not since - STEP < place[0] <= now]:
                del kept[place]  # those ahead came before the clock was set back
        if here.keys() - {FLEET}:  # which is looked at by itself: others are not gone then
            self._stores = {store: kept for store, kept in self._stores.items() if kept or store in here}
        return {store: list(kept.values()) for store, kept in self._stores.items()}

    def of(self, store: str) -> list[Window]:
        """Those of one store, which are read now if they were not yet."""
        if store not in self._stores:
            self._read(store)
        return list(self._stores[store].values())

    def _read(self, store: str) -> None:
        now, read = self._now(), dict[Place, Window]()
        _add(read, self._history.measured.fleet_windows([store], now - LOOKED_AT, now))
        self._stores[store] = read  # only now: if the database is away, it is read again


def _add(kept: dict[Place, Window], windows: Iterable[Window]) -> None:
    came: dict[Place, list[Window]] = {}
    for window in windows:
        begin = window.start.replace(minute=window.start.minute // STEP_MIN * STEP_MIN, second=0, microsecond=0)
        values = {key: value for key, value in window.values.items() if key.partition("{")[0] in KEPT}
        came.setdefault((begin, window.tier, window.namespace), []).append(replace(window, values=values))
    for place, parts in came.items():
        kept[place] = summed([kept[place], *parts] if place in kept else parts, place[0])
