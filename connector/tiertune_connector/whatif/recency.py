"""Keys by their last use, and how many others were used since: the stack of LRU without its bottom."""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator

from tiertune_connector.eviction import Key


class Recency:
    """Times are whole numbers, each used once. Moving a key costs a shift of those used since, in one block."""

    def __init__(self) -> None:
        self._last: OrderedDict[Key, int] = OrderedDict()
        self._times: list[int] = []  # of all last uses, ascending

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[Key]:
        """Roughly the longest unused first."""
        return iter(self._last)

    def __contains__(self, key: Key) -> bool:
        return key in self._last

    def last(self, key: Key) -> int | None:
        """When ``key`` was used last; None if it is not here."""
        return self._last.get(key)

    def since(self, time: int) -> int:
        """How many keys were used after ``time``."""
        return len(self._times) - bisect_right(self._times, time)

    def use(self, key: Key, now: int) -> None:
        """``key``, new or not, is used; ``now`` is after all other times."""
        last = self._last.get(key)
        if last is not None:
            del self._times[bisect_left(self._times, last)]
            self._last.move_to_end(key)
        self._last[key] = now
        self._times.append(now)

    def remove(self, key: Key) -> int:
        """Forget a key; returns when it was used last."""
        last = self._last.pop(key)
        del self._times[bisect_left(self._times, last)]
        return last

    def put(self, key: Key, last: int) -> None:
        """A key that was last used at some time, and is not here yet."""
        self._last[key] = last
        self._times.insert(bisect_left(self._times, last), last)
