"""Eviction algorithms, one a file; ``create`` makes one by name."""

from tiertune_connector.eviction.arc import ARC
from tiertune_connector.eviction.base import Eviction, Key, Keys
from tiertune_connector.eviction.fifo import FIFO
from tiertune_connector.eviction.handover import Handover
from tiertune_connector.eviction.lru import LRU
from tiertune_connector.eviction.s3fifo import S3FIFO

ALGORITHMS: dict[str, type[Eviction]] = {
    "lru": LRU,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "fifo": FIFO,
}
CANDIDATES = ("lru", "arc", "s3fifo")
"""Algorithms that a tuner may choose; fifo is there to be rolled back."""


def create(name: str, capacity: int) -> Eviction:
    """The algorithm called ``name`` for ``capacity`` chunks; ValueError names the known ones."""
    try:
        return ALGORITHMS[name](capacity)
    except KeyError:
        raise ValueError(f"unknown eviction algorithm {name!r}: use one of {', '.join(ALGORITHMS)}") from None


__all__ = ["ALGORITHMS", "ARC", "CANDIDATES", "FIFO", "LRU", "S3FIFO", "Eviction", "Handover", "Key", "Keys", "create"]
