"""What files hold while a process runs."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tiertune_connector.documents import DocumentError, stamp

log = logging.getLogger(__name__)
Content = TypeVar("Content")


class Renewed(Generic[Content]):
    """The content of files, read again when one has changed; a faulty edit leaves it as it was. Thread-safe."""

    def __init__(self, otherwise: str, read: Callable[[], Content], *paths: Path) -> None:
        """``read`` raises DocumentError, here too, for what is faulty; ``otherwise`` tells the log what that means."""
        self._otherwise, self._read, self._paths = otherwise, read, paths
        self._mutex = threading.Lock()
        self._seen = [*map(stamp, paths)]  # before they are read: no change is overlooked
        self._content = read()

    def now(self) -> Content:
        with self._mutex:
            if (now := [*map(stamp, self._paths)]) != self._seen:
                self._seen = now
                try:
                    self._content = self._read()
                    log.info("%s was read again", self._paths[0])
                except DocumentError as error:
                    log.error("%s: %s", self._otherwise, error)  # noqa: TRY400 (its message says it all)
            return self._content
