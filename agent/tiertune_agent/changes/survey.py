"""What the tuners of one round read, each thing once, and what they answer, written at once."""

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from operator import attrgetter

from tiertune_agent.history.changed import Place, Where, place
from tiertune_agent.history.measured import LAST
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
    parts,
)
from tiertune_agent.tuners.base import MOST_OF_TIER, Answer, TypicalCandidate, served
from tiertune_agent.tuners.remote_fetch import typical_candidate

HOUR = timedelta(hours=1)
MEMORY = timedelta(days=30)
"""Rollbacks are remembered for so long."""


class Hours:
    """When things were, by a clock that may be set back."""

    def __init__(self) -> None:
        self._now: datetime | None = None
        self._since: datetime | None = None
        """When the clock was looked at first, or was set back to."""
        self._earlier: dict[datetime, datetime] = {}

    def look(self, now: datetime) -> datetime:
        """It is ``now``."""
        if self._now is None or now < self._now:
            self._since = now
        self._now = now
        return now

    def of(self, at: datetime) -> datetime:
        """An hour that lies ahead was before the clock was set back, and stays so when it comes again."""
        if self._now is not None and self._since is not None and at > self._now:
            self._earlier.setdefault(at, self._since)
        return self._earlier.get(at, at)


class Survey:
    """Of decisions that others make while it lasts it knows nothing: a store refuses what rests on an older tuning.

    What was measured at an hour that lies ahead came before the clock was set back: it tells nothing of now, but for
    what a typical candidate was.
    """

    def __init__(self, history: History, now: datetime, hours: Hours, tiers: "TierWindows") -> None:
        """``hours`` and ``tiers`` last longer than a round."""
        self._history = history
        self._hours = hours
        self._tiers = tiers
        self._now = hours.look(now)
        self._last = history.changed.last()
        self._open: dict[Place, list[Decision]] = {}
        for decision in history.decisions.in_state(State.PROPOSED):
            self._open.setdefault(place(decision.tuner, decision.target), []).append(decision)
        self._prospects: dict[tuple[str, float], list[Prospect]] = {}
        self._store: tuple[str, timedelta, list[Window]] = ("", HOUR, [])
        self.asked: list[tuple[str, Target]] = []
        """Tuners and targets that were."""
        self._answers: list[tuple[str, Target, Answer]] = []

    def last_change(self, tuner: str, *targets: Target) -> Made | None:
        """Of these, the last one; of several at one time that of the first of them."""
        found = [self._made_at(last) for target in targets if (last := self._last.get(place(tuner, target)))]
        return max(found, key=attrgetter("at"), default=None)

    def undone(self, target: Target) -> Sequence[Made]:
        """Changes of the target that were undone or refused within a month."""
        return tuple(map(self._made_at, self._undone.get(place("", target)[1:], ())))

    def changes(self, store: str) -> int:
        """In the last hour."""
        return self._made.get(store, 0)

    def watched(self, target: Target) -> Decision | None:
        """The newest change of the same pool, or of its whole tier, not judged yet; for the fleet, in any store."""
        stores, pools = (target.store, FLEET), ("", target.namespace)

        def same(changed: Target) -> bool:
            return (
                changed.tier == target.tier
                and (target.store == FLEET or changed.store in stores)
                and (not target.namespace or changed.namespace in pools)
            )

        return next(
            (one for one in self._watched if same(one.target) or any(same(part.target) for part in parts(one))), None
        )

    def prospects(self, namespace: str, horizon_s: float) -> list[Prospect]:
        """Of one namespace (empty: of all) in the last ``horizon_s`` seconds, oldest first."""
        key = namespace, horizon_s
        if key not in self._prospects:
            since = self._now - timedelta(seconds=horizon_s)
            self._prospects[key] = self._history.measured.prospects(namespace, since, self._now)
        return self._prospects[key]

    @cached_property
    def stages(self) -> list[StageWindow]:
        """Of all stores in the last hour."""
        return self._history.measured.stage_windows(self._now - HOUR, self._now)

    def store_windows(self, store: str, back: timedelta) -> list[Window]:
        """Those of one store are kept until another one's are asked for."""
        if self._store[:2] != (store, back):
            windows = self._history.measured.store_windows(store, self._now - back, self._now)
            self._store = store, back, windows
        return self._store[2]

    def tier_windows(self, target: Target) -> list[Window]:
        """Of a whole tier, up to now without a gap."""
        windows = self._tiers.of(target.store, target.tier, self._now)
        return unbroken([window for window in windows if window.start <= self._now], self._now)

    def pool_windows(self, target: Target, back: timedelta) -> list[Window]:
        """With the pool's ghosts."""
        return self._history.measured.pool_windows(
            target.store, self._now - back, self._now, tier=target.tier, namespace=target.namespace
        )

    def typical(self, target: Target) -> TypicalCandidate | None:
        """What a typical candidate of the tier was, when there last were any."""
        return typical_candidate(self._history.measured.candidate_windows(target.store, target.tier))

    def answered(self, tuner: str, target: Target, answer: Answer) -> None:
        self._answers.append((tuner, target, answer))

    def withdraw(self, tuner: str, target: Target, why: str) -> None:
        """What the tuner proposed and wishes no more."""
        for decision in self._open.get(place(tuner, target), ()):
            self._history.decisions.expire(decision, why, now=self._now)

    def withdraw_gone(self, store: str, there: Iterable[tuple[str, Target]]) -> None:
        """What was proposed for a tier or pool that the store has no more."""
        asked = {place(tuner, target) for tuner, target in there}
        for at, decisions in self._open.items():
            for decision in decisions:
                if decision.target.store == store and at not in asked:
                    self._history.decisions.expire(decision, f"{store} has it no more", now=self._now)

    def write(self) -> None:
        """The answers."""
        self._history.answers.remember(self._answers, self._now)

    @cached_property
    def _undone(self) -> Mapping[Where, Sequence[Made]]:
        return self._history.changed.undone(self._now - MEMORY)

    @cached_property
    def _made(self) -> Mapping[str, int]:
        return self._history.changed.count(self._now - HOUR, self._now)

    @cached_property
    def _watched(self) -> Sequence[Decision]:
        return self._history.decisions.in_state(*UNJUDGED)

    def _made_at(self, made: Made) -> Made:
        return replace(made, at=self._hours.of(made.at))


class TierWindows:
    """The last windows of whole tiers: read from history once for each, then kept up by what stores answer.

    Without histograms, which nobody reads of them.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._kept: dict[tuple[str, str], deque[Window]] = {}

    def forget(self) -> None:
        """Read all from history again."""
        self._kept = {}

    def heard(self, snapshots: Iterable[Snapshot]) -> None:
        """What the snapshots brought; history has it already. What was not heard of for an hour may have left."""
        windows = [window for snapshot in snapshots for window in snapshot.windows]
        for window in windows:
            kept = self._kept.get((window.store, window.tier))
            if kept is not None and not window.namespace:
                kept.append(_lean(window))
        if windows:
            since = max(window.start for window in windows) - HOUR
            self._kept = {key: kept for key, kept in self._kept.items() if kept and kept[-1].start > since}

    def of(self, store: str, tier: str, now: datetime = LAST) -> Sequence[Window]:
        """Oldest first; some may lie ahead where the clock was set back."""
        key = store, tier
        if key not in self._kept:
            read = self._history.measured.windows(store, tier=tier, histograms=False, until=now)
            self._kept[key] = deque(read, maxlen=MOST_OF_TIER)
        return self._kept[key]


def concerning(prospects: Sequence[Prospect], target: Target, snapshot: Snapshot) -> Sequence[Prospect]:
    """Those that concern a target: of a store those of the namespaces that it serves, of the fleet all."""
    if target.store == FLEET:
        return prospects
    there = served(snapshot.status)
    return [prospect for prospect in prospects if prospect.namespace in there]


def unbroken(windows: Sequence[Window], until: datetime) -> list[Window]:
    """The last run of windows that reaches ``until`` without a gap of a window or more: what came before is old."""
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
