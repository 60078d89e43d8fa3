"""A disk tier without a store, and chunks on it whose bytes follow from their keys."""

import fcntl
import struct
from pathlib import Path

from connector.stores import A, payload, read_chunk, view
from tiertune_connector.chunk import Origin
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE

NBYTES = 2 * PAGE + 7
SLOT = 4 * PAGE
TENANT = b"t" * 16
_FIEMAP, _ASKED, _EXTENT, _EXTENTS = 0xC020660B, "=QQLLLL", 56, 512
"""See `linux/fiemap.h`: the call, what it is asked with, bytes of an extent told; and how many may be told."""


def opened(root, chunks: int = 16) -> DiskTier:
    tier = DiskTier(root)
    tier.recover(chunks * SLOT, "lru")
    tier.retune(chunks * SLOT, {})
    return tier


def write(tier, key, namespace=A, nbytes=NBYTES):
    return tier.write(namespace, key, view(payload(key, nbytes)), Origin("host-a", TENANT))


def fill(tier, keys):
    for key in keys:
        write(tier, key)


def intact(tier, key, nbytes=NBYTES):
    outcome, origin = read_chunk(tier, A, key, nbytes)
    return outcome is Outcome.OK and origin.tenant == TENANT


def slab_file(root):
    (path,) = root.glob(f"{A}-*.slab")
    return path


def data_bytes(path: Path) -> int:
    """Bytes of the file's own data on disk, written or only reserved.

    Blocks also count the one in which ext4 notes where the extents of a file lie that has, or had, more than four.
    """
    with path.open("rb") as file:
        told = bytearray(struct.pack(_ASKED, 0, (1 << 64) - 1, 0, 0, _EXTENTS, 0) + bytes(_EXTENT * _EXTENTS))
        try:
            fcntl.ioctl(file, _FIEMAP, told)
        except OSError:  # a file system without extents
            return path.stat().st_blocks * 512
    count = struct.unpack_from(_ASKED, told)[3]
    assert count < _EXTENTS
    return sum(struct.unpack_from("=Q", told, struct.calcsize(_ASKED) + i * _EXTENT + 16)[0] for i in range(count))


def taken(root: Path) -> int:
    """Bytes of all slabs on disk."""
    return sum(data_bytes(path) for path in root.glob("*.slab"))
