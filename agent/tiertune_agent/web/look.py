"""One look at history: all that the page is made of, read at one moment."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tiertune_agent.history.store import History
from tiertune_agent.records import CHANGED, Decision, State, Window
from tiertune_agent.tuners.base import Candidate
from tiertune_agent.tuners.remote_fetch import FIELD, typical_candidate
from tiertune_agent.web.views import Views

Json = Mapping[str, Any]
POINTS = 60
"""Windows that "lately" means."""
ACCOUNT_HOURS = 24.0
SHOWN_DECISIONS = 25
JUDGED = (State.KEPT, State.ROLLED_BACK, State.INCONCLUSIVE)
SHARED = timedelta(seconds=1)
"""Readers that come within this time share a look."""


@dataclass(frozen=True)
class Seen:
    """``fleet`` and ``policy`` as the API tells them."""

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
    decisions: Sequence[Decision]
    """Newest first."""
    switches: Sequence[Decision]
    """Those that did switch remote fetch, oldest first."""
    verdicts: Mapping[int, Sequence[Json]]

    @property
    def since(self) -> datetime:
        return self.now - timedelta(seconds=POINTS * self.window_s)


class Looks:
    def __init__(self, views: Views, history: History, *, now: Callable[[], datetime], window_s: float) -> None:
        self._views = views
        self._history = history
        self._now = now
        self._window_s = window_s
        self._lock = threading.Lock()
        self._last: Seen | None = None
        self._read: dict[str, tuple[str, list[Window], Candidate | None]] = {}
        """By store: when it last answered, and what its windows were then."""

    def seen(self) -> Seen:
        """A look that is at most a second old."""
        with self._lock:
            if self._last is None or not timedelta(0) <= self._now() - self._last.now < SHARED:
                self._last = self._look()
            return self._last

    def _look(self) -> Seen:
        now, decisions = self._now(), self._history.decisions
        fleet = self._views.fleet()
        self._read = {store["name"]: self._windows(store, now) for store in fleet["stores"]}
        shown = decisions.find(limit=SHOWN_DECISIONS)
        return Seen(
            now=now,
            window_s=self._window_s,
            fleet=fleet,
            policy=self._views.policies(),
            account=self._history.account(now - timedelta(hours=ACCOUNT_HOURS)),
            incidents=[one for one in self._views.incidents()["incidents"] if not one["closed_at"]],
            windows={name: windows for name, (_, windows, _) in self._read.items()},
            typical={name: typical for name, (_, _, typical) in self._read.items()},
            decisions=shown,
            switches=[one for one in decisions.find(states=CHANGED)[::-1] if one.field == FIELD and one.applied_at],
            verdicts={one.id: decisions.verdicts(one.id) for one in shown if one.state in JUDGED},
        )

    def _windows(self, store: Json, now: datetime) -> tuple[str, list[Window], Candidate | None]:
        """Windows come only with an answer of their store: between two of them, what was read still holds."""
        name, since = store["name"], now - timedelta(seconds=POINTS * self._window_s)
        answered, windows, typical = self._read.get(name, ("", [], None))
        if answered != store["last_seen"]:
            typical = typical_candidate(self._history.candidate_windows(name, "remote"))
            newest = windows[-1].start if windows else since
            known = [window for window in windows if window.start < newest]
            windows = [*known, *self._history.store_windows(name, newest)]
        return store["last_seen"], [window for window in windows if window.start >= since], typical
