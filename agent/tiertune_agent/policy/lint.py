"""What is to mend in a policy file, each with its place: for the command, the API and the page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiertune_agent.policy.document import LoadedPolicy, load, without_effect
from tiertune_connector.documents import DocumentError, place_of

_PLACED = re.compile(r"(?P<place>.+?:\d+:\d+): (?P<message>.*)", re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """``level``: error (the file cannot be in force), or note (a key is read, but not acted on)."""

    level: str
    place: str
    """``file:line:column``; the file alone where nothing can be told."""
    message: str


def notes(loaded: LoadedPolicy) -> list[Finding]:
    """Of a sound policy."""
    return [
        Finding("note", f"{loaded.source}:{place_of(loaded.text, note.partition(':')[0])}", note)
        for note in without_effect(loaded.policy)
    ]


def checked(path: Path) -> tuple[list[Finding], str]:
    """Of a file: notes and no problem; or errors, and the problem in which they stand."""
    try:
        return notes(load(path)), ""
    except DocumentError as error:
        return list(errors(str(error), str(path))), str(error)


def errors(problem: str, source: str) -> Iterator[Finding]:
    """Of a file that cannot be in force; ``problem`` is what its DocumentError says, a line each."""
    for line in problem.splitlines():
        placed = _PLACED.fullmatch(line)
        yield Finding("error", placed["place"], placed["message"]) if placed else Finding("error", source, line)
