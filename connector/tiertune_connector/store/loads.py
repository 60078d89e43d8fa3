"""Bringing a prompt's chunks into host memory, and keeping them there while a client copies them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Literal

from tiertune_connector.chunk import Origin
from tiertune_connector.eviction import Keys
from tiertune_connector.protocol.messages import Load, LoadPart, LoadReply, Report, SlotRef
from tiertune_connector.protocol.reporting import recomputed
from tiertune_connector.sessions.session import Session
from tiertune_connector.slower.arrivals import Arrival, Arrivals
from tiertune_connector.store.accounts import count_gate
from tiertune_connector.store.parts import Parts
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.slots import Slot

Coming = tuple[Slot, Arrival | None]
"""A chunk's slot, and how it gets there; None: it is there."""
STEP_BYTES = 4 << 20
"""Told together: a message costs store and client some 50 microseconds, copying this much a millisecond."""


@dataclass(eq=False)
class Loads(Parts):
    """Thread-safe."""

    def __post_init__(self) -> None:
        self.arrivals = Arrivals(self.dram, self.lanes, self.clock, self._accept)

    def load(
        self,
        session: Session,
        asked: Load,
        until: float,
        *,
        wait: bool = True,
        tell: Callable[[LoadPart], None] = lambda _: None,
    ) -> LoadReply:
        """Bring chunks into DRAM and pin them, as many as come until ``until``. Waits for slower tiers if ``wait``.

        ``tell`` hears in parts what has come, if the client wants to; it must not wait, and raises nothing.
        """
        if self.tuning().bypass:
            return LoadReply(asked.id, 0, [], ["miss"] * len(asked.keys), {})
        started = self.clock()
        with self.dram.lock:
            coming = self._expect(session.digest, asked.keys, fetch=wait)
        arrivals = [arrival for _, arrival in coming if arrival]
        if arrivals:
            with self.arrivals.awaited(arrivals), told(asked, coming, tell):
                futures.wait([arrival.done for arrival in arrivals], timeout=max(0.0, until - self.clock()))
        with self.dram.lock:
            outcomes = [arrival.take() if arrival else "hit" for _, arrival in coming]
            hits = [key for key, outcome in zip(asked.keys, outcomes, strict=False) if outcome == "hit"]
            leading = 0 if session.ended else len(list(takewhile("hit".__eq__, outcomes)))
            for key in hits[leading:]:
                self.dram.unpin(session.digest, key)
            lease = self.holdings.pinned(session, hits[:leading], until)
            seconds = self.arrivals.waited(arrivals, started)
        refs = [SlotRef.of(slot) for slot, _ in coming[:leading]]
        outcomes += ["miss"] * (len(asked.keys) - len(outcomes))
        return LoadReply(asked.id, lease, refs, outcomes, seconds)

    def load_waits_for(self, session: Session, keys: Keys) -> Literal["disk", "remote", ""]:
        """The slowest tier that a load of these keys may wait for; empty: none."""
        with self.dram.lock:
            tiers = self.residency.local(session.digest, keys)
        if tiers.count("dram") == len(keys):
            return ""
        return "remote" if "" in tiers and self.residency.readable else "disk"

    def report(self, session: Session, report: Report) -> None:
        """Count what a gate decided and what became of it."""
        alone = sum(tier.fetched_tokens > 0 for tier in report.tiers) == 1  # else copied while others came
        for tier in report.tiers:
            count_gate(self.accounts.counters, tier, round(session.chunks_each * session.chunk_bytes))
            self.accounts.computed_again(session, recomputed(tier))
            own = alone and not tier.shared and tier.outcome in ("won", "lost")
            if own and tier.tier == "dram" and tier.actual_s:
                chunks = max(1, tier.fetched_tokens // session.chunk_tokens)
                self.health.dram_took(chunks, chunks * session.chunk_bytes, tier.actual_s)

    def _expect(self, digest: str, keys: Keys, *, fetch: bool) -> list[Coming]:
        """Pin or fetch the leading chunks, up to the first that cannot come.

        What is in DRAM is pinned before anything is fetched, so that making room for the rest cannot evict it.
        """
        pins = {key: slot for key in keys if (slot := self.dram.pin(digest, key)) is not None}
        coming: list[Coming] = []
        for key in keys:
            if key in pins:
                coming.append((pins[key], None))
                continue
            (local,) = self.residency.local(digest, [key])
            tier = local or ("remote" if self.residency.readable else "")
            arrival = self.arrivals.fetch((digest, key), tier, self.flushes.era) if tier and fetch else None
            if arrival is None:
                break
            coming.append((arrival.slot, arrival))
        for key in pins.keys() - keys[: len(coming)]:
            self.dram.unpin(digest, key)
        return coming

    def _accept(self, arrival: Arrival, origin: Origin) -> Outcome:
        """Whether a chunk that came from another tier may stay."""
        namespace, nbytes = arrival.place[0], arrival.slot.nbytes
        if not self.flushes.current(arrival.era, namespace, origin.tenant):
            return Outcome.MISS
        if self.quotas.refuse(origin.tenant, nbytes):
            self.accounts.over_quota(namespace)
            return Outcome.FULL
        self.quotas.change(origin.tenant, nbytes)
        return Outcome.OK


@dataclass(eq=False)
class Progress:
    """Progress of one load, until closed. Thread-safe.

    ``slots`` are those of the chunks of load ``load``; ``tell`` must not wait, and raises nothing.
    """

    load: int
    slots: Sequence[Slot]
    tell: Callable[[LoadPart], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._here: dict[int, int] = {}
        self._untold: dict[int, int] = {}
        self._untold_bytes = 0
        self._closed = False

    def came(self, position: int, nbytes: int) -> None:
        """A chunk's first ``nbytes`` are in its slot. Call without the store's lock."""
        with self._lock:
            before = self._here.get(position, 0)
            if self._closed or nbytes <= before:
                return
            self._here[position] = self._untold[position] = nbytes
            self._untold_bytes += nbytes - before
            if self._untold_bytes >= STEP_BYTES:
                moved, self._untold, self._untold_bytes = self._untold, {}, 0
                refs = [SlotRef.of(self.slots[position]) for position in moved]
                self.tell(LoadPart(self.load, list(moved), refs, list(moved.values())))

    def close(self) -> None:
        """The load is answered: tell nothing from now on."""
        with self._lock:
            self._closed = True


@contextmanager
def told(asked: Load, coming: Sequence[Coming], tell: Callable[[LoadPart], None]) -> Iterator[None]:
    """Tell what was here of a load's chunks, and what comes meanwhile, if the client wants to hear it."""
    if not asked.parts:
        yield
        return
    progress = Progress(asked.id, [slot for slot, _ in coming], tell)
    for position, (slot, arrival) in enumerate(coming):
        if arrival is not None:
            arrival.heard.append(partial(progress.came, position))
        progress.came(position, slot.nbytes if arrival is None else arrival.nbytes)
    try:
        yield
    finally:
        progress.close()
