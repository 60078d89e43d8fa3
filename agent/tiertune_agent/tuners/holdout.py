"""The share of requests held out from remote fetches follows the policy file."""

from tiertune_agent.fields import read
from tiertune_agent.records import Windows
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal
from tiertune_agent.tuners.remote_fetch import OfRemote

FIELD = "tiers.remote.holdout"


class Holdout(OfRemote):
    name = "holdout"

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (the policy is enough)
        before, wanted = read(current.tuning, FIELD) or 0.0, current.holdout  # another version may hold out none
        if before == wanted:
            return NoChange(f"as the policy says: {wanted:.1%} of the requests are held out from remote fetches")
        reason = f"the policy holds out {wanted:.1%} of the requests, the store {before:.1%}"
        return Proposal(FIELD, before, wanted, reason)
