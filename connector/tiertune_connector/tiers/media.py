"""What a remote may be kept in beside Redis: media that a path names, by the scheme of their address."""

from pathlib import Path
from typing import Protocol

from tiertune_connector.tiers.base import Tier
from tiertune_connector.tiers.directory import DirectoryTier


class Medium(Protocol):
    """Makes the tier. What it lies on may be away, and come later: then it answers errors, and raises none."""

    def __call__(self, path: Path, /, *, writer: str, capacity_bytes: int | None) -> Tier:
        """``capacity_bytes`` bounds what ``writer`` (the store's name) holds there; None: no bound."""


MEDIA: dict[str, Medium] = {
    "file": DirectoryTier,
}
"""``remote.url: file:///absolute/path``."""
