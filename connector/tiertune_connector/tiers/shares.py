"""What local tiers have in common: pools, how they share the capacity, and how chunks are dropped in steps."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from time import sleep
from typing import Any, Generic, TypeVar

from tiertune_connector.pool import Placed, Pool
from tiertune_connector.tiers.base import Evicted, OnEvicted, Usage
from tiertune_connector.tiers.steps import BREATH_S, in_steps

HANDED_OVER = 128
"""Chunks one step hands over to another algorithm: a quarter of a millisecond with the lock held."""


Asked = Mapping[str, tuple[int | None, str]]
"""By namespace its own bytes (None: a part of what the others leave), and its algorithm (empty: as it is)."""


@dataclass(eq=False)
class Held(ABC):
    """What a local tier holds of one namespace: a `DramPool` or a `DiskPool`.

    A chunk takes ``stride`` bytes; ``evicted`` hears of chunks that leave.
    """

    namespace: str
    chunk_bytes: int
    stride: int
    pool: Pool[Any]
    evicted: OnEvicted

    allowed = 0
    """Chunks that the tuning allows; the pool follows in steps."""
    lends = False
    """Nobody uses it: the others get what it does not hold, and what it holds as they need room."""
    found = False
    """Here since the start, and nobody has used it: others take what they need, at most their even part."""

    @property
    def effective(self) -> int:
        """Chunks that have room, or could."""
        return self.pool.capacity

    @property
    def resident_bytes(self) -> int:
        return len(self.pool) * self.stride

    def trim(self) -> None:
        """Evict what is too much: it was in use during a shrink, or came since."""
        if len(self.pool) > self.pool.capacity:
            self.evict(self.pool.trim(), "capacity")

    @abstractmethod
    def evict(self, chunks: Placed[Any], reason: str) -> None:
        """Report chunks that left the pool, and let their slots go."""

    @abstractmethod
    def drop(self, key: bytes, tenant: bytes | None = None) -> bool:
        """Forget a chunk, which leaves once nobody uses it; False if it is not here, or not the ``tenant``'s."""


AnyHeld = TypeVar("AnyHeld", bound=Held)


class LocalTier(Generic[AnyHeld]):
    """Pools by namespace, guarded by ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pools: dict[str, AnyHeld] = {}
        self.capacity_bytes = 0
        self.on_evicted: OnEvicted = lambda _: None

    def usage(self) -> Usage:
        with self.lock:
            held = self.pools.values()
            chunks = sum(len(each.pool) for each in held)
            return Usage(sum(each.resident_bytes for each in held), self.capacity_bytes, chunks)

    def _evicted(self, chunks: Sequence[Evicted]) -> None:
        self.on_evicted(chunks)

    def _named(self, namespace: str | None) -> list[AnyHeld]:
        """The pool of a namespace, if there is one; None: all. Call with the lock held."""
        return [pool for name, pool in self.pools.items() if namespace in (None, name)]

    def _drop_from(self, pools: Collection[AnyHeld], tenant: bytes | None, *, at_once: int) -> int:
        """Drop what is visible now, in steps, with requests served in between; returns how many chunks that were."""
        with self.lock:
            found = [(held, list(held.pool.visible)) for held in pools]
        count = 0
        for held, keys in found:
            for some in in_steps(self.lock, len(keys), at_once):
                if self.pools.get(held.namespace) is not held:  # closed meanwhile
                    break
                count += sum(held.drop(key, tenant) for key in keys[some])
            sleep(BREATH_S)
        return count


def retune(held: Mapping[str, Held], capacity_bytes: int, asked: Asked) -> None:
    """Set capacity and algorithm by namespace; those without own bytes share the rest. Pools follow in steps."""
    wanted = {name: asked.get(name, (None, ""))[0] for name, each in held.items() if not each.lends}
    kept = {name: held[name].resident_bytes for name, own in wanted.items() if own is None and held[name].found}
    wanted = {name: own for name, own in wanted.items() if name not in kept}
    needed = max((_needed_bytes(held[name]) for name, own in wanted.items() if own is None), default=0)
    lent = {name: each.resident_bytes for name, each in held.items() if each.lends}
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


def _needed_bytes(held: Held) -> int:
    """Bytes that last a pool for a while: its growth should be worth a segment."""
    return (len(held.pool) * 5 // 4 + 1) * held.stride


def share_capacity(
    total: int,
    asked: Mapping[str, int | None],
    lent: dict[str, int],
    *,
    needed: int,
    kept: Mapping[str, int],
) -> dict[str, int]:
    """Bytes for each pool: those with a number get it, as far as it is there; the others share the rest evenly.

    ``lent`` are bytes held by pools that nobody uses: they keep them, the last pool first, as far as each of the
    others still gets ``needed`` bytes. ``kept`` are those of pools that were found: these come first, as far as each
    of the others gets ``needed`` bytes or an even part. The sum never exceeds ``total``. Numbers are served in the
    order of the mapping.
    """
    shares: dict[str, int] = {}
    left = total

    def give(name: str, nbytes: int) -> None:
        nonlocal left
        shares[name] = max(0, min(nbytes, left))
        left -= shares[name]

    for name, wanted in asked.items():
        if wanted is not None:
            give(name, wanted)
    rest = [name for name, wanted in asked.items() if wanted is None]
    reserved = min(needed, left // max(1, len(rest) + len(kept))) * len(rest)
    for before, (name, holds) in enumerate(sorted(kept.items(), key=itemgetter(1))):  # what is large gives way first
        give(name, min(holds, (left - reserved) // (len(kept) - before)))
    for name, holds in reversed(lent.items()):
        give(name, min(holds, left - needed * len(rest)))
    return shares | dict.fromkeys(rest, left // max(1, len(rest)))
