"""What the tuners of one round read, each thing only once, and what they answer, written together."""

import sys
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache, cached_property, lru_cache
from operator import attrgetter

from tiertune_agent.history.changed import Place, Where, place
from tiertune_agent.history.store import History
from tiertune_agent.records import (
    FLEET,
    UNJUDGED,
    Decision,
    Histogram,
    Made,
    Prospect,
    Snapshot,
    StageWindow,
    State,
    Target,
    Window,
    Windows,
    grouped,
    parts,
)
from tiertune_agent.tuners.base import MOST_OF_TIER, Answer, TypicalCandidate, served

HOUR = timedelta(hours=1)
MEMORY = timedelta(days=30)
"""How long rollbacks are remembered."""


class Survey:
    """One round's readings, and its answers. Misses decisions made meanwhile: stores refuse what rests on older tuning.

    What was changed or undone at an hour that lies ahead, by an agent whose clock was ahead, is over.
    """

    def __init__(self, history: History, now: datetime, tiers: "TierWindows", stores: Collection[str]) -> None:
        """``tiers`` outlives the round; ``stores``: whose targets are asked about, beside the fleet's."""
        self._history = history
        self._stores = stores
        self._tiers = tiers
        self._now = now
        self._last = history.changed.last(stores)
        measured = history.measured
        self.prospects = cache(lambda namespace, back: measured.prospects(namespace, now - back, now))
        """Prospects of one namespace (empty: all) in this time up to now, oldest first."""
        self.store_windows = lru_cache(maxsize=1)(lambda store, back: measured.fleet_windows([store], now - back, now))
        """Windows of one store in this time up to now; kept until another store's are asked for."""
        self.proposed = history.decisions.in_state(State.PROPOSED)
        """What was proposed before, and is open still."""
        self._open = grouped(self.proposed, lambda one: place(one.tuner, one.target))
        self.told: list[tuple[str, Target, Answer]] = []
        """What each tuner answered about a target."""

    def last_change(self, tuner: str, *targets: Target) -> Made | None:
        """The tuner's last change of any of these targets; at equal times, of the first target."""
        found = [last for target in targets if (last := self._last.get(place(tuner, target))) and last.at <= self._now]
        return max(found, key=attrgetter("at"), default=None)

    def undone(self, target: Target) -> Sequence[Made]:
        """Changes of the target that were undone or refused within a month."""
        return self._undone.get(place("", target)[1:], ())

    @cached_property
    def changes(self) -> Counter[str]:
        """Number of changes of each store in the last hour."""
        return self._history.changed.count(self._now - HOUR, self._now)

    def watched(self, target: Target) -> Decision | None:
        """The newest change not judged yet of the same pool, or its whole tier.

        Changes of single stores hold up the fleet's if half of the stores have one: of many stores one always soaks.
        """
        stores, pools = (target.store, FLEET), ("", target.namespace)

        def same(changed: Target) -> bool:
            return (
                changed.tier == target.tier
                and (target.store == FLEET or changed.store in stores)
                and (not target.namespace or changed.namespace in pools)
            )

        found = [one for one in self._watched if any(same(part.target) for part in (one, *parts(one)))]
        where = {one.target.store for one in found}
        few = target.store == FLEET and FLEET not in where and 2 * len(where) < len(self._stores)
        return found[0] if found and not few else None

    @cached_property
    def stages(self) -> list[StageWindow]:
        """Stages of all stores in the last hour."""
        return self._history.measured.stage_windows(self._now - HOUR, self._now)

    def tier_windows(self, target: Target) -> list[Window]:
        """Windows of a whole tier, up to now without a gap."""
        windows = self._tiers.of(target.store, target.tier)  # an agent whose clock was ahead may have written some
        return unbroken([window for window in windows if window.start <= self._now], self._now)

    def pool_windows(self, target: Target, back: timedelta) -> list[Window]:
        """Windows of a pool, with its ghosts."""
        return self._history.measured.pool_windows(
            target.store, self._now - back, self._now, tier=target.tier, namespace=target.namespace
        )

    def prompts(self, store: str, pools: Collection[str], back: timedelta) -> list[Window]:
        """Windows of these pools that count their prompts."""
        return self._history.measured.prompts(store, pools, self._now - back, self._now)

    def typical(self, target: Target) -> TypicalCandidate | None:
        """What a typical candidate of the tier was when there last were any."""
        return self._history.measured.typical([target.store]).get(target.store)

    @cached_property
    def _undone(self) -> Mapping[Where, Sequence[Made]]:
        return self._history.changed.undone(self._now - MEMORY, self._now, self._stores)

    @cached_property
    def _watched(self) -> Sequence[Decision]:
        return self._history.decisions.in_state(*UNJUDGED)

    def withdraw(self, tuner: str, target: Target, why: str, field: str = "") -> None:
        """Expire what the tuner proposed and no longer wishes, of one field (empty: of all)."""
        for decision in self._open.get(place(tuner, target), ()):
            if field in ("", decision.field):
                self._history.decisions.expire(decision, why, now=self._now)

    def withdraw_all_but(self, asked: Container[Place]) -> None:
        """Expire what was proposed where nobody is asked any more, as of a tier, pool or store that is gone."""
        for at, found in self._open.items():
            for decision in found if at not in asked else ():
                self._history.decisions.expire(decision, "it has not been looked at for an hour", now=self._now)


class TierWindows:
    """The last windows of whole tiers: read from history once per tier, then kept up to date by what stores answer.

    They have no histograms, which nobody reads here.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._kept: dict[tuple[str, str], deque[Window]] = {}

    def forget(self) -> None:
        """Read all from history again."""
        self._kept = {}

    def heard(self, snapshots: Iterable[Snapshot]) -> None:
        """Add the snapshots' windows, which history has already. Drops tiers not heard of for an hour."""
        windows = [window for snapshot in snapshots for window in snapshot.windows]
        for window in windows:
            kept = self._kept.get((window.store, window.tier))
            if kept is not None and not window.namespace:
                kept.append(_lean(window))
        if windows:
            since = max(window.start for window in windows) - HOUR
            self._kept = {key: kept for key, kept in self._kept.items() if kept and kept[-1].start > since}

    def of(self, store: str, tier: str) -> Windows:
        """A tier's windows, oldest first."""
        key = store, tier
        if key not in self._kept:
            read = self._history.measured.windows(store, tier=tier)
            self._kept[key] = deque(read, maxlen=MOST_OF_TIER)
        return self._kept[key]


def concerning(prospects: Sequence[Prospect], target: Target, snapshot: Snapshot) -> Sequence[Prospect]:
    """Prospects that concern a target: for a store those of namespaces that it serves, for the fleet all."""
    if target.store == FLEET:
        return prospects
    there = served(snapshot.status)
    return [prospect for prospect in prospects if prospect.namespace in there]


def unbroken(windows: Windows, until: datetime) -> list[Window]:
    """The last run of windows that reaches ``until`` without a gap of a window or more; anything before is outdated."""
    run: list[Window] = []
    for window in reversed(windows):
        if window.start + timedelta(seconds=2 * window.seconds) <= until:
            break
        run.append(window)
        until = window.start
    return run[::-1]


def _lean(window: Window) -> Window:
    values = {sys.intern(key): value for key, value in window.values.items() if not isinstance(value, Histogram)}
    return replace(window, values=values)
