"""Roughly which keys came before: a table of fingerprints by hash."""

import numpy as np
from numpy.typing import NDArray

from tiertune_connector.whatif.sampler import Hashes

_SLOTS = 1 << 20
_TAG_SHIFT = np.uint64(20)
"""Bits of a hash that choose the slot; by the next 32 the slot tells keys apart."""
_NOBODY = (1 << 32) - 1
"""Mark of a slot that no key came to; not 0, which is the hash of the id 0."""


class KnownKeys:
    """Takes 4 MiB. A key is forgotten when another comes to its slot, a sampled key as likely as any other.

    No key may pass for another: new keys have another share of low hashes than known ones.
    """

    def __init__(self) -> None:
        self._tags = np.full(_SLOTS, _NOBODY, dtype=np.uint32)

    def before(self, hashed: Hashes) -> NDArray[np.bool_]:
        """Which of the keys with these hashes, coming now, came before; many at once cost much less each."""
        places = np.arange(hashed.size, dtype=np.uint32)
        slots = (hashed & np.uint64(_SLOTS - 1)).astype(np.intp)
        tags = (hashed >> _TAG_SHIFT).astype(np.uint32)
        known: NDArray[np.bool_] = self._tags[slots] == tags
        self._tags[slots[::-1]] = places[::-1]  # the first of equal ones is written last
        first = self._tags[slots]
        known |= (first != places) & (hashed[first] == hashed)
        self._tags[slots] = tags
        return known


class Weight:
    """How many accesses to known keys one with a low hash stands for: only known keys can be hits.

    Hot keys are left out: each of their accesses stands for itself.
    """

    def __init__(self, below: int) -> None:
        """A hash is low if it lies below ``below``, as those of sampled keys do."""
        self.below = below
        self._known = self._low = 0

    def came(self, again: Hashes) -> None:
        """Keys with these hashes came, and had come before."""
        self._known += again.size
        self._low += int(np.count_nonzero(again < np.uint64(self.below)))

    def leave_out(self, hot: int, low: int) -> None:
        """``hot`` of the keys that came are hot, ``low`` of these have a low hash."""
        self._known -= hot
        self._low -= low

    def too_few(self) -> bool:
        """Whether known keys came since the last `take`, but none with a low hash: nothing tells what they hit."""
        return self._known > 0 >= self._low

    def take(self, *, otherwise: float) -> float:
        """The weight since the last call; ``otherwise`` if too few came."""
        known, low = self._known, self._low
        self._known = self._low = 0
        return known / low if known > 0 and low > 0 else otherwise
