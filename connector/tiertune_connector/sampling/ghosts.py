"""Ghosts of the store's own DRAM pools: what each would have hit with other algorithms and sizes, as counters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tiertune_connector.counters import Gauge
from tiertune_connector.whatif.pool_ghosts import PoolGhosts
from tiertune_connector.whatif.sampler import Hashes


class Room(NamedTuple):
    """A pool's size."""

    chunks: int
    """Chunks that it may hold."""
    stride: int
    """Bytes that each one takes."""


class _Pool:
    """The ghosts of one pool, and what was told of them: estimates may fall, a counter does not."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.ghosts = PoolGhosts(room.chunks)
        self._told: dict[tuple[str, int], tuple[float, float]] = {}
        self._chunks: dict[tuple[str, int], float] = {}
        """All that came, as last told: fewer mean that the ghosts count anew there."""

    def resize(self, room: Room) -> None:
        if room != self.room:
            self.room = room
            self.ghosts.resize(room.chunks)

    def told(self) -> dict[tuple[str, int], tuple[float, float]]:
        """Chunks hit and missed so far, by algorithm and capacity."""
        told, counted = {}, self.ghosts.counts()
        for which, (hits, chunks) in counted.items():
            goes_on = chunks >= self._chunks.get(which, 0.0)
            hit, missed = self._told.get(which, (0.0, 0.0)) if goes_on else (0.0, 0.0)
            told[which] = max(hit, hits), max(missed, chunks - hits)
        self._told, self._chunks = told, {which: chunks for which, (_, chunks) in counted.items()}
        return told


class Ghosts:
    """Ghosts of every pool that requests came to. Not thread-safe."""

    def __init__(self, room: Callable[[str], Room | None]) -> None:
        """``room`` returns the size of a namespace's pool; None: it has none."""
        self._room = room
        self._pools: dict[str, _Pool] = {}

    def requests(self, namespace: str, chains: Iterable[Sequence[bytes]], hashed: Hashes) -> None:
        """Requests looked these chains up, head first; ``hashed`` are the hashes of all their keys."""
        room = self._room(namespace)
        if room is None:
            return
        pool = self._pools.get(namespace)
        if pool is None:
            pool = self._pools[namespace] = _Pool(room)
        pool.resize(room)
        pool.ghosts.requests(chains, hashed)

    def clear(self) -> None:
        """Begin anew, as keys are hashed in another way from now on."""
        self._pools.clear()

    def forget(self, namespace: str) -> None:
        """Its pool is gone, and so are its series."""
        self._pools.pop(namespace, None)

    def rows(self, namespace: str, model: str, chunk_tokens: int) -> Iterator[Gauge]:
        """Series of ``whatif_tokens_total`` of one namespace."""
        if (pool := self._pools.get(namespace)) is None:
            return
        for (algorithm, chunks), told in pool.told().items():
            size = str(chunks * pool.room.stride)
            for result, count in zip(("hit", "miss"), told, strict=True):
                yield "whatif_tokens_total", (algorithm, size, result, namespace, model), count * chunk_tokens
