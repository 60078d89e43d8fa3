"""How a local tier's capacity is shared by its pools."""

from collections.abc import Container, Mapping
from operator import itemgetter
from typing import Any, Protocol

from tiertune_connector.pool import Pool

HANDED_OVER = 128
"""Chunks one step hands over to another algorithm: a quarter of a millisecond with the lock held."""


class Held(Protocol):
    """What a local tier holds of one namespace: a `DramPool` or a `DiskPool`."""

    pool: Pool[Any]
    stride: int
    """Bytes that a chunk takes."""
    allowed: int
    """Chunks that the tuning allows; the pool follows in steps."""
    lends: bool
    """Nobody uses it: the others get what it does not hold, and what it holds as they need room."""
    found: bool
    """Here since the start, and nobody has used it: others take what they need, at most their even part."""

    @property
    def effective(self) -> int:
        """Chunks that have room, or could."""


def retune(held: Mapping[str, Held], capacity_bytes: int, asked: Mapping[str, tuple[int | None, str]]) -> None:
    """Set capacity and algorithm by namespace; those without own bytes share the rest. Pools follow in steps."""
    wanted = {name: asked.get(name, (None, ""))[0] for name, each in held.items() if not each.lends}
    kept = {name: _bytes(held[name]) for name, own in wanted.items() if own is None and held[name].found}
    wanted = {name: own for name, own in wanted.items() if name not in kept}
    needed = max((_needed_bytes(held[name]) for name, own in wanted.items() if own is None), default=0)
    lent = {name: _bytes(each) for name, each in held.items() if each.lends}
    for name, share in share_capacity(capacity_bytes, wanted, lent, needed=needed, kept=kept).items():
        each, algorithm = held[name], asked.get(name, (None, ""))[1]
        each.allowed = share // each.stride
        if algorithm and algorithm != each.pool.algorithm:
            each.pool.switch(algorithm, whole=False)


def crowded(held: Mapping[str, Held], own: Container[str]) -> bool:
    """Whether a pool in use, all but full and without ``own`` bytes, should have room that another one has."""
    shares = [each for name, each in held.items() if name not in own and not (each.lends or each.found)]
    short = [each.allowed * each.stride for each in shares if len(each.pool) * 10 >= each.allowed * 9]
    least = min(short, default=None)
    return least is not None and any(
        each.allowed > 0 and (each.lends or (each.found and each.allowed * each.stride > least))
        for each in held.values()
    )


def _bytes(held: Held) -> int:
    return len(held.pool) * held.stride


def _needed_bytes(held: Held) -> int:
    """Bytes that last a pool for a while: its growth should be worth a segment."""
    return (len(held.pool) * 5 // 4 + 1) * held.stride


def share_capacity(
    total: int,
    asked: Mapping[str, int | None],
    lent: dict[str, int],
    *,
    needed: int = 0,
    kept: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Bytes for each pool: those with a number get it, as far as it is there; the others share the rest evenly.

    ``lent`` are bytes held by pools that nobody uses: they keep them, the last pool first, as far as each of the
    others still gets ``needed`` bytes. ``kept`` are those of pools that were found: these come first, as far as each
    of the others gets ``needed`` bytes or an even part. The sum never exceeds ``total``. Numbers are served in the
    order of the mapping.
    """
    shares: dict[str, int] = {}
    left = total
    for name, wanted in asked.items():
        if wanted is not None:
            shares[name] = min(wanted, left)
            left -= shares[name]
    rest = [name for name, wanted in asked.items() if wanted is None]
    kept = kept or {}
    even = left // max(1, len(rest) + len(kept))
    room = left - min(needed, even) * len(rest)
    for before, (name, holds) in enumerate(sorted(kept.items(), key=itemgetter(1))):  # what is large gives way first
        shares[name] = min(holds, room // (len(kept) - before))
        room -= shares[name]
        left -= shares[name]
    for name, holds in reversed(lent.items()):
        shares[name] = max(0, min(holds, left - needed * len(rest)))
        left -= shares[name]
    for name in rest:
        shares[name] = left // len(rest)
    return shares
