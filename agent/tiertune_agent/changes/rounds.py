"""Rounds of tuning: each asks every tuner whose period is over, and takes what it wishes."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

from tiertune_agent.changes.control import ChangeControl, Refused
from tiertune_agent.changes.question import Question
from tiertune_agent.changes.round import Round
from tiertune_agent.changes.survey import HOUR, Survey, TierWindows
from tiertune_agent.history.changed import Place, place
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.history.store import History
from tiertune_agent.policy.document import made
from tiertune_agent.records import REMOTE, Now, Snapshot, State, Target
from tiertune_agent.remote.split import SPLIT
from tiertune_agent.tuners.base import NoChange, Proposal, Tuner
from tiertune_agent.tuners.registry import OF_REMOTE, OF_SOURCES, OF_STORES
from tiertune_agent.tuners.tier_size import TierSize
from tiertune_connector.units import Clock

Asked = tuple[Tuner, Target]


class Rounds:
    def __init__(
        self,
        history: History,
        changes: ChangeControl,
        *,
        now: Now,
        window_s: float,
        timer: Clock = time.perf_counter,
    ) -> None:
        """``timer`` counts seconds: a round asks for at most half a window."""
        self._history = history
        self._changes = changes
        self._now = now
        self._timer = timer
        self._half = timedelta(seconds=window_s / 2)
        self._asked: dict[Place, tuple[datetime, datetime]] = {}
        """When each was asked, and when it is due again; without those whose answer was lost."""
        self._led: tuple[datetime, datetime] | None = None
        """When the first and the last of the rounds began that no hour lies between."""
        self._windows = TierWindows(history)
        self._next = ""
        """The store that the last round had no time for."""

    def forget(self) -> None:
        """Read the kept windows from history again."""
        self._windows.forget()
        self._led = None

    def heard(self, snapshots: Iterable[Snapshot]) -> None:
        """New windows, which history has already."""
        self._windows.heard(snapshots)

    def tune(self, snapshots: Sequence[Snapshot], this: Round) -> None:
        """Ask about stores, beginning where the last round ran out of time."""
        now, led = self._now(), self._led
        began = led[0] if led and now - led[1] <= HOUR else now
        self._led = began, now
        self._asked = {key: (at, due) for key, (at, due) in self._asked.items() if now < due + HOUR}
        with self._asking(snapshots) as survey:
            resting = {at for at, (_, due) in self._asked.items() if now < due}
            here = {snapshot.store for snapshot in snapshots}
            stays = (
                one
                for one in survey.proposed
                if one.target.store not in here or place(one.tuner, one.target) in resting
            )
            this.note(filter(this.makeable, stays))
            started = self._timer()
            first = next((index for index, each in enumerate(snapshots) if each.store == self._next), 0)
            for snapshot in (*snapshots[first:], *snapshots[:first]):
                if self._timer() - started > self._half.total_seconds():
                    self._next = snapshot.store
                    break
                self._ask(_asked(OF_STORES, snapshot, this), snapshot, this, survey)
            if now - began > HOUR:
                survey.withdraw_all_but(self._asked)

    def advise(self, sources: Sequence[Snapshot], this: Round) -> None:
        """Ask about sources that are only observed: nothing there can be set, so they only get advice."""
        with self._asking(sources) as survey:
            for snapshot in sources:
                self._ask(_asked(OF_SOURCES, snapshot, this), snapshot, this, survey)

    def tune_remote(self, this: Round) -> bool:
        """Ask about the remote and the split of one budget. Returns whether anything was, or may have been, changed."""
        shared = this.shared
        if shared is None:
            return False
        rule = shared.rule
        asked = [(made(kind, rule), shared.target if kind.scope == "size" else REMOTE) for kind in OF_REMOTE]
        with self._asking(this.fleet) as survey:
            if shared.complete:
                other = SPLIT if shared.target == REMOTE else REMOTE
                survey.withdraw(TierSize.name, other, f"{shared.target} is sized now")
            return self._ask(asked, shared.snapshot, this, survey)

    def leave_remote(self, why: str) -> None:
        """``why`` becomes the answer of all that is asked about the remote."""
        asked = [(TierSize.name, SPLIT), *((kind.name, REMOTE) for kind in OF_REMOTE)]
        self._history.answers.remember(((tuner, target, NoChange(why)) for tuner, target in asked), self._now())

    def _ask(self, those: Iterable[Asked], snapshot: Snapshot, this: Round, survey: Survey) -> bool:
        """Ask those that are due, up to one that changed, or may have changed, something: the rest wait a window."""
        return any(
            self._due(tuner, target)
            and self._taken(Question(tuner, target, snapshot, this, survey, self._now, self._changes.frozen))
            for tuner, target in those
        )

    def _due(self, tuner: Tuner, target: Target) -> bool:
        now, at = self._now(), place(tuner.name, target)
        waits = timedelta(seconds=tuner.settings.look_s) - self._half
        if at in self._asked and now < self._asked[at][0] + waits:
            return False
        self._asked[at] = now, now + waits
        return True

    @contextmanager
    def _asking(self, those: Iterable[Snapshot]) -> Iterator[Survey]:
        """A survey of these, whose answers are written at the end; if they cannot be, tuners are asked again."""
        now, asked = self._now(), self._asked.copy()
        survey = Survey(self._history, now, self._windows, {one.store for one in those})
        try:
            try:
                yield survey
            finally:
                self._history.answers.remember(survey.told, now)
        except DatabaseError:
            self._asked = asked
            raise

    def _taken(self, question: Question) -> bool:
        """Ask, and take what is wished. Returns whether the store was, or may have been, changed."""
        tuner, target, survey = question.tuner.name, question.target, question.survey
        answer = question.answer()
        survey.told.append((tuner, target, answer))
        if not isinstance(answer, Proposal):
            survey.withdraw(tuner, target, answer.reason, answer.refused)
            return False
        version = int(question.snapshot.tuning.get("version", 0))
        try:
            made = self._changes.take(
                tuner, target, answer, mode=question.rules.mode, version=version, policy=question.this.revision
            )
        except Refused:  # an operator was quicker
            return True
        if made.state not in (State.FAILED, State.EXPIRED):
            question.this.note([made])
        return made.state != State.PROPOSED


def _asked(kinds: Iterable[type[Tuner]], snapshot: Snapshot, this: Round) -> Iterator[Asked]:
    """Each kind of tuner with each of its targets there, as the policy sets it for the target."""
    for kind in kinds:
        for target in made(kind, this.policy).targets(snapshot.store, snapshot.status):
            yield made(kind, this.rule(target)), target
