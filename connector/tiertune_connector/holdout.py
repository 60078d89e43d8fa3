"""Which requests are held out from remote fetches, so that what fetching saves can be measured. Pure."""

from xxhash import xxh3_64_intdigest

GROUPS = ("held", "fetched")


def held_out(request: str, share: float) -> bool:
    """The same answer for a request as long as the share stands: by the hash of its id."""
    return xxh3_64_intdigest(request.encode()) < share * 2**64
