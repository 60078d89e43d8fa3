"""Least recently used."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator

from tiertune_connector.eviction.base import Key


class LRU:
    """The victim is the key that was not used for the longest time."""

    name = "lru"
    ghosts = 0

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()
        self.touch = self._order.move_to_end  # bound once: the hottest call of all
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._order)

    def admit(self, key: Key) -> None:
        """Recency alone decides; nothing to adapt."""

    def evict(self, pinned: Container[Key]) -> Key | None:
        for key in self._order:
            if key not in pinned:
                del self._order[key]
                return key
        return None

    def insert(self, key: Key) -> None:
        self._order[key] = None

    def remove(self, key: Key) -> None:
        del self._order[key]

    def resize(self, capacity: int) -> None:
        """The order does not depend on the capacity."""

    def adopt(self, keys: Iterable[Key]) -> None:
        self._order.update(dict.fromkeys(keys))
