"""What local tiers have in common: pools, how they share the capacity, and how chunks are dropped in steps."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import sleep
from typing import Any, Generic, TypeVar

from tiertune_connector.pool import Placed, Pool
from tiertune_connector.tiers.base import FLUSHED, Evicted, OnEvicted, Usage
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

    @property
    def needed_bytes(self) -> int:
        """Bytes that last it for a while: its growth should be worth a segment."""
        return (len(self.pool) * 5 // 4 + 1) * self.stride

    def trim(self) -> None:
        """Evict what is too much: it was in use during a shrink, or came since."""
        if len(self.pool) > self.pool.capacity:  # mostly not, and each chunk's unpin asks
            self.evict(self.pool.trim(), "capacity")

    def evict(self, chunks: Placed[Any], reason: str) -> None:
        """Report chunks that left the pool, and let their slots go."""
        if chunks:
            self.evicted([self.last(key, slot, reason) for key, slot in chunks])

    def drop(self, key: bytes, tenant: bytes | None = None) -> bool:
        """Forget a chunk, which leaves once nobody uses it; False if it is not here, or not the ``tenant``'s."""
        slot = self.pool.get(key)
        if slot is None or tenant not in (None, self.tenant(slot)):
            return False
        self._left(key, self.pool.discard(key))
        return True

    def unpin(self, key: bytes) -> None:
        """A user is done with a chunk; what is too much leaves, as the capacity may have fallen meanwhile."""
        self._left(key, self.pool.unpin(key))
        self.trim()

    def _left(self, key: bytes, slot: Any) -> None:  # noqa: ANN401 (the pool's)
        """A dropped chunk has left its slot; None: it is still in use."""
        if slot is not None:
            self.evict([(key, slot)], FLUSHED)

    @abstractmethod
    def tenant(self, slot: Any) -> bytes:  # noqa: ANN401
        """Whose chunk is in a slot."""

    @abstractmethod
    def last(self, key: bytes, slot: Any, reason: str) -> Evicted:  # noqa: ANN401
        """Let go of a chunk's slot; returns what is known of the chunk."""


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
    """Set capacity and algorithm by namespace; pools follow in steps. Their sum never exceeds the capacity.

    Pools with bytes of their own get them, in the order of ``held``, as far as they are there. Of the others, those
    that were found keep what they hold as far as each of the rest gets what it needs or an even part; those that nobody
    uses, the last one first, as far as each of the rest gets what it needs. The rest share evenly what is left.
    """
    left = capacity_bytes

    def give(each: Held, nbytes: int) -> None:
        nonlocal left
        given = max(0, min(nbytes, left))
        each.allowed = given // each.stride
        left -= given

    own = {name: nbytes for name, (nbytes, _) in asked.items() if nbytes is not None}
    sharing = list[Held]()
    for name, each in held.items():
        if not each.lends and name in own:
            give(each, own[name])
        elif not each.lends:
            sharing.append(each)
    rest = [each for each in sharing if not each.found]
    needed = max((each.needed_bytes for each in rest), default=0)
    reserved = min(needed, left // max(1, len(sharing))) * len(rest)
    found = sorted((each for each in sharing if each.found), key=attrgetter("resident_bytes"))
    for before, each in enumerate(found):  # what is large gives way first
        give(each, min(each.resident_bytes, (left - reserved) // (len(found) - before)))
    for each in reversed([each for each in held.values() if each.lends]):
        give(each, min(each.resident_bytes, left - needed * len(rest)))
    for each in rest:
        each.allowed = left // len(rest) // each.stride
    for name, each in held.items():
        _, algorithm = asked.get(name, (None, ""))
        if algorithm not in ("", each.pool.algorithm):
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
