"""The gates' margin, floor and holdout follow the policy file; the floor is higher where short fetches lost time."""

from datetime import timedelta

from tiertune_agent.fields import read
from tiertune_agent.records import Windows
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, since_change
from tiertune_agent.tuners.lengths import losing_lengths
from tiertune_agent.tuners.remote_fetch import OfRemote

MARGIN, FLOOR, HOLDOUT = "tiers.remote.margin", "tiers.remote.min_fetch_tokens", "tiers.remote.holdout"
TRIED_AGAIN = timedelta(days=1)
"""After this time short fetches are tried again, and prompts stand for candidates of a remote that is off: what is not
fetched cannot be seen to pay."""


class GateTuner(OfRemote):
    """Changes one field at a time."""

    name = "gate_settings"

    def evaluate(self, history: Windows, current: Current) -> Answer:
        margin, wanted = read(current.tuning, MARGIN), self.settings.margin
        learned = current.last if current.last and current.last.learned else None
        if margin != wanted:
            reason = f"the policy says margin {wanted:g}, the store has {margin}"
            return Proposal(MARGIN, margin, wanted, reason, {"requests": 0} if learned else {})  # so is the floor
        now, policy = read(current.tuning, FLOOR), self.settings.min_fetch_tokens
        if now is None or now < policy:
            return Proposal(FLOOR, now, policy, f"the policy says min_fetch_tokens {policy}, the store has {now}")
        windows = since_change(history, current)
        short = losing_lengths(windows, self.settings.disable_after)
        if short is not None and short.tokens > now:
            return Proposal(FLOOR, now, short.tokens, short.reason, {"requests": short.requests}, short.requests)
        if now == policy:
            return NoChange(f"as the policy says: margin {wanted:g}, floor {policy} tokens")
        if learned and (not windows or windows[-1].start < learned.at + TRIED_AGAIN):
            return NoChange(f"the floor stays at {now} tokens, above the policy's {policy}: shorter fetches lost")
        reason = f"the policy says min_fetch_tokens {policy}: what is shorter than {now} is tried again"
        return Proposal(FLOOR, now, policy, reason)


class Holdout(OfRemote):
    """The share of requests held out from remote fetches."""

    name = "holdout"

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (the policy is enough)
        before, wanted = read(current.tuning, HOLDOUT) or 0.0, current.holdout  # another version may hold out none
        if before == wanted:
            return NoChange(f"as the policy says: {wanted:.1%} of the requests are held out from remote fetches")
        reason = f"the policy holds out {wanted:.1%} of the requests, the store {before:.1%}"
        return Proposal(HOLDOUT, before, wanted, reason)
