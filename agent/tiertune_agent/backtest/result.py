"""What a backtest over history found, as a document and as rows of a table. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from tiertune_agent.fields import Json, JsonDict, shown
from tiertune_agent.history.models import StoreRow
from tiertune_agent.records import CHANGED, Decision, Prospect, Windows, ended
from tiertune_connector.units import format_count, format_duration

NOT_ASKED = "its tuner had not been asked"


@dataclass(frozen=True)
class Recording:
    """What was recorded in a span of time, in order of time."""

    stores: Sequence[StoreRow]
    remote: StoreRow | None
    """None: nobody managed it."""
    tuning: Mapping[str, Json]
    """By store, when the span began."""
    windows: Windows
    prospects: Sequence[Prospect]
    decisions: Sequence[Decision]
    """Decisions that changed a store."""

    @property
    def since(self) -> datetime:
        return self.windows[0].start

    @property
    def until(self) -> datetime:
        return max(map(ended, self.windows))


@dataclass
class Backtest:
    """What the policy would have done, and what was done."""

    policy: str
    recording: Recording
    would: Sequence[Decision] = ()
    """The policy's decisions; proposed ones wait for approval."""
    verdicts: Mapping[int, str] = field(default_factory=dict)
    """By decision of the policy: why it was kept, rolled back, or neither."""
    same: Mapping[int, Decision] = field(default_factory=dict)
    """By decision of the policy: the recorded one that did the same."""
    instead: dict[int, str] = field(default_factory=dict)
    """By recorded decision: what the policy's tuner answered at that time."""
    answers: Sequence[Json] = ()
    """The last answer of every tuner for each target."""
    against_windows: int = 0
    """Windows with fetches that the policy would have switched off."""
    against_lost_s: float = 0.0
    """Seconds that these fetches lost; negative: saved."""
    unknown_remote: bool = False
    """Whether the policy manages a remote that is not in the history."""

    def document(self) -> JsonDict:
        """As ``--json`` writes it."""
        recording = self.recording
        return {
            "policy": self.policy,
            "since": recording.since.isoformat(),
            "until": recording.until.isoformat(),
            "stores": [store.name for store in recording.stores],
            "windows": len(recording.windows),
            "would": [self._would(one) for one in self.would],
            "done": [
                {**one.document(), "would": one.id in self._followed, "instead": self.instead.get(one.id)}
                for one in recording.decisions
            ],
            "answers": list(self.answers),
            "fetched_against_policy": {"windows": self.against_windows, "lost_s": self.against_lost_s},
            "sentences": [self.sum(), *self.notes()],
        }

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Table rows: when, tuner and target, change, what became of it, and why."""
        for one in self.would:
            same, verdict = self.same.get(one.id), self.verdicts.get(one.id)
            done = f"as done at {same.made_at:%H:%M:%S}" if same else "not done"
            why = f"{one.reason}; {verdict}" if verdict else one.reason
            yield *_row(one.created_at, one), f"{str(one.state).replace('_', ' ')}, {done}", why
        followed = self._followed
        for one in (one for one in self.recording.decisions if one.id not in followed):
            yield *_row(one.made_at, one), "done, would not have been", self.instead.get(one.id, NOT_ASKED)
        for answer in (answer for answer in self.answers if not answer["change"]):
            yield "at last", f"{answer['tuner']} of {answer['store']} {answer['tier']}", "", "none", answer["reason"]

    def notes(self) -> Iterator[str]:
        """What else to know, in sentences."""
        if self.against_windows:
            verb = "lost" if self.against_lost_s > 0 else "saved"
            told = f"these {verb} {abs(self.against_lost_s):.3g} s"
            windows = format_count(self.against_windows, "window")
            yield f"In {windows} there were fetches that it would have switched off: {told}."
        if self.unknown_remote:
            yield "It would manage the remote, of which the history tells nothing: sizes of the remote were not tested."

    @property
    def _followed(self) -> set[int]:
        """Recorded decisions that the policy would have made too."""
        return {one.id for one in self.same.values()}

    def sum(self) -> str:
        """The outcome in a sentence."""
        recording, made = self.recording, sum(one.state in CHANGED for one in self.would)
        span = format_duration((recording.until - recording.since).total_seconds())
        names = ", ".join(store.name for store in recording.stores)
        done = f"{len(recording.decisions)} were made, {len(self.same)} of them the same"
        return (
            f"Over {span} of {names}, since {_at(recording.since)}, {self.policy} would have made "
            f"{format_count(made, 'change')} and proposed {len(self.would) - made}; {done}."
        )

    def _would(self, one: Decision) -> JsonDict:
        same = self.same.get(one.id)
        return {**one.document(), "verdict": self.verdicts.get(one.id), "as_done": same.id if same else None}


def _row(at: datetime, decision: Decision) -> tuple[str, str, str]:
    before, after = (shown(decision.field, value) for value in (decision.before, decision.after))
    return _at(at), f"{decision.tuner} of {decision.target}", f"{before} → {after}"


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}"
