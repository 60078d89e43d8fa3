"""The interface of an eviction algorithm: it orders victims, and knows neither bytes nor time.

A pool calls, for a key that is to enter: ``admit`` once, then ``evict`` as often as room is needed, then ``insert``.
For a resident key that is used again: ``touch``. Callers touch a request's chain tail first, so that a suffix always
leaves before its prefix.
"""

from collections.abc import Container, Iterable, Iterator
from typing import Protocol

Key = bytes
"""Opaque and hashable; the replay passes integers."""


class Eviction(Protocol):
    """One algorithm over the resident keys of one pool. All methods are O(1), pinned keys aside."""

    name: str

    def __init__(self, capacity: int) -> None:
        """An empty order for at most ``capacity`` resident keys."""

    def __len__(self) -> int:
        """Resident keys."""

    def __iter__(self) -> Iterator[Key]:
        """Resident keys, roughly the next victim first."""

    @property
    def ghosts(self) -> int:
        """Keys remembered that are not resident: at most twice the capacity."""

    def touch(self, key: Key) -> None:
        """A resident ``key`` was used."""

    def admit(self, key: Key) -> None:
        """``key``, not resident, is about to enter: adapt."""

    def evict(self, pinned: Container[Key]) -> Key | None:
        """Remove and return the next victim that is not pinned; None (and no change) if there is none."""

    def insert(self, key: Key) -> None:
        """``key`` is resident from now on."""

    def remove(self, key: Key) -> None:
        """A resident ``key`` left for another reason than room: no memory of it is kept."""

    def resize(self, capacity: int) -> None:
        """Another capacity; the pool evicts down to it, before or after."""

    def adopt(self, keys: Iterable[Key]) -> None:
        """Take over residents, next victim first, from another algorithm; self is empty."""


def oldest(order: Iterable[Key], pinned: Container[Key]) -> Key | None:
    """The first key in ``order`` that is not pinned."""
    for key in order:
        if key not in pinned:
            return key
    return None
