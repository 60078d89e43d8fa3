"""S3-FIFO (Yang et al., SOSP 2023): three queues that no use reorders; promotion needs a counter above 1."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator

from tiertune_connector.eviction.base import Key, Order, oldest_of

SMALL_SHARE = 0.1
"""The paper's share of the capacity for the small queue, on probation."""
MOST_USES = 3
"""The paper's cap of a key's counter."""
PROMOTED_ABOVE = 1
"""Uses in the small queue above which a key goes on to the main one."""


class S3FIFO:
    """New keys are on probation in a small queue; those used there, or missed soon after it, enter the main one."""

    name = "s3fifo"

    def __init__(self, capacity: int) -> None:
        self._uses: dict[Key, int] = {}  # of the resident keys that have any
        self._small: Order = OrderedDict()
        self._main: Order = OrderedDict()
        self._ghosts: Order = OrderedDict()  # left the small queue unused
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[Key]:
        yield from self._small
        yield from self._main

    def touch(self, key: Key) -> None:
        uses = self._uses.get(key, 0)
        if uses < MOST_USES:
            self._uses[key] = uses + 1

    def renew(self, key: Key) -> None:
        """Renew only what is unused since it entered: a used key has its place in the queue and its counter."""
        if key not in self._uses:
            (self._small if key in self._small else self._main).move_to_end(key)

    def admit(self, key: Key) -> None:
        """Whether a ghost is hit is seen when the key enters, after the evictions, as in the paper."""

    def evict(self, pinned: Container[Key]) -> Key | None:
        uses, small, main = self._uses, self._small, self._main
        while True:
            probation = len(small) >= self._small_capacity or not main
            key = oldest_of(small, main, pinned) if probation else oldest_of(main, small, pinned)
            if key is None:
                return None
            if key in small:
                del small[key]
                if uses.pop(key, 0) > PROMOTED_ABOVE:
                    main[key] = None
                    continue
                self._ghosts[key] = None
                if len(self._ghosts) > self._ghost_capacity:
                    self._ghosts.popitem(last=False)
            elif key in uses:
                main.move_to_end(key)
                left = uses.pop(key) - 1
                if left:
                    uses[key] = left
                continue
            else:
                del main[key]
            return key

    def insert(self, key: Key) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def remove(self, key: Key) -> None:
        self._uses.pop(key, None)
        self._small.pop(key, None)
        self._main.pop(key, None)

    def resize(self, capacity: int) -> None:
        self._small_capacity = max(1, int(SMALL_SHARE * capacity))
        self._ghost_capacity = max(0, capacity - self._small_capacity)
        while len(self._ghosts) > self._ghost_capacity:
            self._ghosts.popitem(last=False)

    def adopt(self, keys: Iterable[Key]) -> None:
        """All are on probation, as in a cache that has just filled: what is not used again goes, the rest enters main.

        In the main queue they would stay for long: nothing is evicted there before something else was promoted.
        """
        self._small.update(dict.fromkeys(keys))
