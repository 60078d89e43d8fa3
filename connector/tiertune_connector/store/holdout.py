"""Which requests are held out from remote fetches, so that what fetching saves can be measured. Pure."""

from xxhash import xxh3_64_intdigest

from tiertune_connector.cost import GateSettings
from tiertune_connector.tuning import RemoteTuning

HELD, FETCHED = "held", "fetched"


def group_of(request: str, share: float) -> str:
    """A request's group, by the hash of its id and fixed while the share is; empty: nothing is held out."""
    if not share:
        return ""
    return HELD if xxh3_64_intdigest(request.encode()) < share * 2**64 else FETCHED


def bounds(group: str, remote: RemoteTuning) -> GateSettings:
    """Bounds of a request's gate: a held-out request does not fetch from the remote."""
    on = remote.fetch == "on" and group != HELD
    return GateSettings(on, remote.margin, remote.min_fetch_tokens, remote.deadline_factor)
