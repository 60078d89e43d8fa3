"""What auto would have done: wishes of tuners that may not change anything by themselves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tiertune_agent.fields import JsonDict
from tiertune_agent.policy.document import advises
from tiertune_agent.records import Decision, State
from tiertune_agent.tuners.advice import ADVICE
from tiertune_agent.web.look import Seen
from tiertune_agent.web.text import figure, span
from tiertune_connector.units import format_count

TOLD = ("tuner", "store", "tier", "pool", "field", "from", "to", "mode", "state", "reason")
"""Of a decision, by the API."""


def values(decision: Decision) -> tuple[str, str]:
    """What a decision changes, and to what, as the page writes it."""
    name = decision.field.rpartition(".")[2]
    return figure(name, decision.before), figure(name, decision.after)


@dataclass(frozen=True)
class Wish:
    """One change that would have been made when its decision was created."""

    decision: Decision
    until: datetime
    """When it was made or given up; now, if it is still wished."""

    @property
    def became(self) -> str:
        """What became of the wish."""
        one = self.decision
        if one.state == State.PROPOSED:
            return "It waits for approval." if one.mode == "recommend" else "The policy only observes here."
        if one.applied_at:
            return f"It was made {span((one.applied_at - one.created_at).total_seconds())} later, by {one.approved_by}."
        became = {State.REJECTED: f"rejected by {one.approved_by}", State.EXPIRED: "no longer wished"}
        return f"It was {became.get(one.state, one.state.replace('_', ' '))} at {self.until:%H:%M} UTC."

    def document(self) -> JsonDict:
        """As the API tells it."""
        told = self.decision.document()
        spell = {"at": told["created_at"], "until": self.until.isoformat(), "became": self.became}
        return {"decision": self.decision.id, **{name: told[name] for name in TOLD}, **spell}


def unmade(seen: Seen) -> list[Wish]:
    """Of several wishes of one field only the newest counts; what is still wished comes first."""
    wished = [
        one
        for one in reversed(seen.waited)
        if not advises(one.tuner) and not one.field.startswith(ADVICE)  # also for former tuners
    ]
    newest = {(one.tuner, one.target, one.field): one for one in wished}.values()
    told = sorted(newest, key=lambda one: (one.state != State.PROPOSED, -one.id))
    return [Wish(one, seen.now if one.state == State.PROPOSED else one.applied_at or one.updated_at) for one in told]


def sentence(wishes: Sequence[Wish]) -> str:
    """How many there are, in a sentence."""
    if not wishes:
        return "Nothing: no tuner that waits for approval, or only observes, wished a change in the last day."
    return f"On auto, TierTune would have made {format_count(len(wishes), 'change')} in the last day."
