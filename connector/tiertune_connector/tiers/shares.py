"""How a local tier's capacity is shared by its pools. Pure."""

from collections.abc import Mapping


def share_capacity(total: int, asked: Mapping[str, int | None]) -> dict[str, int]:
    """Bytes for each pool: those with a number get it, as far as it is there; the others share the rest evenly.

    The sum never exceeds ``total``. Numbers are served in the order of the mapping.
    """
    shares: dict[str, int] = {}
    left = total
    for name, wanted in asked.items():
        if wanted is not None:
            shares[name] = min(wanted, left)
            left -= shares[name]
    rest = [name for name, wanted in asked.items() if wanted is None]
    for name in rest:
        shares[name] = left // len(rest)
    return shares
