"""The interface of an eviction algorithm: it orders victims, and knows neither bytes nor time.

For a key that is to enter, a pool calls ``admit`` once, then ``evict`` as often as it needs room, then ``insert``; for
a resident key that is used again, ``touch``. Callers touch a request's chain tail first, so that a suffix leaves before
its prefix where the last use decides, as in LRU. A chain that one request writes piece by piece is used once: ``renew``
then puts the pieces in the order that they would have if they had come at once.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

Key = bytes
"""Opaque and hashable; the replay passes integers."""
Keys = Sequence[Key]
"""Of a chain, mostly all of it, head first."""
Order = OrderedDict[Key, None]
LOOKS = 64
"""Pinned keys that are passed at the head of one order before another is looked at."""


class Eviction(Protocol):
    """One algorithm over the resident keys of one pool. All methods are O(1), pinned keys aside.

    It remembers keys that are not resident, its ghosts: at most twice the capacity.
    """

    name: str

    def __init__(self, capacity: int) -> None:
        """An empty order for at most ``capacity`` resident keys."""

    def __len__(self) -> int:
        """Resident keys."""

    def __iter__(self) -> Iterator[Key]:
        """Resident keys, roughly the next victim first."""

    def touch(self, key: Key) -> None:
        """A resident ``key`` was used."""

    def renew(self, key: Key) -> None:
        """Make a resident ``key`` as young as if it entered, or was used, just now; this is no further use."""

    def admit(self, key: Key) -> None:
        """``key``, not resident, is about to enter: adapt."""

    def evict(self, pinned: Container[Key]) -> Key | None:
        """Remove and return the next victim that is not pinned; None (and no change) if there is none."""

    def insert(self, key: Key) -> None:
        """``key`` is resident from now on."""

    def remove(self, key: Key) -> None:
        """A resident ``key`` left for a reason other than room: forget it."""

    def resize(self, capacity: int) -> None:
        """Change the capacity; the pool evicts down to it, before or after."""

    def adopt(self, keys: Iterable[Key]) -> None:
        """Take over residents, next victim first, from another algorithm, maybe in pieces; self holds no others."""


class InOrder:
    """One order of all resident keys: the victim is the first, a new key is the last."""

    def __init__(self, capacity: int) -> None:
        self._order: Order = OrderedDict()
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._order)

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


def oldest(order: Iterable[Key], pinned: Container[Key]) -> Key | None:
    """The first key in ``order`` that is not pinned."""
    for key in order:
        if key not in pinned:
            return key
    return None


def oldest_of(first: Iterable[Key], second: Iterable[Key], pinned: Container[Key]) -> Key | None:
    """The first key that is not pinned, of ``second`` if those of ``first`` that are next to leave are.

    A long prompt that is loaded or written pins many: each of its keys that enters must not look at all of them.
    """
    for key in first:
        if key not in pinned:
            return key
        break  # most are free at once, and a ghost pins nothing: it comes here with every key
    return oldest(chain(islice(first, LOOKS), islice(second, LOOKS), first, second), pinned)
