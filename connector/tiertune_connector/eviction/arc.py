"""Adaptive replacement cache (Megiddo and Modha, FAST 2003, figure 4; the target p is real-valued)."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator

from tiertune_connector.eviction.base import Key, Order, oldest_of


class ARC:
    """Keys seen once (recent) and more often (frequent) share the capacity; ghosts of the evicted move the border."""

    name = "arc"

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0  # p: resident keys that `recent` may hold
        self._recent: Order = OrderedDict()  # T1
        self._frequent: Order = OrderedDict()  # T2
        self._recent_ghosts: Order = OrderedDict()  # B1
        self._frequent_ghosts: Order = OrderedDict()  # B2
        self._incoming: Order | None = None  # the ghosts that the last admitted key was among

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __iter__(self) -> Iterator[Key]:
        yield from self._recent
        yield from self._frequent

    def touch(self, key: Key) -> None:
        if key in self._recent:
            del self._recent[key]
            self._frequent[key] = None
        else:
            self._frequent.move_to_end(key)

    def renew(self, key: Key) -> None:
        (self._recent if key in self._recent else self._frequent).move_to_end(key)

    def admit(self, key: Key) -> None:
        recent_ghosts, frequent_ghosts = self._recent_ghosts, self._frequent_ghosts
        if key in recent_ghosts:
            self._incoming = recent_ghosts
            self.target = min(float(self.capacity), self.target + max(len(frequent_ghosts) / len(recent_ghosts), 1.0))
            del recent_ghosts[key]
        elif key in frequent_ghosts:
            self._incoming = frequent_ghosts
            self.target = max(0.0, self.target - max(len(recent_ghosts) / len(frequent_ghosts), 1.0))
            del frequent_ghosts[key]
        else:
            self._incoming = None

    def evict(self, pinned: Container[Key]) -> Key | None:
        held, target = len(self._recent), self.target
        shrunk = held + len(self._frequent) > self.capacity
        recent = held > target or (0 < held == target and self._incoming is self._frequent_ghosts)
        seen, used = self._recent, self._frequent
        key = oldest_of(seen, used, pinned) if recent else oldest_of(used, seen, pinned)
        if key is None:
            return None
        if key in self._recent:
            del self._recent[key]
            self._recent_ghosts[key] = None
        else:
            del self._frequent[key]
            self._frequent_ghosts[key] = None
        if shrunk:  # by a resize; else a key that becomes a ghost adds nothing
            self._bound()
        return key

    def insert(self, key: Key) -> None:
        if self._incoming is None:
            self._recent[key] = None
            self._bound()
        else:  # a ghost that returns adds nothing to what is remembered
            self._frequent[key] = None

    def remove(self, key: Key) -> None:
        if key in self._recent:
            del self._recent[key]
        else:
            del self._frequent[key]

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = min(self.target, float(capacity))
        self._bound()

    def adopt(self, keys: Iterable[Key]) -> None:
        self._recent.update(dict.fromkeys(keys))

    def _bound(self) -> None:
        """Once-seen keys and their ghosts are at most the capacity, all keys and ghosts at most twice that."""
        recent_ghosts, frequent_ghosts, capacity = self._recent_ghosts, self._frequent_ghosts, self.capacity
        once = len(self._recent) + len(recent_ghosts)
        while recent_ghosts and once > capacity:
            recent_ghosts.popitem(last=False)
            once -= 1
        total = once + len(self._frequent) + len(frequent_ghosts)
        while frequent_ghosts and total > 2 * capacity:
            frequent_ghosts.popitem(last=False)
            total -= 1
