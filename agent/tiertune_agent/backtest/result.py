"""What a backtest over history found, as a document and as rows of a table. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tiertune_agent.fields import Json, JsonDict, change
from tiertune_agent.history.models import StoreRow
from tiertune_agent.records import CHANGED, Decision, Prospect, StageWindow, Windows, ended
from tiertune_connector.units import format_count, format_duration

UNKNOWN_REMOTE = "The history tells nothing of the remote that it would manage: sizes of the remote were not tested."


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
    stages: Sequence[StageWindow]
    decisions: Sequence[Decision]
    """Decisions that changed a store."""

    @property
    def since(self) -> datetime:
        return self.windows[0].start

    @property
    def until(self) -> datetime:
        return max(map(ended, self.windows))


@dataclass(frozen=True)
class Backtest:
    """What the policy would have done, and what was done."""

    policy: str
    recording: Recording
    would: Sequence[Decision]
    """The policy's decisions; proposed ones wait for approval."""
    verdicts: Mapping[int, str]
    """By decision of the policy: why it was kept, rolled back, or neither."""
    answers: Sequence[Json]
    """The last answer of every tuner for each target."""
    unknown_remote: bool
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
            "would": [{**one.document(), "verdict": self.verdicts.get(one.id)} for one in self.would],
            "done": [one.document() for one in recording.decisions],
            "answers": list(self.answers),
            "sentences": self.sentences(),
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Table rows: when, by policy or agent, tuner and target, change, what became of it, and why."""
        made = [("policy", one) for one in self.would] + [("agent", one) for one in self.recording.decisions]
        for by, one in sorted(made, key=lambda row: row[1].made_at):
            verdict = self.verdicts.get(one.id) if by == "policy" else None
            told, why = change(one.field, one.before, one.after), f"{one.reason}; {verdict}" if verdict else one.reason
            yield _at(one.made_at), by, f"{one.tuner} of {one.target}", told, str(one.state).replace("_", " "), why
        for answer in self.answers:
            if not answer["change"]:
                place = f"{answer['tuner']} of {answer['store']} {answer['tier']}"
                yield "at last", "policy", place, "", "none", answer["reason"]

    def sentences(self) -> list[str]:
        """The outcome in a sentence, and what else to know."""
        recording, made = self.recording, sum(one.state in CHANGED for one in self.would)
        done = len(recording.decisions)
        span = format_duration((recording.until - recording.since).total_seconds())
        names = ", ".join(store.name for store in recording.stores)
        told = (
            f"Over {span} of {names}, since {_at(recording.since)}, {self.policy} would have made "
            f"{format_count(made, 'change')} and proposed {len(self.would) - made}; {done} were made."
        )
        return [told, UNKNOWN_REMOTE] if self.unknown_remote else [told]


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}"
