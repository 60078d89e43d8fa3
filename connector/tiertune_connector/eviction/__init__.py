"""Eviction algorithms, one a file, each by its name."""

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

__all__ = ["ALGORITHMS", "ARC", "CANDIDATES", "FIFO", "LRU", "S3FIFO", "Eviction", "Handover", "Key", "Keys"]
