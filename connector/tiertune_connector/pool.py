"""One namespace in one local tier: index, capacity, pins, eviction. Pure: no I/O, no clock.

Keys are opaque; what a key maps to (its place: a slot, a file offset, nothing in the replay) is the caller's. A key is
*writing* between ``reserve`` and ``commit``: it takes room and cannot be evicted, but is not visible.
"""

from collections import deque
from collections.abc import Collection, Iterator, KeysView
from itertools import filterfalse
from typing import Generic, TypeVar

from tiertune_connector.eviction import ALGORITHMS, Eviction, Handover, Key, Keys

Place = TypeVar("Place")
Placed = list[tuple[Key, Place]]
"""Keys with their places."""
HANDED_OVER = 32
"""Chunks handed to another algorithm with each one that enters: many more than leave by the old order."""


class Pool(Generic[Place]):
    """At most ``capacity`` chunks, ordered by an eviction algorithm. Not thread-safe: the store's lock guards it."""

    def __init__(self, capacity: int, algorithm: str = "lru") -> None:
        self.capacity = capacity
        """Chunks allowed; ``resize`` changes it."""
        self._eviction: Eviction | Handover = ALGORITHMS[algorithm](capacity)
        self._resident: dict[Key, Place] = {}
        self._writing: set[Key] = set()
        self._pins: dict[Key, int] = {}  # users of each pinned key; a writing key counts as pinned
        self._leaving: dict[Key, Place] = {}  # discarded while pinned: invisible, but still taking room

    @property
    def algorithm(self) -> str:
        return self._eviction.name

    @property
    def pinned(self) -> int:
        """Chunks that cannot be evicted now."""
        return len(self._pins)

    @property
    def leaving(self) -> Collection[Place]:
        """Places of discarded keys that still have users."""
        return self._leaving.values()

    def __len__(self) -> int:
        """Chunks that take room: visible and writing ones."""
        return len(self._resident) + len(self._writing) + len(self._leaving)

    def __contains__(self, key: Key) -> bool:
        return key in self._resident

    def __iter__(self) -> Iterator[Key]:
        """Visible keys, roughly the next victim first."""
        return (key for key in self._eviction if key in self._resident)

    @property
    def visible(self) -> KeysView[Key]:
        """Visible keys, live and in no order: the quickest way to ask for many."""
        return self._resident.keys()

    def get(self, key: Key) -> Place | None:
        """The place of a visible key, else None."""
        return self._resident.get(key)

    def places(self, keys: Keys) -> Placed[Place]:
        """A chain's visible keys, with their places."""
        get = self._resident.get
        return [(key, place) for key in keys if (place := get(key)) is not None]

    def busy(self, key: Key) -> bool:
        """Whether a key that is not visible cannot be reserved: it is being written, or has not quite left."""
        return key in self._writing or key in self._leaving

    @property
    def room(self) -> int:
        """Chunks that could be reserved one after another now."""
        return max(0, self.capacity - len(self._pins))

    def prefix(self, keys: Keys) -> int:
        """Length of the longest visible prefix of a chain."""
        first = next(filterfalse(self._resident.__contains__, keys), None)
        return len(keys) if first is None else keys.index(first)

    def touch(self, keys: Keys) -> None:
        """Use a chain's visible keys, tail first."""
        deque(map(self._eviction.touch, filter(self._resident.__contains__, reversed(keys))), maxlen=0)

    def renew(self, keys: Keys) -> None:
        """Make a chain's visible and writing keys as young as new ones, tail first; this is not a use."""
        resident, writing, renew = self._resident, self._writing, self._eviction.renew
        for key in reversed(keys):
            if key in resident or key in writing:
                renew(key)

    def reserve(self, key: Key) -> Placed[Place] | None:
        """Take room for a new key and mark it writing; returns what was evicted for it.

        Atomic: None, and no change, if the key is here already, or pins leave no room.
        """
        if key in self._resident or self.busy(key) or not self.room:
            return None
        self.hand_over(HANDED_OVER)
        self._eviction.admit(key)
        evicted = self._evict_down_to(self.capacity - 1)
        self._eviction.insert(key)
        self._writing.add(key)
        self._pins[key] = 1
        return evicted

    def commit(self, key: Key, place: Place) -> None:
        """Make a writing key visible, as it is whole."""
        self._writing.remove(key)
        self._unpin(key)
        self._resident[key] = place

    def abort(self, key: Key) -> None:
        """Give up a writing key."""
        self._writing.remove(key)
        self._unpin(key)
        self._eviction.remove(key)

    def pin(self, key: Key) -> Place | None:
        """Keep a visible key from eviction; None if it is not visible."""
        place = self._resident.get(key)
        if place is not None:
            self._pins[key] = self._pins.get(key, 0) + 1
        return place

    def unpin(self, key: Key) -> Place | None:
        """Remove one user; with the last one of a discarded key, return its place."""
        self._unpin(key)
        return self._leaving.pop(key, None) if key not in self._pins else None

    def discard(self, key: Key) -> Place | None:
        """Make a visible key invisible at once; its place is returned here, or by the ``unpin`` of its last user."""
        if key not in self._resident:
            return None
        self._eviction.remove(key)
        place = self._resident.pop(key)
        if key not in self._pins:
            return place
        self._leaving[key] = place
        return None

    def resize(self, capacity: int) -> Placed[Place]:
        """Change the capacity; returns what was evicted. Pinned keys stay until ``trim`` after their release."""
        self.capacity = capacity
        self._eviction.resize(capacity)
        return self.trim()

    def trim(self) -> Placed[Place]:
        """Evict down to the capacity as far as pins allow."""
        return self._evict_down_to(self.capacity)

    def switch(self, algorithm: str, *, whole: bool = True) -> None:
        """Hand the residents to another algorithm in the old order; nothing is flushed.

        Not ``whole``: step by step, with each key that enters and by ``hand_over``.
        """
        self._eviction = Handover(self._eviction, ALGORITHMS[algorithm](self.capacity))
        if whole:
            self.hand_over(len(self._eviction))

    def hand_over(self, count: int) -> bool:
        """Take one step of a switch under way, of at most ``count`` chunks; True while more is to do."""
        under_way = self._eviction
        if not isinstance(under_way, Handover):
            return False
        if under_way.step(count):
            return True
        self._eviction = under_way.successor
        return False

    def _evict_down_to(self, count: int) -> Placed[Place]:
        evicted: Placed[Place] = []
        while len(self) > count:
            victim = self._eviction.evict(self._pins)
            if victim is None:
                break
            evicted.append((victim, self._resident.pop(victim)))
        return evicted

    def _unpin(self, key: Key) -> None:
        users = self._pins[key] - 1
        if users:
            self._pins[key] = users
        else:
            del self._pins[key]
