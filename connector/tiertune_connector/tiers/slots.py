"""One namespace in host memory: chunks in slots of shared segments, and the memory behind them."""

import logging
from dataclasses import dataclass, field

from tiertune_connector.chunk import NOBODY, Origin
from tiertune_connector.pool import Pool
from tiertune_connector.tiers.base import Evicted, OnEvicted
from tiertune_connector.tiers.index import SharedIndex
from tiertune_connector.tiers.segment import Segment, whole_pages
from tiertune_connector.tiers.shares import Held

log = logging.getLogger(__name__)
LEAVING_AT_ONCE = 64
"""Chunks one step evicts or gives back: well under a millisecond with the lock held."""


@dataclass(slots=True, eq=False)
class Slot:
    """A place in shared memory, and what is known of the chunk in it."""

    segment: Segment
    index: int
    generation: int = 0
    checksum: int = 0
    origin: Origin = NOBODY
    engine: str = ""
    """The engine that wrote the chunk; empty if it came from another tier."""
    used_at: float = 0.0
    uses: int = 0
    given_back: bool = False
    """Whether its memory went back to the machine."""
    behind: dict[str, float] = field(default_factory=dict)
    """Slower tiers that hold the chunk, and when that was known; infinite: a write is queued, or, below 0, dropped."""

    @property
    def nbytes(self) -> int:
        return self.segment.geometry.chunk_bytes

    def view(self) -> memoryview:
        return memoryview(self.segment.slot(self.index))  # type: ignore[arg-type]


Slots = list[Slot]


class DramPool(Held):
    """One namespace: a pool of keys, the segments behind it, and the free slots."""

    pool: Pool[Slot]

    def __init__(
        self,
        namespace: str,
        chunk_bytes: int,
        algorithm: str,
        evicted: OnEvicted,
        *,
        capacity_bytes: int,
    ) -> None:
        """``capacity_bytes`` is the most that the pool may hold for now."""
        super().__init__(namespace, chunk_bytes, whole_pages(chunk_bytes), Pool(0, algorithm), evicted)
        self.index = _index(capacity_bytes // self.stride)
        """Where clients look; None: they ask."""
        self.segments: dict[int, Segment] = {}
        self.free: Slots = []
        self.retired: dict[int, Slots] = {}
        """Slots given back, by segment."""
        self.provisioned = 0
        """Slots with memory behind them: all except those given back."""
        self.quarantined: Slots = []

    @property
    def effective(self) -> int:
        """Slots that hold chunks or may, including those in quarantine."""
        return self.pool.capacity + len(self.quarantined)

    @property
    def vacant(self) -> bool:
        """Whether nothing is left: no chunk, no memory."""
        return not (len(self.pool) or self.quarantined or self.segments)

    def fit(self, reason: str) -> None:
        """Bring the pool one step towards what is allowed and available."""
        usable = min(self.allowed, self.provisioned) - len(self.quarantined)
        capacity = max(0, usable, self.pool.capacity - LEAVING_AT_ONCE)
        self.evict(self.pool.resize(capacity), reason)

    def commit(self, key: bytes, slot: Slot) -> None:
        """The chunk in a reserved slot is whole."""
        self.pool.commit(key, slot)
        if self.index:
            self.index.put(key, (slot.segment.number, slot.index, slot.generation))

    def drop(self, key: bytes, tenant: bytes | None = None) -> bool:
        dropped = super().drop(key, tenant)
        if dropped and self.index:  # at once, also where somebody still uses it
            self.index.remove(key)
        return dropped

    def vacate(self, slot: Slot) -> None:
        """Nobody uses a slot any more."""
        slot.segment.renew(slot.index)
        self.free.append(slot)

    def close(self) -> None:
        """Give up all its memory."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        if self.index:
            self.index.close()

    def tenant(self, slot: Slot) -> bytes:
        return slot.origin.tenant

    def last(self, key: bytes, slot: Slot, reason: str) -> Evicted:
        if self.index:
            self.index.remove(key)
        self.vacate(slot)
        used, behind = slot.uses > 0, slot.behind
        return Evicted(self.namespace, self.pool.algorithm, reason, slot.used_at, slot.origin, used, key, behind)


def _index(chunks: int) -> SharedIndex | None:
    try:
        return SharedIndex.create(chunks)
    except OSError as error:
        log.warning("clients have no index of %d chunks to look in, and will ask: %s", chunks, error)
        return None
