"""A file that people or programs edit while the agent runs."""

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Generic, TypeVar

from tiertune_connector.documents import read_text

Content = TypeVar("Content")
SETTLED_S = 0.1
"""What is read of a file that changed must be there still so much later."""


class Followed(Generic[Content]):
    """``look`` gives the newest sound content; a bad edit keeps the last good one.

    Raises DocumentError only when made.
    """

    def __init__(
        self,
        path: Path | None,
        parse: Callable[[Path, str], Content],
        without: Content,
        wait: Callable[[float], None] = sleep,
    ) -> None:
        """``parse`` makes the content of a text, or raises DocumentError; ``without`` a path it is another one."""
        self._path = path
        self._parse = parse
        self._wait = wait
        self._text = read_text(path) if path else ""
        self.content = parse(path, self._text) if path else without
        self.problem = ""
        """Why the file as it is now is not in force; empty: it is."""

    def look(self) -> Content:
        """Read the file again where it changed; what is being written just now is looked at the next time."""
        if self._path is None:
            return self.content
        try:
            text = read_text(self._path)
            if text != self._text or self.problem:
                self._wait(SETTLED_S)
                if read_text(self._path) == text:  # the first half of a document may be one, too
                    self.content, self._text, self.problem = self._parse(self._path, text), text, ""
        except ValueError as error:
            self.problem = str(error)
        return self.content
