"""``tiertune policy backtest --history``: what a policy would have done over recorded history. Nothing is changed.

Production's tuners, guard, change control and verdicts run over the recorded windows and prospects, at their periods,
under a clock that jumps from window to window. Decisions go into a temporary database, and change a store's tuning only
in memory. Where that tuning differs from the recorded one, the windows still show what happened under the recorded one:
ghosts, prospects and predicted costs remain valid, outcomes of fetches do not.
"""

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx

from tiertune_agent.backtest.result import Backtest, Recording
from tiertune_agent.changes.actuator import Actuator
from tiertune_agent.changes.control import ChangeControl
from tiertune_agent.changes.judge import Judge
from tiertune_agent.changes.round import Round
from tiertune_agent.changes.rounds import Rounds
from tiertune_agent.changes.survey import HOUR
from tiertune_agent.fields import Json, JsonDict, read, replaced
from tiertune_agent.history.database import (
    UnusableError,
    connect,
    open_current,
    outdated,
    revisions,
    shown,
    sqlite_path,
)
from tiertune_agent.history.models import StoreRow
from tiertune_agent.history.store import History
from tiertune_agent.policy.document import LoadedPolicy
from tiertune_agent.records import (
    CHANGED,
    FLEET,
    JUDGED,
    OBSERVED,
    REMOTE,
    Decision,
    Prospect,
    Rates,
    Snapshot,
    StageWindow,
    State,
    Window,
    Windows,
    ended,
    parts,
)
from tiertune_agent.remote.split import Managed
from tiertune_agent.terminal.progress import Step, bar, unseen
from tiertune_agent.tuners.tier_size import horizon
from tiertune_connector.units import format_duration

One = TypeVar("One", Prospect, StageWindow)
EVERY = 1_000_000
LONGEST_S = 36500 * 86400.0
"""Longest time that may be asked of a history."""
NEVER = datetime.max.replace(tzinfo=UTC)


class BacktestError(RuntimeError):
    """There is nothing to test a policy on; the message says why."""


class Rehearsed:
    """A store whose tuning is a document in memory; it is never away, and takes every change."""

    def __init__(self, tuning: Json) -> None:
        self._tuning = dict(tuning)

    def tuning(self) -> JsonDict:
        return self._tuning

    def put_tuning(self, document: Json, *, expected: int, key: str) -> httpx.Response:  # noqa: ARG002
        self._tuning = {**document, "version": expected + 1}
        return httpx.Response(httpx.codes.OK, request=httpx.Request("PUT", "/v1/tuning"))


def backtest(url: str, loaded: LoadedPolicy, last_s: float) -> Backtest:
    """The policy over the last seconds of the history at ``url``, with a progress bar. DatabaseError, BacktestError."""
    with _recorded(url) as history:
        recording = record(history, last_s, loaded.policy.tuners.tier_size.period)
    with (
        TemporaryDirectory() as folder,
        closing(History(open_current(f"sqlite:///{Path(folder) / 'backtest.sqlite'}"))) as scratch,
        bar("backtest", len({ended(window) for window in recording.windows})) as shown,
    ):
        return Rehearsal(recording, loaded, scratch).run(shown.step)


def record(history: History, last_s: float, sizes_period_s: float) -> Recording:
    """All records of the ``last_s`` seconds up to when any store was last seen; BacktestError if they have no window.

    Includes earlier prospects that tier_size still weighs with a period of ``sizes_period_s``, and stages of an hour.
    """
    stores = [store for store in history.stores() if not store.status.get(OBSERVED)]  # observed ones are not tuned
    until = max((store.last_seen for store in stores), default=NEVER)
    since = until - timedelta(seconds=last_s)
    windows = [window for store in stores for window in history.measured.fleet_windows([store.name], since)]
    if not windows:
        raise BacktestError(f"the history holds no window of the last {format_duration(last_s)}")
    remote = history.store(FLEET)
    known = [*stores, remote] if remote else stores
    changed = history.decisions.find(states=CHANGED, limit=EVERY, since=since)
    return Recording(
        stores=[store for store in stores if any(window.store == store.name for window in windows)],
        remote=remote,
        tuning={store.name: _began_with(store, changed, since) for store in known},
        windows=sorted(windows, key=ended),
        prospects=sorted(history.measured.prospects("", since - horizon(sizes_period_s)), key=ended),
        stages=sorted(history.measured.stage_windows(since - HOUR, until), key=ended),
        decisions=sorted((one for one in changed if one.made_at >= since), key=attrgetter("made_at")),
    )


class Rehearsal:
    """The policy's tuners over what was recorded: the agent's rounds, one for every time at which windows ended."""

    def __init__(self, recording: Recording, loaded: LoadedPolicy, scratch: History) -> None:
        """Decisions go into ``scratch``, an empty history."""
        self._recording, self._loaded, self._scratch = recording, loaded, scratch
        self._at = recording.since
        self._stores = {store: Rehearsed(tuning) for store, tuning in recording.tuning.items()}
        changes = ChangeControl(scratch, Actuator(self._stores.get, tuple, lambda: None), self._now)
        window_s = median(window.seconds for window in recording.windows)
        self._rounds = Rounds(
            scratch, changes, now=self._now, window_s=window_s, timer=lambda: 0.0
        )  # all are asked, however long it takes
        self._judge = Judge(scratch, changes, self._now, self._lately)
        self._revision = scratch.journal.policy_revision(loaded.digest, loaded.source, loaded.text, self._at)
        self._fleet: dict[str, Snapshot] = {}
        self._records = {store.name: store for store in recording.stores}
        self._window_s = window_s
        self._late: dict[str, datetime] = {}
        """When each store's last report expires: after two windows, of median length, or of its own if longer."""
        self._last = {window.store: ended(window) for window in recording.windows}
        """When each store reported for the last time."""
        self._prospects, self._stages = deque(recording.prospects), deque(recording.stages)

    def run(self, step: Step = unseen) -> Backtest:
        """``step`` is called after each round."""
        for at, windows in _moments(self._recording.windows, timedelta(seconds=self._window_s / 2)):
            self._at = at
            self._collect(windows)
            this = self._round()
            if not self._rounds.tune_remote(this):
                self._rounds.tune([self._fleet[store] for store in windows], this)
            self._judge.run(this)
            step()
        return self._end()

    def _now(self) -> datetime:
        return self._at

    def _lately(self, store: str) -> Windows:
        return self._scratch.measured.fleet_windows([store], self._at - HOUR, self._at)

    def _round(self) -> Round:
        policy, remote = self._loaded.policy, self._recording.remote
        fleet = [snapshot for name, snapshot in self._fleet.items() if self._at < self._late[name]]
        missing = self._missing({snapshot.store for snapshot in fleet})
        managed, shared = policy.for_target(REMOTE).remote.manage, None
        if managed and remote:
            found = _snapshot(remote, self._stores[FLEET].tuning(), (), self._at)
            self._scratch.remember([(found, Rates())])
            shared = Managed(policy, found, fleet, missing)
        return Round(policy, self._revision, fleet, managed=managed, shared=shared, missing=missing)

    def _missing(self, there: Container[str]) -> list[str]:
        """Stores that do not answer now: they were seen before, and report again later."""
        known = self._records.items()
        return [name for name, one in known if name not in there and one.first_seen <= self._at < self._last[name]]

    def _collect(self, windows: Mapping[str, Windows]) -> None:
        for store, seen in windows.items():
            self._fleet[store] = _snapshot(self._records[store], self._stores[store].tuning(), seen, self._at)
            longest_s = max(self._window_s, *(window.seconds for window in seen))
            self._late[store] = self._at + timedelta(seconds=2 * longest_s)
        first, *others = (self._fleet[store] for store in windows)
        told = [replace(first, stages=tuple(_due(self._stages, self._at))), *others]  # also of sources, only observed
        self._scratch.remember([(snapshot, Rates()) for snapshot in told])
        self._rounds.heard(told)
        self._scratch.measured.remember_prospects(_due(self._prospects, self._at))

    def _end(self) -> Backtest:
        decisions = self._scratch.decisions
        would = decisions.find(limit=EVERY)[::-1]
        judged = (one.id for one in would if one.state in JUDGED)
        return Backtest(
            policy=self._loaded.source,
            recording=self._recording,
            would=would,
            verdicts={number: self._scratch.verdicts.of(number)[-1]["reason"] for number in judged},
            answers=self._scratch.answers.newest(),
            unknown_remote=self._loaded.policy.for_target(REMOTE).remote.manage and self._recording.remote is None,
        )


@contextmanager
def _recorded(url: str) -> Iterator[History]:
    """A history that exists and has this version's schema; a test does not migrate it."""
    path = sqlite_path(url)
    if path is not None and not path.is_file():
        raise UnusableError(f"database: there is no file {path}: name the one in the agent's settings")
    engine = connect(url)
    have, newest = revisions(engine)
    if have is None:
        raise BacktestError(f"database: {shown(url)} is empty: no agent has recorded anything there")
    if have != newest:
        raise outdated(have, newest)
    with closing(History(engine)) as history:
        yield history


def _began_with(store: StoreRow, changed: Sequence[Decision], since: datetime) -> Json:
    """The store's tuning at a time: what changes and rollbacks set from then on is set back, the newest first."""
    made = [(one.made_at, one.id, False, one) for one in changed]
    made += [(one.updated_at, one.id, True, one) for one in changed if one.state == State.ROLLED_BACK]
    tuning = store.tuning
    for at, _, undone, one in sorted(made, key=itemgetter(0, 1, 2), reverse=True):
        for part in parts(one) if at >= since else ():
            old, new = (part.after, part.before) if undone else (part.before, part.after)
            if part.target.store == store.name and read(tuning, part.field) == new:
                tuning = replaced(tuning, part.field, old)
    return tuning


def _moments(windows: Windows, apart: timedelta) -> Iterator[tuple[datetime, dict[str, list[Window]]]]:
    """Windows by the round that collected them, and by store; with the time of the last end.

    A round hears each store once, one a moment after another: ends that lie this far ``apart`` are of other rounds.
    """
    stores: dict[str, list[Window]] = {}
    first = at = datetime.max.replace(tzinfo=UTC)
    for window in windows:
        end, known = ended(window), stores.get(window.store)
        if stores and (end - first >= apart or (known and ended(known[0]) != end)):
            yield at, stores
            stores = {}
        first, at = (first if stores else end), end
        stores.setdefault(window.store, []).append(window)
    if stores:
        yield at, stores


def _due(waiting: deque[One], at: datetime) -> Iterator[One]:
    """What has ended by then waits no longer."""
    while waiting and ended(waiting[0]) <= at:
        yield waiting.popleft()


def _snapshot(store: StoreRow, tuning: Json, windows: Windows, at: datetime) -> Snapshot:
    status = _status(store.status, windows)
    return Snapshot(store.name, store.url, store.boot_id, store.version, at, status, tuning, tuple(windows))


def _status(last: Json, windows: Windows) -> Json:
    """The last status, with the sizes that pools had when the windows ended: ghosts are of a pool's own size."""
    for window in windows:
        nbytes = window.gauge("tier_capacity_bytes", state="effective")
        field = f"pools.{window.namespace}.{window.tier}.effective.capacity_bytes"
        if nbytes is not None and read(last, field) is not None:
            last = replaced(last, field, nbytes)
    return last
