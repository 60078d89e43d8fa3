"""Adaptive replacement cache (Megiddo and Modha, FAST 2003, figure 4; the target p is real-valued)."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator

from tiertune_connector.eviction.base import Key

_Order = OrderedDict[Key, None]


class ARC:
    """Keys seen once (recent) and more often (frequent) share the capacity; ghosts of the evicted move the border."""

    name = "arc"

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0  # p: resident keys that `recent` may hold
        self._recent: _Order = OrderedDict()  # T1
        self._frequent: _Order = OrderedDict()  # T2
        self._recent_ghosts: _Order = OrderedDict()  # B1
        self._frequent_ghosts: _Order = OrderedDict()  # B2
        self._incoming_frequent_ghost = False

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __iter__(self) -> Iterator[Key]:
        yield from self._recent
        yield from self._frequent

    @property
    def ghosts(self) -> int:
        return len(self._recent_ghosts) + len(self._frequent_ghosts)

    def touch(self, key: Key) -> None:
        if key in self._recent:
            del self._recent[key]
            self._frequent[key] = None
        else:
            self._frequent.move_to_end(key)

    def admit(self, key: Key) -> None:
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        self._incoming_frequent_ghost = key in self._frequent_ghosts
        if self._incoming_frequent_ghost:
            self.target = max(0.0, self.target - max(recent / frequent, 1.0))
        elif key in self._recent_ghosts:
            self.target = min(float(self.capacity), self.target + max(frequent / recent, 1.0))

    def evict(self, pinned: Container[Key]) -> Key | None:
        held = len(self._recent)
        lists = [(self._recent, self._recent_ghosts), (self._frequent, self._frequent_ghosts)]
        if held < self.target or (held == self.target and not self._incoming_frequent_ghost):
            lists.reverse()
        for resident, ghosts in lists:
            for key in resident:
                if key not in pinned:
                    del resident[key]
                    ghosts[key] = None
                    self._bound()
                    return key
        return None

    def insert(self, key: Key) -> None:
        if key in self._recent_ghosts:
            del self._recent_ghosts[key]
            self._frequent[key] = None
        elif key in self._frequent_ghosts:
            del self._frequent_ghosts[key]
            self._frequent[key] = None
        else:
            self._recent[key] = None
        self._bound()

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
        recent_ghosts, frequent_ghosts = self._recent_ghosts, self._frequent_ghosts
        once = len(self._recent) + len(recent_ghosts)
        while recent_ghosts and once > self.capacity:
            recent_ghosts.popitem(last=False)
            once -= 1
        total = once + len(self._frequent) + len(frequent_ghosts)
        while frequent_ghosts and total > 2 * self.capacity:
            frequent_ghosts.popitem(last=False)
            total -= 1
