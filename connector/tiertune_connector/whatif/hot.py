"""Which few keys are used so often that sampling must not decide about them: they are followed one by one."""

from collections.abc import Mapping, Sequence

from tiertune_connector.eviction import Key
from tiertune_connector.whatif.sampler import Frequent

ROOM = 64
"""Keys in the set: the heads of system prompts and tools that most requests begin with."""
_FIRST_REFRESH, _REFRESH = 64, 2048
"""Requests between two refreshes: the first come at 64, 128, 256, ..."""


class HotSet:
    """At most ``room`` keys, the most frequent of late."""

    def __init__(self, room: int = ROOM) -> None:
        self.shares: Mapping[Key, float] = {}
        """Of all accesses, by key, largest first."""
        self._room = room
        self._frequent = Frequent()
        self._requests = 0
        self._refresh_at = _FIRST_REFRESH

    def request(self, keys: Sequence[Key]) -> bool:
        """A request came; True if the set was refreshed."""
        self._frequent.request(keys)
        self._requests += 1
        if self._requests < self._refresh_at:
            return False
        self._refresh_at += min(self._requests, _REFRESH)
        total = self._frequent.total
        self.shares = {key: count / total for key, count in self._frequent.top(self._room).items()}
        return True
