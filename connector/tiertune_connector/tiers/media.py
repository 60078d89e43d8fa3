"""Media other than Redis for a remote, each named by a path, by the scheme of their address."""

from pathlib import Path
from typing import Protocol

from tiertune_connector.tiers.base import Tier
from tiertune_connector.tiers.directory import DirectoryTier


class Medium(Protocol):
    """Makes the tier. While what it lies on is away, the tier answers errors, and raises none."""

    def __call__(self, path: Path, /, *, writer: str, capacity_bytes: int | None) -> Tier:
        """``capacity_bytes`` bounds what ``writer`` (the store's name) holds there; None: no bound."""


MEDIA: dict[str, Medium] = {
    "file": DirectoryTier,
}
"""``remote.url: file:///absolute/path``."""
