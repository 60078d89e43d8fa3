"""A pool without bytes behind it: whole chains are written through it at once, as what-if and the replay do."""

from tiertune_connector.eviction import Keys
from tiertune_connector.pool import Pool


class SimulatedPool(Pool[bool]):
    """The production pool by a shorter way, as nothing is ever being written."""

    hits = 0
    """Keys within the longest cached prefix of a ``request``, before it touched the cache."""

    def request(self, keys: Keys) -> None:
        """A request's keys, head first: count those that hit, and write all through."""
        self.hits += self.prefix(keys)
        self.write_through(keys)

    def write_through(self, keys: Keys) -> None:
        """Touch or insert a whole chain, tail first."""
        resident, eviction, capacity = self._resident, self._eviction, self.capacity
        touch = eviction.touch
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
