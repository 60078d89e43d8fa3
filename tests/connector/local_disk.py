"""A disk tier without a store, and chunks on it whose bytes follow from their keys."""

from connector.stores import payload, read_chunk, view
from tiertune_connector.chunk import Origin
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE

A, B = "a" * 32, "b" * 32
NBYTES = 2 * PAGE + 7
SLOT = 4 * PAGE
TENANT = b"t" * 16


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


def taken(root) -> int:
    """Bytes on disk, but for the page in which a file system may note where a file's others are."""
    return sum(path.stat().st_blocks * 512 - PAGE for path in root.glob("*.slab"))
