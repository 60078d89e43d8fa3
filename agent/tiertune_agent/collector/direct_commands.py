"""Puts commands that operators gave a store directly, as the store reports them, into the audit, each once."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from tiertune_agent.collector.schema import UNREAD, check
from tiertune_agent.fields import Json
from tiertune_agent.records import Snapshot, cut

AGENT = "tiertune-agent"
"""The agent's name to stores. What it commands has a row already, or a decision."""
MOST = 64
"""Commands of a store that are looked at."""


class Entry(NamedTuple):
    """A row of the audit; all but ``detail`` identifies it: they are equal for the same command."""

    at: datetime
    who: str
    source: str
    what: str
    detail: Json


def entries(store: str, writes: object) -> Iterator[Entry]:
    """Entries for all commands but the agent's own; anything malformed is left out."""
    for write in writes[-MOST:] if isinstance(writes, list) else ():
        try:
            told, detail = datetime.fromisoformat(write["at"]), write["detail"]
            at = told.astimezone(UTC)
            who, peer, what, client = (cut(str(write[name])) for name in ("who", "source", "what", "client"))
            check(detail, UNREAD, "detail")
            if told.tzinfo is not None and isinstance(detail, dict) and client != AGENT:
                yield Entry(at, who, cut(f"store {store}, {peer}"), what, detail)
        except (KeyError, OverflowError, TypeError, ValueError):
            continue


class DirectCommands:
    def __init__(self, book: Callable[[Sequence[Entry]], None]) -> None:
        """``book`` writes rows for entries that have none."""
        self._book = book
        self._told: list[Entry] = []

    def look(self, snapshots: Sequence[Snapshot]) -> None:
        """Book what stores report, unless it is what they reported last."""
        told = [entry for snapshot in snapshots for entry in entries(snapshot.store, snapshot.writes)]
        if told and told != self._told:
            self._book(told)
        self._told = told
