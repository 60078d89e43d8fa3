"""Segmented LRU (Karedla, Love and Wherry, 1994): what was used again is kept apart from what came once."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator

from tiertune_connector.eviction.base import Key, oldest_of

PROTECTED_SHARE = 0.2
"""Of the capacity. The paper's disks want more; conversations go on for some time, and then are never used again."""


class SLRU:
    """Two queues, least recently used first. The victim is of the first one; what is used there moves to the second."""

    name = "slru"

    def __init__(self, capacity: int) -> None:
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._again: OrderedDict[Key, None] = OrderedDict()
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[Key]:
        yield from self._once
        yield from self._again

    def touch(self, key: Key) -> None:
        if key in self._again:
            self._again.move_to_end(key)
        else:
            del self._once[key]
            self._again[key] = None
            self._bound()

    def renew(self, key: Key) -> None:
        self._queue_of(key).move_to_end(key)

    def admit(self, key: Key) -> None:
        """Nothing to adapt."""

    def evict(self, pinned: Container[Key]) -> Key | None:
        key = oldest_of(self._once, self._again, pinned)
        if key is not None:
            del self._queue_of(key)[key]
        return key

    def insert(self, key: Key) -> None:
        self._once[key] = None

    def remove(self, key: Key) -> None:
        del self._queue_of(key)[key]

    def resize(self, capacity: int) -> None:
        self._protected = int(PROTECTED_SHARE * capacity)
        self._bound()

    def adopt(self, keys: Iterable[Key]) -> None:
        """All as if they had come once: what is used again from now on is kept apart."""
        self._once.update(dict.fromkeys(keys))

    def _queue_of(self, key: Key) -> OrderedDict[Key, None]:
        return self._once if key in self._once else self._again

    def _bound(self) -> None:
        """What was not used for the longest time of those kept apart is with the others again, as the youngest."""
        while len(self._again) > self._protected:
            key, _ = self._again.popitem(last=False)
            self._once[key] = None
