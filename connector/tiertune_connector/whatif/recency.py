"""Keys by their last use, and how many others were used since: the stack of LRU without its bottom."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tiertune_connector.eviction import Key, Keys

Times = Sequence[int]
"""Ascending."""


class Recency:
    """Times are whole numbers from 1 on, each used once. Moving a key costs a shift of those used since, in one block.

    Chains come again as they came before, so that their times lie in a few runs: each run is dealt with at once.
    """

    def __init__(self) -> None:
        self._last: dict[Key, int] = {}
        self._times: list[int] = []  # of all last uses, ascending
        self._order: list[Key] = []  # whose they are

    def __len__(self) -> int:
        return len(self._times)

    def __iter__(self) -> Iterator[Key]:
        """Longest unused first."""
        return iter(self._order)

    def __contains__(self, key: Key) -> bool:
        return key in self._last

    def lasts(self, keys: Iterable[Key]) -> list[int]:
        """Last uses of those of ``keys`` that are here, ascending."""
        return sorted(filter(None, map(self._last.get, keys)))

    def lasts_of(self, chain: Keys) -> tuple[int, list[int]]:
        """How many of a chain's keys come before the first one that is here, and ``lasts`` of all.

        Mostly the others were used one after another, in this order: then only the first is looked up.
        """
        first = next(filter(self._last.__contains__, chain), None)
        if first is None:
            return len(chain), []
        new = chain.index(first)
        here, start = chain[new:], bisect_left(self._times, self._last[first])
        if self._order[start : start + len(here)] == here:
            return new, self._times[start : start + len(here)]
        return new, self.lasts(here)

    def since(self, lasts: Times) -> list[int]:
        """How many keys were used after each of these times, ascending: of keys that are here, or of none."""
        return list(chain.from_iterable(self.runs_since(lasts)))

    def runs_since(self, lasts: Times) -> Iterator[range]:
        """The same, for each run of keys that were used one after another."""
        times, done = self._times, 0
        while done < len(lasts):
            after = bisect_right(times, lasts[done])
            left, run = len(times) - after, self._run(after - 1, lasts, done)
            yield range(left, left - run, -1)
            done += run

    def ends(self, keys: Keys) -> bool:
        """Whether these keys were used last, in this order."""
        return self._order[-len(keys) :] == keys

    def use(self, keys: Keys, now: int, lasts: Times) -> None:
        """``keys``, new or not, are used, from ``now`` on, which is after all other times; ``lasts`` are theirs."""
        self._drop(lasts)
        times = list(range(now, now + len(keys)))
        latest = self._last
        for key, time in zip(keys, times, strict=True):  # quicker than `update`
            latest[key] = time
        self._times += times
        self._order += keys

    def forget(self, count: int) -> list[Key]:
        """Forget so many keys, the longest unused; returns them."""
        keys = self._order[:count]
        del self._order[:count], self._times[:count]
        for key in keys:
            del self._last[key]
        return keys

    def remove(self, key: Key) -> int:
        """Forget a key; returns when it was used last."""
        last = self._last.pop(key)
        self._drop([last])
        return last

    def put(self, key: Key, last: int) -> None:
        """Add a key, not here yet, that was last used at time ``last``."""
        self._last[key] = last
        place = bisect_left(self._times, last)
        self._times.insert(place, last)
        self._order.insert(place, key)

    def _drop(self, lasts: Times) -> None:
        """Forget these times, ascending: no key has them any more."""
        times, done = self._times, 0
        while done < len(lasts):
            index = bisect_left(times, lasts[done])
            run = self._run(index, lasts, done)
            del times[index : index + run], self._order[index : index + run]
            done += run

    def _run(self, index: int, lasts: Times, start: int) -> int:
        """How many of the times from ``index`` on are surely the next of ``lasts``: both ascend, so the ends decide."""
        times, run = self._times, len(lasts) - start
        if run > 1 and (index < 0 or times[index] != lasts[start]):
            return 1
        while run > 1 and (index + run > len(times) or times[index + run - 1] != lasts[start + run - 1]):
            run //= 2
        return run
