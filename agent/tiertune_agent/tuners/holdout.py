"""The share of requests that is held out from remote fetches follows the policy file."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tiertune_agent.fields import read
from tiertune_agent.records import Target, Window
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, Scope, tier_targets
from tiertune_agent.tuners.remote_fetch import RemoteFetchSettings

FIELD = "tiers.remote.holdout"


class Holdout:
    """Mode and period are those of ``remote_fetch``."""

    name: ClassVar = "holdout"
    key: ClassVar = "remote_fetch"
    scope: ClassVar[Scope] = "tier"

    def __init__(self, settings: RemoteFetchSettings) -> None:
        self.settings = settings

    def targets(self, store: str, status: Mapping[str, Any]) -> list[Target]:
        return tier_targets(store, ("remote",), status)

    def evaluate(self, history: Sequence[Window], current: Current) -> Answer:  # noqa: ARG002 (the policy is enough)
        before, wanted = read(current.tuning, FIELD), current.holdout
        if before == wanted:
            return NoChange(f"as the policy says: {wanted:.1%} of the requests are held out from remote fetches")
        reason = f"the policy holds out {wanted:.1%} of the requests, the store {before:.1%}"
        return Proposal(FIELD, before, wanted, reason)
