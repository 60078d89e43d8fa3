"""Ghosts of a store's own DRAM pool: what it would have hit with other algorithms and sizes, as counters."""

from collections.abc import Iterable, Iterator, Sequence
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


class Ghosts:
    """The ghosts of one pool, and what was told of them: estimates may fall, a counter does not. Not thread-safe."""

    def __init__(self, room: Room) -> None:
        """``room`` is the pool's size when requests first come to it."""
        self._room = room
        self._ghosts = PoolGhosts(room.chunks)
        self._told: dict[tuple[str, int], tuple[float, float]] = {}
        self._chunks: dict[tuple[str, int], float] = {}
        """All that came, as last told: fewer mean that the ghosts count anew there."""

    def requests(self, room: Room, chains: Iterable[Sequence[bytes]], hashed: Hashes) -> None:
        """Requests looked these chains up, head first; ``hashed`` are the hashes of all their keys.

        ``room`` is the pool's size now.
        """
        if room != self._room:
            self._room = room
            self._ghosts.resize(room.chunks)
        self._ghosts.requests(chains, hashed)

    def rows(self, namespace: str, model: str, chunk_tokens: int) -> Iterator[Gauge]:
        """The pool's series of ``whatif_tokens_total``."""
        for (algorithm, chunks), told in self._tell().items():
            size = str(chunks * self._room.stride)
            for result, count in zip(("hit", "miss"), told, strict=True):
                yield "whatif_tokens_total", (algorithm, size, result, namespace, model), count * chunk_tokens

    def _tell(self) -> dict[tuple[str, int], tuple[float, float]]:
        """Chunks hit and missed so far, by algorithm and capacity."""
        told, counted = {}, self._ghosts.counts()
        for which, (hits, chunks) in counted.items():
            goes_on = chunks >= self._chunks.get(which, 0.0)
            hit, missed = self._told.get(which, (0.0, 0.0)) if goes_on else (0.0, 0.0)
            told[which] = max(hit, hits), max(missed, chunks - hits)
        self._told, self._chunks = told, {which: chunks for which, (_, chunks) in counted.items()}
        return told
