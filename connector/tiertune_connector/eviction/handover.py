"""Switches from one algorithm to another in bounded steps, so that no request waits for it.

The successor adopts the residents in their old order, the next victim first. What enters or is used meanwhile waits
behind them and follows last. So LRU ends with the order that a switch in one go would have given it; in queues that no
use reorders (FIFO, S3-FIFO) what was used meanwhile stands further back than that.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator
from itertools import chain, islice

from tiertune_connector.eviction.base import Eviction, Key, oldest

_MOST_USES = 3
"""Uses counted: no algorithm tells more apart, and a step must not be long."""


class Handover:
    """Residents in three parts, oldest first: the successor's, the predecessor's, the latest."""

    def __init__(self, old: "Eviction | Handover", new: Eviction) -> None:
        """``new`` is empty; ``old``, maybe an unfinished hand-over, is used up."""
        self.name = new.name
        self.successor = new
        self._old = old
        self._adopted: set[Key] = set()  # what the successor holds
        self._latest: OrderedDict[Key, int] = OrderedDict()  # entered or used since, with their uses
        self._entered: set[Key] = set()  # those of the latest that are new
        self._hurry = 1  # keys used faster than they follow must not put off the end

    def __len__(self) -> int:
        return len(self.successor) + len(self._old) + len(self._latest)

    def __iter__(self) -> Iterator[Key]:
        return chain(self.successor, self._old, self._latest)

    def step(self, count: int) -> bool:
        """Hand over at most ``count`` keys; True while some are left."""
        if not len(self._old):
            self._hurry *= 2
            count *= self._hurry
        keys = list(islice(self._old, count))
        for key in keys:
            self._old.remove(key)
        self.successor.adopt(keys)
        self._adopted.update(keys)
        for key in list(islice(self._latest, count - len(keys))):
            self._follow(key)
        return len(self._old) + len(self._latest) > 0

    def touch(self, key: Key) -> None:
        self._latest[key] = min(_MOST_USES, self._leave(key) + 1)

    def renew(self, key: Key) -> None:
        self._latest[key] = self._leave(key)

    def admit(self, key: Key) -> None:
        """The successor adapts when the key follows."""

    def evict(self, pinned: Container[Key]) -> Key | None:
        key = self.successor.evict(pinned)
        if key is not None:
            self._adopted.remove(key)
            return key
        key = oldest(chain(self._old, self._latest), pinned)
        if key is not None:
            self.remove(key)
        return key

    def insert(self, key: Key) -> None:
        self._latest[key] = 0
        self._entered.add(key)

    def remove(self, key: Key) -> None:
        self._leave(key)
        self._entered.discard(key)

    def resize(self, capacity: int) -> None:
        self.successor.resize(capacity)

    def _leave(self, key: Key) -> int:
        """Take a key out of its part; returns its uses since the switch."""
        if key in self._latest:
            return self._latest.pop(key)
        if key in self._adopted:
            self._adopted.remove(key)
            self.successor.remove(key)
        else:
            self._old.remove(key)
        return 0

    def _follow(self, key: Key) -> None:
        uses = self._latest.pop(key)
        if key in self._entered:
            self._entered.remove(key)
            self.successor.admit(key)
            self.successor.insert(key)
        else:
            self.successor.adopt((key,))
        self._adopted.add(key)
        for _ in range(uses):
            self.successor.touch(key)
