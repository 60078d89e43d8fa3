"""Reads observed sources, read-only, by a GET of one address each. Problems are values, not exceptions."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import httpx

from tiertune_agent.collector.adapters import ADAPTERS
from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import Hints, Mapped
from tiertune_agent.collector.counters import Leapt, Reading, Rows, windows
from tiertune_agent.collector.stores import TIMEOUT_S, Heard, Trouble
from tiertune_agent.collector.targets import ObservedSource
from tiertune_agent.credentials import PLAIN, Access
from tiertune_agent.network import at_once, read_whole, said
from tiertune_agent.records import OBSERVED, Now, Snapshot
from tiertune_connector.units import Clock

ACCEPT = {"Accept": "text/plain; version=0.0.4"}
ALIKE = 4
"""So many byte-identical answers in a row mean that somebody repeats an old one: each new one costs CPU time."""
ANOTHER = 4
"""After so many answers in a row of the same older process, it is taken as the present one."""
BOOTS = 64
"""More processes than share an address; one that crashes again and again has a new boot each time."""
CPU = "process_cpu_seconds_total"


@dataclass
class _Known:
    """What one source reported last."""

    reading: Reading | None = None
    text: str = ""
    alike: int = 1
    boots: deque[str] = field(default_factory=partial(deque, maxlen=BOOTS))
    """The latest boots of processes that were counted: one that answers again after another is not new."""
    older: tuple[str, int] = ("", 0)
    """The boot of a process that began before the one of ``reading``, and its answers in a row."""

    def repeats(self, text: str) -> int:
        """Number of answers in a row that are identical to this one."""
        self.alike = self.alike + 1 if text == self.text else 1
        self.text = text
        return self.alike

    def falls_back(self, reading: Reading) -> bool:
        """Whether an older process answers than before; one that goes on answering is taken as the present one."""
        if self.reading is None or not _older(reading, self.reading):
            self.older = ("", 0)
            return False
        self.older = (reading.boot_id, self.older[1] + 1 if self.older[0] == reading.boot_id else 1)
        if self.older[1] < ANOTHER:
            return True
        self.reading = None
        return False

    def take(self, reading: Reading) -> Reading | None:
        """Keep it as the last reading; returns the one before, or None if they cannot be differenced."""
        before, self.reading = self.reading, reading
        if reading.boot_id not in self.boots:
            self.boots.append(reading.boot_id)
            return before
        return before if before is None or before.boot_id == reading.boot_id else None


class Observer:
    """Reads all sources at once; keeps the last reading of each, to take the difference to the next."""

    def __init__(
        self,
        sources: Sequence[ObservedSource],
        now: Now,
        steady_s: Clock,
        access: Access = PLAIN,
    ) -> None:
        """``steady_s`` counts seconds by a clock that nobody sets."""
        self._sources = sources
        self.addresses = {source.url: source.name for source in sources}
        self._now = now
        self._steady_s = steady_s
        self._http = access.client(timeout=TIMEOUT_S, headers=ACCEPT)
        self._known: dict[str, _Known] = {}

    def collect(self, taken: Collection[str] = ()) -> list[Heard]:
        """One answer per source, in the order of the settings; ``taken``: names that stores have."""
        answers = at_once(self._ask, self._sources)
        for place, answer in enumerate(answers):
            if isinstance(answer, Snapshot) and answer.store in taken:
                message = f"a store calls itself {answer.store} too; what is observed at {answer.url} is left out"
                answers[place] = Trouble(answer.url, "duplicate_store", message)
        return answers

    def rows(self, name: str) -> Rows:
        """What the source reported last, as counters since its boot; empty if nothing yet."""
        known = self._known.get(name)
        return known.reading.rows if known and known.reading else {}

    def forget(self) -> None:
        """Drop all readings, so that the next one of each source counts as its first."""
        self._known.clear()

    def close(self) -> None:
        self._http.close()

    def _ask(self, source: ObservedSource) -> Heard:
        try:
            text = read_whole(self._http, source.url, within_s=TIMEOUT_S).text
            told = Exposition(text)
            started_s = told.total("process_start_time_seconds")
            made = ADAPTERS[source.kind](told, Hints(source.chunk_bytes, source.tier or ""))
        except httpx.HTTPError as error:
            return Trouble(source.name, "store_unreachable", f"{source.url}: {said(error)}")
        except ValueError as error:
            return Trouble(source.name, "store_nonsense", f"{source.url}: {error}")
        if not made.rows:
            return Trouble(source.name, "store_nonsense", f"{source.url} answers, but with no metrics of {source.kind}")
        try:
            return self._snapshot(source, text, started_s, made)
        except Leapt as error:  # the next answer says from where to count on
            self._known[source.name].reading = None
            return Trouble(source.name, "store_nonsense", f"{source.url}: {error}")

    def _snapshot(self, source: ObservedSource, text: str, started_s: float | None, made: Mapped) -> Heard:
        at, known = self._now(), self._known.setdefault(source.name, _Known())
        if known.repeats(text) >= ALIKE and CPU in text:
            message = f"{source.url}: {known.alike} answers in a row are the same to the byte, also its own CPU seconds"
            return Trouble(source.name, "stale_counters", message)
        boot = "" if started_s is None else f"{started_s:.2f}"
        reading = Reading(source.name, boot, self._steady_s(), made.rows)
        if known.reading is not None and reading.time_s <= known.reading.time_s:
            known.reading = replace(known.reading, time_s=reading.time_s)  # counts go into the next window
            return Trouble(source.name, "stale_counters", f"{source.url}: the agent's clock stands still or went back")
        if known.falls_back(reading):
            message = "an older process answers than before: several share the address; name each by its own"
            return Trouble(source.name, "store_nonsense", f"{source.url}: {message}")
        before = known.take(reading)
        counted, stages = windows(before, reading, at, still=True) if before else ((), ())
        return Snapshot(
            store=source.name,
            url=source.url,
            boot_id=boot,
            version="",
            at=at,
            status={
                OBSERVED: source.kind,
                "models": list(made.models),
                "tiers": made.state(),
                "unknown": made.unknown,
            },
            tuning={},
            windows=counted,
            stages=stages,
        )


def _older(reading: Reading, before: Reading) -> bool:
    return bool(reading.boot_id and before.boot_id) and float(reading.boot_id) < float(before.boot_id)
