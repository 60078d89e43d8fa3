"""Least recently used."""

from collections import deque
from collections.abc import Iterable, Sequence

from tiertune_connector.eviction.base import InOrder, Key


class LRU(InOrder):
    """The victim is the key that was not used for the longest time."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.touch = self.renew = self._order.move_to_end  # bound once: the hottest call of all

    def use(self, keys: Sequence[Key], new: Iterable[Key], capacity: int) -> list[Key]:
        """Touch or insert a whole chain, tail first; returns what leaves so that at most ``capacity`` stay.

        ``new`` are those of ``keys`` that are not resident. The same as one by one: the residents are the last used,
        whenever the others leave.
        """
        order = self._order
        for key in new:
            order[key] = None
        deque(map(order.move_to_end, reversed(keys)), maxlen=0)
        return [order.popitem(last=False)[0] for _ in range(len(order) - capacity)]
