"""Least recently used."""

from tiertune_connector.eviction.base import InOrder


class LRU(InOrder):
    """The victim is the key unused for the longest time."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.touch = self.renew = self._order.move_to_end  # bound once: the hottest call of all
