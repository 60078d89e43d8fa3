"""Which of all keys came before, roughly: a table of fingerprints by hash."""

import numpy as np

from tiertune_connector.whatif.sampler import Hashes

_SLOTS = 1 << 20
_TAG_SHIFT = np.uint64(20)
"""Bits of a hash that choose the slot; the next 32 are what the slot tells keys apart by."""
_NOBODY = (1 << 32) - 1
"""In a slot that no key came to; not 0, which is the hash of the id 0."""
_BATCH = 2048
"""Keys that are looked up in one go: vectors of single requests cost more than they hold."""


class Known:
    """Counts accesses to keys that came before: of all, and of those whose hash is low. 4 MiB.

    A key is forgotten when another one comes to its slot, a sampled key as likely as any other, so that shares stay
    right. That one would pass for the other must not be: new keys have another share of low hashes than known ones.
    """

    def __init__(self, below: int) -> None:
        """A hash is low if it lies below ``below``."""
        self.below = below
        self._all = self._low = 0
        self._tags = np.full(_SLOTS, _NOBODY, dtype=np.uint32)
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
        places = np.arange(hashed.size, dtype=np.uint32)
        slots = (hashed & np.uint64(_SLOTS - 1)).astype(np.intp)
        tags = (hashed >> _TAG_SHIFT).astype(np.uint32)
        known = self._tags[slots] == tags
        self._tags[slots[::-1]] = places[::-1]  # the first of equal ones is written last
        first = self._tags[slots]
        known |= (first != places) & (hashed[first] == hashed)
        self._tags[slots] = tags
        self._all += int(np.count_nonzero(known))
        self._low += int(np.count_nonzero(known & (hashed < np.uint64(self.below))))
        self._waiting, self._waiting_keys = [], 0
