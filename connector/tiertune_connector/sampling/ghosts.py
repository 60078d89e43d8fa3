"""Ghosts of a store's own DRAM pool: what it would have hit with other algorithms and sizes, as counters."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tiertune_connector.counters import Gauge
from tiertune_connector.whatif.pool_ghosts import PoolGhosts
from tiertune_connector.whatif.sampler import Hashes

_NOTHING = (0.0, 0.0, 0.0)


class Room(NamedTuple):
    """A pool's size."""

    chunks: int
    """Chunks that it may hold."""
    stride: int
    """Bytes that each one takes."""

    def of(self, each: float) -> "Room":
        """The same for chains that take ``each`` chunks where one is asked for."""
        return Room(int(self.chunks / each), round(self.stride * each))


class Ghosts:
    """The ghosts of one pool, and what was told of them: estimates may fall, a counter does not. Not thread-safe."""

    def __init__(self, room: Room) -> None:
        """``room`` is the pool's size when requests first come to it."""
        self._room = room
        self._ghosts = PoolGhosts(room.chunks)
        self._told: dict[tuple[str, int], tuple[float, float, float]] = {}
        """By algorithm and capacity: chunks hit, missed, and all that came."""

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
        told = {}
        for which, (hits, chunks) in self._ghosts.counts().items():
            hit, missed, came = self._told.get(which, _NOTHING)
            if chunks < came:  # the ghosts count anew there
                hit, missed, _ = _NOTHING
            told[which] = max(hit, hits), max(missed, chunks - hits), chunks
        self._told = told
        for (algorithm, chunks), (hit, missed, _) in self._told.items():
            size = str(chunks * self._room.stride)
            for result, count in (("hit", hit), ("miss", missed)):
                yield "whatif_tokens_total", (algorithm, size, result, namespace, model), count * chunk_tokens
