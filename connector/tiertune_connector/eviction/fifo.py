"""First in, first out: a baseline that is known to be bad, never a candidate.

Registered so that a harmful change can be forced, in tests and in replays, and seen to be rolled back.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator

from tiertune_connector.eviction.base import Key, oldest


class FIFO:
    """The victim is the key that entered first; use does not matter."""

    name = "fifo"
    ghosts = 0

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._order)

    def touch(self, key: Key) -> None:
        """Entering alone decides."""

    def admit(self, key: Key) -> None:
        """Nothing to adapt."""

    def evict(self, pinned: Container[Key]) -> Key | None:
        key = oldest(self._order, pinned)
        if key is not None:
            del self._order[key]
        return key

    def insert(self, key: Key) -> None:
        self._order[key] = None

    def remove(self, key: Key) -> None:
        del self._order[key]

    def resize(self, capacity: int) -> None:
        """The order does not depend on the capacity."""

    def adopt(self, keys: Iterable[Key]) -> None:
        self._order.update(dict.fromkeys(keys))
