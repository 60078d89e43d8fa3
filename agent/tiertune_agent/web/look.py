"""One look at history: all that the page is made of, read at one moment."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter

from tiertune_agent.changes.control import unmakeable
from tiertune_agent.fields import Json
from tiertune_agent.records import JUDGED, Decision, State, Window, Windows, ended, grouped
from tiertune_agent.tuners.base import TypicalCandidate
from tiertune_agent.web.curves import Counted, Curve, by_gain, counted, curves
from tiertune_agent.web.figures import Cost, Span, Switched, WindowSums, added, cost, sums
from tiertune_agent.web.views import Views

POINTS = 60
"""Windows that "lately" means."""
ACCOUNT_HOURS = 24.0
SHOWN_DECISIONS = 25
WISHED = timedelta(days=1)
SHARED = timedelta(seconds=1)
"""Readers within this time share a look."""
LATE = timedelta(seconds=20)
"""A window may begin by so much before the one before it ended, if that one's answer was slow; it ends later."""
EMPTY = added(())


@dataclass(frozen=True)
class _Step:
    """Windows of one store that began at the same time, and what is read out of them once."""

    start: datetime
    sums: WindowSums
    counted: Sequence[Counted]
    """What ghosts counted."""
    remote: Window | None
    """Of the tier as a whole."""
    cost: Cost | None
    """By its own requests."""


@dataclass(frozen=True)
class SeenStore:
    """What the last windows of one store say, as of its last answer at ``answered``."""

    answered: str = ""
    steps: Sequence[_Step] = ()
    """Oldest first."""
    curves: Sequence[Curve] = ()
    """What its pools would have hit otherwise."""
    sums: WindowSums = EMPTY
    """This and the next: of ``steps``."""
    costs: Sequence[Cost] = ()
    """Of windows in which the cost of a fetch from the remote tier is known."""


NOTHING = SeenStore()


@dataclass(frozen=True, eq=False)
class Seen:
    """``fleet`` and ``policy`` as the API shows them. Equal only to itself, so it can be a key."""

    now: datetime
    since: datetime
    """When what is shown begins."""
    fleet: Json
    policy: Json
    account: Mapping[str, Mapping[str, float]]
    """Seconds saved and lost, and money, by tier, of the last hours."""
    incidents: Sequence[Json]
    """Open ones."""
    stores: Mapping[str, SeenStore]
    """By name, all that ``fleet`` has."""
    decisions: Sequence[Decision]
    """The last ones, and all that wait for somebody; newest first."""
    switches: Mapping[str, Switched]
    """Of remote fetch, by store."""
    verdicts: Mapping[int, Sequence[Json]]
    waited: Sequence[Decision]
    """Wishes of the last day under a mode other than auto, newest first."""

    @property
    def curves(self) -> list[Curve]:
        """Curves of all pools, those with most to gain first."""
        return by_gain(curve for store in self.stores.values() for curve in store.curves)


class Looks:
    def __init__(self, views: Views) -> None:
        self._views = views
        self._lock = threading.Lock()
        self._last: Seen | None = None
        self._stores: dict[str, SeenStore] = {}

    def seen(self) -> Seen:
        """A look that is at most a second old."""
        with self._lock:
            if self._last is None or abs(self._views.now() - self._last.now) >= SHARED:  # clocks are set back
                self._last = self._look()
            return self._last

    def _look(self) -> Seen:
        now, decisions = self._views.now(), self._views.history.decisions
        fleet, since = self._views.fleet(), now - timedelta(seconds=POINTS * self._views.window_s)
        self._renew(fleet["stores"], since, now)
        lately = decisions.find(limit=SHOWN_DECISIONS)
        waiting = (one for one in decisions.in_state(State.PROPOSED) if approvable(one))
        shown = sorted({one.id: one for one in (*waiting, *lately)}.values(), key=attrgetter("id"), reverse=True)
        return Seen(
            now=now,
            since=since,
            fleet=fleet,
            policy=self._views.policies(),
            account=self._views.history.ledger.account(now - timedelta(hours=ACCOUNT_HOURS)),
            incidents=[one for one in self._views.incidents()["incidents"] if not one["closed_at"]],
            stores=self._stores,
            decisions=shown,
            switches=decisions.switched(since),
            verdicts=self._views.history.verdicts.judging(one.id for one in shown if one.state in JUDGED),
            waited=decisions.waited(now - WISHED),
        )

    def _renew(self, stores: Sequence[Json], since: datetime, now: datetime) -> None:
        """Read new windows of stores that answered since; for others, what was read still holds."""
        named = {store["name"]: store for store in stores}
        before = {name: self._stores.get(name, NOTHING) for name in named}
        newest = {name: read.sums.until or since for name, read in before.items()}
        stale = {name for name, store in named.items() if before[name].answered != store["last_seen"]}
        known = {name for name in stale if newest[name] > since}
        measured = self._views.history.measured
        came = grouped(
            (
                window
                for names in (known, stale - known)
                if names
                for window in measured.fleet_windows(names, min(newest[name] for name in names) - LATE, now)
                if ended(window) > newest[window.store] and window.start >= since
            ),
            attrgetter("store"),
        )
        typical = measured.typical(named)
        self._stores = {
            name: _added(store, before[name], came.get(name, []), typical.get(name), (since, now))
            for name, store in named.items()
        }


def approvable(decision: Decision) -> bool:
    """Whether it waits for somebody's approval, and can be made."""
    return decision.state == State.PROPOSED and not unmakeable(decision)


def _steps(windows: Iterable[Window]) -> Iterator[_Step]:
    for start, each in groupby(windows, key=attrgetter("start")):
        told = list(each)
        remote = next((one for one in told if one.tier == "remote" and not one.namespace), None)
        counts = [one for one in map(counted, told) if one]
        yield _Step(start, added(map(sums, told)), counts, remote, cost(remote) if remote else None)


def _added(store: Json, read: SeenStore, came: Windows, typical: TypicalCandidate | None, span: Span) -> SeenStore:
    """Add the windows that came since; leave out those that did not begin within the span."""
    steps = [step for step in read.steps if span[0] <= step.start <= span[1]]
    answers = read.answered != store["last_seen"]
    if not answers and len(steps) == len(read.steps):
        return read
    steps += _steps(came)
    return SeenStore(
        store["last_seen"],
        steps,
        curves(store, (one for step in steps for one in step.counted)) if answers or not steps else read.curves,
        added(step.sums for step in steps),
        [paid for step in steps if (paid := step.cost or (step.remote and cost(step.remote, typical)))],
    )
