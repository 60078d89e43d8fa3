"""One look at history: all that the page is made of, read at one moment."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tiertune_agent.history.store import KEPT_CANDIDATE_WINDOWS, History
from tiertune_agent.records import CHANGED, Decision, Prospect, State, Window
from tiertune_agent.tuners.base import Candidate
from tiertune_agent.tuners.remote_fetch import FIELD, typical_candidate
from tiertune_agent.web.curves import Counted, Ghosts, counted, ghosts
from tiertune_agent.web.views import Views

Json = Mapping[str, Any]
POINTS = 60
"""Windows that "lately" means."""
ACCOUNT_HOURS = 24.0
SHOWN_DECISIONS = 25
JUDGED = (State.KEPT, State.ROLLED_BACK, State.INCONCLUSIVE)
WISHED = timedelta(days=1)
SHARED = timedelta(seconds=1)
"""Readers that come within this time share a look."""


@dataclass(frozen=True, eq=False)
class Seen:
    """``fleet`` and ``policy`` as the API tells them. Equal to itself alone: it can be a key."""

    now: datetime
    window_s: float
    fleet: Json
    policy: Json
    account: Mapping[str, Mapping[str, float]]
    """Seconds saved and lost, and money, by tier, of the last hours."""
    incidents: Sequence[Json]
    """Open ones."""
    windows: Mapping[str, Sequence[Window]]
    """The last ones of each store, oldest first."""
    typical: Mapping[str, Candidate | None]
    """What a request that finds chunks in the remote tier is like, by store."""
    ghosts: Mapping[str, Sequence[Ghosts]]
    """What the pools of each store would have hit otherwise."""
    decisions: Sequence[Decision]
    """Newest first."""
    switches: Sequence[Decision]
    """Those that did switch remote fetch, oldest first."""
    verdicts: Mapping[int, Sequence[Json]]
    waited: Sequence[Decision]
    """Wishes of the last day under a mode other than auto, newest first."""
    prospects: Sequence[Prospect]
    """The last ones of all namespaces, oldest first."""

    @property
    def since(self) -> datetime:
        return self.now - timedelta(seconds=POINTS * self.window_s)


@dataclass(frozen=True)
class _Read:
    """Of one store, when it had ``answered`` last."""

    answered: str
    windows: list[Window]
    candidates: list[Window]
    """The last ones of the remote in which requests found chunks there."""
    counted: tuple[Counted, ...] = ()
    """What ghosts told in these windows."""
    ghosts: tuple[Ghosts, ...] = ()


class Looks:
    def __init__(self, views: Views, history: History, *, now: Callable[[], datetime], window_s: float) -> None:
        self._views = views
        self._history = history
        self._now = now
        self._window_s = window_s
        self._lock = threading.Lock()
        self._last: Seen | None = None
        self._read: dict[str, _Read] = {}
        """By store."""

    def seen(self) -> Seen:
        """A look that is at most a second old."""
        with self._lock:
            if self._last is None or not timedelta(0) <= self._now() - self._last.now < SHARED:
                self._last = self._look()
            return self._last

    def _look(self) -> Seen:
        now, decisions = self._now(), self._history.decisions
        fleet = self._views.fleet()
        self._renew(fleet["stores"], now)
        shown = decisions.find(limit=SHOWN_DECISIONS)
        return Seen(
            now=now,
            window_s=self._window_s,
            fleet=fleet,
            policy=self._views.policies(),
            account=self._history.account(now - timedelta(hours=ACCOUNT_HOURS)),
            incidents=[one for one in self._views.incidents()["incidents"] if not one["closed_at"]],
            windows={name: read.windows for name, read in self._read.items()},
            typical={name: typical_candidate(read.candidates) for name, read in self._read.items()},
            ghosts={name: read.ghosts for name, read in self._read.items()},
            decisions=shown,
            switches=[one for one in decisions.find(states=CHANGED)[::-1] if one.field == FIELD and one.applied_at],
            verdicts=decisions.verdicts_of(one.id for one in shown if one.state in JUDGED),
            waited=decisions.waited(now - WISHED),
            prospects=self._history.prospects("", now - timedelta(seconds=POINTS * self._window_s)),
        )

    def _renew(self, stores: Sequence[Json], now: datetime) -> None:
        """Windows come only with an answer of their store: between two of them, what was read still holds."""
        since = now - timedelta(seconds=POINTS * self._window_s)
        before = {store["name"]: self._read.get(store["name"]) or _Read("", [], []) for store in stores}
        newest = {name: read.windows[-1].start if read.windows else since for name, read in before.items()}
        stale = {store["name"] for store in stores if before[store["name"]].answered != store["last_seen"]}
        known = {name for name in stale if newest[name] > since}
        told: dict[str, list[Window]] = {}
        for names in (known, stale - known):
            first = min((newest[name] for name in names), default=since)
            for window in self._history.fleet_windows(names, first) if names else ():
                if window.start >= newest[window.store]:
                    told.setdefault(window.store, []).append(window)
        self._read = {
            store["name"]: self._added(store, before[store["name"]], told.get(store["name"], []), since)
            for store in stores
        }

    def _added(self, store: Json, read: _Read, told: Sequence[Window], since: datetime) -> _Read:
        """What was told since the newest window that was read, that one included."""
        again = {window.start for window in told}
        windows = [*(one for one in read.windows if one.start not in again), *told]
        if not read.answered:
            candidates = self._history.candidate_windows(store["name"], "remote")
        else:
            more = [one for one in told if one.tier == "remote" and one.total("gate_candidate_requests_total")]
            candidates = [*(one for one in read.candidates if one.start not in again), *more]
        kept = [window for window in windows if window.start >= since]
        found = read.counted, read.ghosts
        if told or not kept:
            new = (one for window in told if (one := counted(window)))
            every = (*(one for one in read.counted if one.at not in again), *new)
            counts = tuple(one for one in every if one.at >= since)
            found = counts, ghosts(counts)
        return _Read(store["last_seen"], kept, candidates[-KEPT_CANDIDATE_WINDOWS:], *found)
