"""A file that people or programs edit while the agent runs."""

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Generic, TypeVar

from tiertune_connector.documents import read_text

Content = TypeVar("Content")
SETTLED_S = 0.1
"""A changed file is taken only if it still reads the same this much later."""


class Followed(Generic[Content]):
    """``look`` returns the newest valid content; a bad edit keeps the last good one.

    Only the constructor raises DocumentError.
    """

    def __init__(
        self,
        path: Path | None,
        parse: Callable[[Path, str], Content],
        without: Content,
        wait: Callable[[float], None] = sleep,
    ) -> None:
        """``parse`` makes the content of a text, or raises DocumentError; ``without`` is the content without a path."""
        self._path = path
        self._parse = parse
        self._wait = wait
        self._text = read_text(path) if path else ""
        self.content = parse(path, self._text) if path else without
        self.problem = ""
        """Why the file as it is now is not in force; empty: it is."""

    def look(self) -> Content:
        """Read the file again if it changed; a file that is just being written is read the next time."""
        if self._path is None:
            return self.content
        try:
            text = read_text(self._path)
            if text != self._text or self.problem:
                self._wait(SETTLED_S)
                if read_text(self._path) == text:  # half a document may be valid, too
                    self.content, self._text, self.problem = self._parse(self._path, text), text, ""
        except ValueError as error:
            self.problem = str(error)
        return self.content
