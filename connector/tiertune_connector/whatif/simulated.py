"""A pool without bytes behind it: whole chains are written through it at once, as what-if and the replay do."""

from collections.abc import Sequence

from tiertune_connector.eviction import ARC, LRU, S3FIFO, Key
from tiertune_connector.eviction.runs import Passable, before, enter
from tiertune_connector.pool import Pool

LONG = 16
"""Chunks of a chain from which on it pays to use it as a whole."""
FLOODED = 16
"""A pool of at most so many times the chunks of a long chain is flooded by it: runs of them enter at once."""


class SimulatedPool(Pool[bool]):
    """The production's pool, by a shorter way; nothing is ever being written."""

    def write_through(self, keys: Sequence[Key], *, once: bool = False) -> None:
        """Touch or insert a whole chain, tail first. ``once``: the caller knows that no key is twice in it."""
        resident, eviction = self._resident, self._eviction
        if isinstance(eviction, LRU) and len(keys) >= LONG and not self._pins:
            new = [key for key in keys if key not in resident]
            resident.update(dict.fromkeys(new, True))
            for victim in eviction.use(keys, new, self._capacity):
                del resident[victim]
            return
        floods = len(keys) >= LONG and self._floods(keys)
        if floods and isinstance(eviction, (ARC, S3FIFO)) and (once or len(set(keys)) == len(keys)):
            self._write_runs(eviction, list(reversed(keys)))
            return
        touch, capacity = eviction.touch, self._capacity
        for key in reversed(keys):
            if key in resident:
                touch(key)
                continue
            eviction.admit(key)
            while len(resident) >= capacity:
                victim_now = eviction.evict(self._pins)
                if victim_now is None:
                    return
                del resident[victim_now]
            eviction.insert(key)
            resident[key] = True

    def _floods(self, keys: Sequence[Key]) -> bool:
        """Whether a chain pushes much out of a full pool with nothing pinned."""
        full = len(self._resident) == self._capacity > 0 and not self._pins
        return full and self._capacity <= FLOODED * len(keys)

    def _write_runs(self, eviction: Passable, keys: list[Key]) -> None:
        """Touch or insert ``keys`` in their order, where they flood the pool: those that are not here run by run."""
        resident = self._resident
        while keys:
            new = before(keys, resident)
            if new:
                inserted, left = enter(eviction, keys[:new])
                resident.update(dict.fromkeys(inserted, True))
                for key in left:
                    del resident[key]
                keys = keys[new:]
            here = self.prefix(keys)
            eviction.use(keys[:here])
            keys = keys[here:]
