"""Which of all keys came before, roughly: a table of stamps by hash."""

import numpy as np

from tiertune_connector.whatif.sampler import Hashes

_SLOTS = 1 << 20
_HORIZON = 2 * _SLOTS
"""Keys ago; what came before that is forgotten, so that the table never fills up."""
_BATCH = 2048
"""Keys that are looked up in one go: vectors of single requests cost more than they hold."""


class Known:
    """Counts accesses to keys that came before: of all, and of those whose hash is low. About 4 MiB.

    Two keys may share a slot, for all keys as likely as for sampled ones, so that shares stay right.
    """

    def __init__(self, below: int) -> None:
        """A hash is low if it lies below ``below``."""
        self.below = below
        self._all = self._low = 0
        self._stamps = np.full(_SLOTS, -_HORIZON % (1 << 32), dtype=np.uint32)
        self._now = 0
        self._waiting: list[Hashes] = []
        self._waiting_keys = 0

    def request(self, hashed: Hashes) -> None:
        """Keys with these hashes came."""
        self._waiting.append(hashed)
        self._waiting_keys += len(hashed)
        if self._waiting_keys >= _BATCH:
            self._look()

    def take(self) -> tuple[int, int]:
        """How many keys had come before, and how many of those with a low hash, since the last time."""
        self._look()
        counts = self._all, self._low
        self._all = self._low = 0
        return counts

    def _look(self) -> None:
        if not self._waiting:
            return
        hashed = np.concatenate(self._waiting)
        times = (np.arange(self._now, self._now + hashed.size) % (1 << 32)).astype(np.uint32)
        slots = (hashed & np.uint64(_SLOTS - 1)).astype(np.intp)
        known = times - self._stamps[slots] < _HORIZON
        self._stamps[slots[::-1]] = times[::-1]  # the first of equal ones is written last
        known |= self._stamps[slots] != times
        self._stamps[slots] = times
        self._all += int(np.count_nonzero(known))
        self._low += int(np.count_nonzero(known & (hashed < np.uint64(self.below))))
        self._now += hashed.size
        self._waiting, self._waiting_keys = [], 0
