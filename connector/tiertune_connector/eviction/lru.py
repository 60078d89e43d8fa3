"""Least recently used."""

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence

from tiertune_connector.eviction.base import Key, oldest


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
        key = oldest(self._order, pinned)
        if key is not None:
            del self._order[key]
        return key

    def insert(self, key: Key) -> None:
        self._order[key] = None

    def use(self, keys: Sequence[Key], new: Iterable[Key], capacity: int) -> list[Key]:
        """Touch or insert a whole chain, tail first; returns what leaves so that at most ``capacity`` stay.

        ``new`` are those of ``keys`` that are not resident. The same as one by one: the residents are the last used,
        whenever the others leave.
        """
        order = self._order
        order.update(dict.fromkeys(new))
        deque(map(order.move_to_end, reversed(keys)), maxlen=0)
        return [order.popitem(last=False)[0] for _ in range(len(order) - capacity)]

    def remove(self, key: Key) -> None:
        del self._order[key]

    def resize(self, capacity: int) -> None:
        """The order does not depend on the capacity."""

    def adopt(self, keys: Iterable[Key]) -> None:
        self._order.update(dict.fromkeys(keys))
