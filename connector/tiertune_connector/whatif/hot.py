"""The few keys used so often that sampling must not decide about them: they are followed one by one."""

from collections.abc import Mapping, Sequence

from tiertune_connector.eviction import Key, Keys
from tiertune_connector.whatif.sampler import Frequent

ROOM = 64
"""Keys in the set: the heads of system prompts and tools that most requests begin with."""
COUNTED = 16
"""Least count of a key beyond these: on entering, it loses a hit if it was not sampled."""
USES = 4
"""A key that comes this often, while as many keys come as a cache holds, does not leave it."""
_FIRST_REFRESH, _REFRESH = 64, 2048
"""Requests between two refreshes: the first come at 64, 128, 256, ..."""


class HotSet:
    """The most frequent keys of late, at most ``ROOM``, and those beyond that came often."""

    def __init__(self, room: int = ROOM, frequent: Frequent | None = None) -> None:
        """At most ``room`` in all; ``frequent`` counts them, by default as a store does."""
        self.shares: Mapping[Key, float] = {}
        """Shares of all accesses, by key, largest first."""
        self.keys: frozenset[Key] = frozenset()
        """The same without shares."""
        self._frequent = frequent or Frequent()
        self._room = room
        self._requests = 0
        self._refresh_at = _FIRST_REFRESH

    def never_lost(self, capacity: float) -> frozenset[Key]:
        """The keys that a cache of so many chunks always holds."""
        return frozenset(key for key, share in self.shares.items() if share * capacity >= USES)

    def requests(self, chains: Sequence[Keys]) -> bool:
        """Count some requests; True if the set was refreshed after them."""
        self._frequent.requests(chains)
        self._requests += len(chains)
        if self._requests < self._refresh_at:
            return False
        while self._refresh_at <= self._requests:
            self._refresh_at += min(self._refresh_at, _REFRESH)
        total = self._frequent.total
        top = self._frequent.top(self._room).items()
        often = [each for place, each in enumerate(top) if place < ROOM or each[1] >= COUNTED]
        self.shares = {key: count / total for key, count in often}
        self.keys = frozenset(self.shares)
        return True
