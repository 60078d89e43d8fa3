"""Reads observed sources, read-only, by a GET of one address each. Problems are values, not exceptions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import httpx

from tiertune_agent.collector.adapters import ADAPTERS
from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import Hints, Mapped
from tiertune_agent.collector.counters import Reading, Rows, is_gauge, windows
from tiertune_agent.collector.exported import ObservedRows
from tiertune_agent.collector.stores import TIMEOUT_S, Heard, Trouble
from tiertune_agent.collector.targets import ObservedSource
from tiertune_agent.credentials import Access
from tiertune_agent.network import at_once, read_whole, said
from tiertune_agent.records import OBSERVED, Now, Snapshot, Value, cut
from tiertune_connector.units import Clock

ACCEPT = {"Accept": "text/plain; version=0.0.4"}


@dataclass
class Observer:
    """Reads all sources at once; keeps each one's last reading, to take the difference to the next of its boot."""

    sources: Sequence[ObservedSource]
    now: Now
    steady_s: Clock
    """Counts seconds by a clock that nobody sets."""
    access: Access
    exported: ObservedRows
    """Gets what the sources report."""

    def __post_init__(self) -> None:
        self.addresses = {source.url: source.name for source in self.sources}
        self._http = self.access.client(timeout=TIMEOUT_S, headers=ACCEPT)
        self._known: dict[str, Reading] = {}

    def collect(self, taken: Collection[str] = ()) -> list[Heard]:
        """One answer per source, in the order of the settings; ``taken``: names that stores have."""
        answers = at_once(self._ask, self.sources)
        for place, answer in enumerate(answers):
            if isinstance(answer, Snapshot) and answer.store in taken:
                message = f"a store calls itself {answer.store} too; what is observed at {answer.url} is left out"
                answers[place] = Trouble(answer.url, "duplicate_store", message)
        self.exported.rows = {one.store: self._known[one.store].rows for one in answers if isinstance(one, Snapshot)}
        return answers

    def forget(self) -> None:
        """Drop all readings, so that the next one of each source counts as its first."""
        self._known.clear()
        self.exported.rows = {}

    def close(self) -> None:
        self._http.close()

    def _ask(self, source: ObservedSource) -> Heard:
        try:
            told = Exposition(read_whole(self._http, source.url, within_s=TIMEOUT_S).text)
            started_s = told.total("process_start_time_seconds")
            made = ADAPTERS[source.kind](told, Hints(source.chunk_bytes, source.tier or ""))
            return self._snapshot(source, started_s, made)
        except httpx.HTTPError as error:
            return Trouble(source.name, "store_unreachable", f"{source.url}: {said(error)}")
        except ValueError as error:
            return Trouble(source.name, "store_nonsense", f"{source.url}: {error}")

    def _snapshot(self, source: ObservedSource, started_s: float | None, made: Mapped) -> Snapshot:
        """ValueError for what is no answer of one process; the next one says from where to count on."""
        if not made.rows:
            raise ValueError(f"it answers, but with no metrics of {source.kind}")
        at, boot = self.now(), "" if started_s is None else f"{started_s:.2f}"
        reading, before = Reading(source.name, boot, self.steady_s(), made.rows), self._known.pop(source.name, None)
        if before and before.boot_id == boot:
            reading = replace(reading, rows=_unfallen(before.rows, reading.rows))
        counted, stages = windows(before, reading, at, still=True) if before and before.boot_id == boot else ((), ())
        self._known[source.name] = reading
        if before and 0 < float(boot or 0) < float(before.boot_id or 0):
            raise ValueError("an older process answers than before: several share the address; name each by its own")
        return Snapshot(
            store=source.name,
            url=cut(source.url),
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


def _unfallen(before: Rows, now: Rows) -> Rows:
    """The rows, with misses that fell as they were: adapters subtract hits, which may be counted before their prompts.

    If other counters fell too, all of them began anew.
    """
    fell = {row: old for row, old in before.items() if not is_gauge(row[0]) and _fell(old, now.get(row))}
    return {**now, **fell} if all(("result", "miss") in labels for _, labels in fell) else now


def _fell(old: Value, new: Value | None) -> bool:
    return isinstance(old, float) and isinstance(new, float) and new < old
