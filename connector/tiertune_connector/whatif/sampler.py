"""Which keys stand for all: sampling by the hash of the key, alike on every store of a fleet."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
_FULL = 1 << 64
_SEED_STEP = 1_000_003
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


def mix(ids: Hashes, seed: int) -> Hashes:
    """Murmur3's 64-bit finaliser of every id + 1000003 * seed: uniform over 0 to 2**64."""
    mixed = ids + np.uint64(_SEED_STEP * seed % _FULL)
    for multiplier in _MULTIPLIERS:
        mixed ^= mixed >> _SHIFT
        mixed *= multiplier
    mixed ^= mixed >> _SHIFT
    return mixed


def hashes(keys: Sequence[bytes], seed: int) -> Hashes:
    """Of opaque keys: their first 8 bytes, mixed."""
    ids = np.frombuffer(b"".join([key[:8].ljust(8, b"\0") for key in keys]), dtype="<u8")
    return mix(ids.astype(np.uint64), seed)


def threshold(rate: float) -> int:
    """A key is sampled if its hash lies below; ``rate`` is the share of keys that do."""
    return min(_FULL - 1, max(0, int(rate * _FULL)))
