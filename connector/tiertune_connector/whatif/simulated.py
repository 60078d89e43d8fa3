"""A pool without bytes behind it: whole chains are written through it at once, as what-if and the replay do."""

from collections.abc import Sequence

from tiertune_connector.eviction import LRU, Key
from tiertune_connector.pool import Pool

LONG = 16
"""Chunks of a chain from which on it pays to use it as a whole."""


class SimulatedPool(Pool[bool]):
    """The production's pool, by a shorter way; nothing is ever being written."""

    def write_through(self, keys: Sequence[Key]) -> None:
        """Touch or insert a whole chain, tail first."""
        resident, eviction = self._resident, self._eviction
        if isinstance(eviction, LRU) and len(keys) >= LONG and not self._pins:
            new = [key for key in keys if key not in resident]
            resident.update(dict.fromkeys(new, True))
            for victim in eviction.use(keys, new, self._capacity):
                del resident[victim]
            return
        touch, capacity = eviction.touch, self._capacity
        for key in reversed(keys):
            if key in resident:
                touch(key)
                continue
            eviction.admit(key)
            while len(resident) >= capacity:
                leaving = eviction.evict(self._pins)
                if leaving is None:
                    return
                del resident[leaving]
            eviction.insert(key)
            resident[key] = True
