"""Does the remote evict what it must? Asked only where the remote is managed."""

from tiertune_agent.fields import Json, read
from tiertune_agent.records import REMOTE, Target, Windows
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, Tuner
from tiertune_agent.tuners.eviction import EvictionSettings

FIELD = "remote.policy"
WANTED = "allkeys-lru"


class RemotePolicy(Tuner):
    """Chunks do not expire, so a policy that evicts nothing, or only expiring keys, keeps the first chunks for ever."""

    name = "remote_policy"
    key = "eviction"
    scope = "fleet"
    settings: EvictionSettings

    def targets(self, store: str, status: Json) -> list[Target]:  # noqa: ARG002 (the fleet's)
        return [REMOTE]

    def evaluate(self, history: Windows, current: Current) -> Answer:  # noqa: ARG002 (what is set is enough)
        found = str(read(current.tuning, FIELD))
        if found.startswith("allkeys-"):
            return NoChange(f"the remote stays with {found}, which evicts any key")
        told = f"with {found} the remote, once full, refuses every new chunk: chunks do not expire"
        return Proposal(FIELD, found, WANTED, told)
