"""What auto would have done: wishes of tuners that may not change anything by themselves. Pure."""

from dataclasses import dataclass
from datetime import datetime

from tiertune_agent.fields import JsonDict
from tiertune_agent.policy.document import advises
from tiertune_agent.records import Decision, State, Target
from tiertune_agent.tuners.advice import ADVICE
from tiertune_agent.web.look import Seen
from tiertune_agent.web.text import figure, span
from tiertune_connector.units import format_count

SHOWN = 20
TOLD = ("tuner", "store", "tier", "pool", "field", "from", "to", "mode", "state", "reason")
"""Of a decision, by the API."""


@dataclass(frozen=True)
class Wish:
    """One change that would have been made at ``at``."""

    decision: Decision
    at: datetime
    until: datetime
    """When it was made or given up; now, if it is still wished."""

    @property
    def change(self) -> str:
        name = self.decision.field.rpartition(".")[2]
        return f"{figure(name, self.decision.before)} → {figure(name, self.decision.after)}"

    @property
    def became(self) -> str:
        """What became of the wish."""
        one = self.decision
        if one.state == State.PROPOSED:
            return "It waits for approval." if one.mode == "recommend" else "The policy only observes here."
        if one.applied_at:
            return f"It was made {span((one.applied_at - self.at).total_seconds())} later, by {one.approved_by}."
        became = {State.REJECTED: f"rejected by {one.approved_by}", State.EXPIRED: "no longer wished"}
        return f"It was {became.get(one.state, str(one.state).replace('_', ' '))} at {self.until:%H:%M} UTC."

    def document(self) -> JsonDict:
        """As the API tells it."""
        told = self.decision.document()
        spell = {"at": self.at.isoformat(), "until": self.until.isoformat(), "became": self.became}
        return {"decision": self.decision.id, **{name: told[name] for name in TOLD}, **spell}


@dataclass(frozen=True)
class Unmade:
    wishes: tuple[Wish, ...]

    @property
    def shown(self) -> tuple[Wish, ...]:
        """On the page."""
        return self.wishes[:SHOWN]

    @property
    def sentence(self) -> str:
        if not self.wishes:
            return "Nothing: no tuner that waits for approval, or only observes, wished a change in the last day."
        return f"On auto, TierTune would have made {format_count(len(self.wishes), 'change')} in the last day."

    def document(self) -> JsonDict:
        """As the API tells it."""
        return {"sentence": self.sentence, "would": [wish.document() for wish in self.wishes]}


def unmade(seen: Seen) -> Unmade:
    """Of several wishes of one field only the newest counts; what is still wished comes first."""
    newest: dict[tuple[str, Target, str], Decision] = {}
    for decision in seen.waited:
        if not advises(decision.tuner) and not decision.field.startswith(ADVICE):  # also for former tuners
            newest.setdefault((decision.tuner, decision.target, decision.field), decision)
    wishes = (_wish(decision, seen.now) for decision in newest.values())
    return Unmade(tuple(sorted(wishes, key=lambda wish: (wish.decision.state != State.PROPOSED, -wish.decision.id))))


def _wish(decision: Decision, now: datetime) -> Wish:
    until = now if decision.state == State.PROPOSED else decision.applied_at or decision.updated_at
    return Wish(decision, decision.created_at, until)
