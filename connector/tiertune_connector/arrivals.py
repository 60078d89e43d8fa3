"""Chunks on their way from a slower tier into DRAM: each is fetched once, however many loads wait for it."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiertune_connector.chunk import NOBODY, Origin, checksum
from tiertune_connector.counters import Counters
from tiertune_connector.lane import Lane
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.dram import DramTier, Slot

if TYPE_CHECKING:
    from concurrent.futures import Future

log = logging.getLogger(__name__)
Place = tuple[str, bytes]
"""Namespace and key."""
_TOLD = {Outcome.OK: "hit", Outcome.MISS: "miss", Outcome.FULL: "miss", Outcome.CORRUPT: "corrupt"}


@dataclass(eq=False)
class Arrival:
    """One chunk on its way. Guarded by the store's lock."""

    tier: str
    slot: Slot
    era: int
    """Of the store's flushes when it was asked for."""
    since: float
    done: "Future[None]" = field(init=False)
    waiting: int = 0
    """Loads that it will be pinned for, once each."""
    outcome: Outcome | None = None
    """None while it is on its way."""
    at: float = 0.0
    """When the outcome was there."""

    def take(self) -> str:
        """End one load's waiting: hit (the chunk is pinned for it), late (it comes all the same), or why not."""
        if self.outcome is None:
            self.waiting -= 1
            return "late"
        return _TOLD.get(self.outcome, "error")


class Arrivals:
    """All chunks on their way. Call with the store's lock held, which is DRAM's; bytes move outside it."""

    def __init__(
        self,
        dram: DramTier,
        lanes: Mapping[str, Lane],
        counters: Counters,
        clock: Callable[[], float],
        accept: Callable[[Arrival, Origin], Outcome],
    ) -> None:
        """``accept`` tells whether a whole chunk may stay: OK, or what its loads are told instead."""
        self._dram = dram
        self._lanes = lanes
        self._counters = counters
        self._clock = clock
        self._accept = accept
        self._coming: dict[Place, Arrival] = {}

    def fetch(self, place: Place, tier: str, era: int) -> Arrival | None:
        """A chunk that comes, or is coming already, for one load more; None if there is no room for it."""
        arrival = self._coming.get(place)
        if arrival is None:
            slot = self._dram.reserve(*place, NOBODY)
            if slot is None:
                return None
            arrival = self._coming[place] = Arrival(tier, slot, era, self._clock())
            arrival.done = self._lanes[tier].readers.submit(self._bring, place, arrival)
        arrival.waiting += 1
        return arrival

    def observe(self, arrivals: Iterable[Arrival], started: float, chunk_bytes: int) -> dict[str, float]:
        """Learn what the chunks asked for since ``started`` took; seconds until each tier's last chunk was here."""
        now, seconds = self._clock(), dict[str, float]()
        by_tier: dict[str, list[Arrival]] = {}
        for arrival in arrivals:
            by_tier.setdefault(arrival.tier, []).append(arrival)
        for tier, group in by_tier.items():
            seconds[tier] = _last(group, now) - started
            own = [arrival for arrival in group if arrival.since >= started]
            came = sum(arrival.outcome is Outcome.OK for arrival in own)
            whole = all(arrival.outcome is not None for arrival in own)
            if came or not whole:  # what failed at once says nothing of speed
                took = _last(own, now) - started
                self._lanes[tier].observe(max(came, 1), max(came, 1) * chunk_bytes, took)
        return seconds

    def _bring(self, place: Place, arrival: Arrival) -> None:
        """Read a chunk into its reserved slot; runs on a thread of its tier's, without the lock."""
        payload = arrival.slot.view()
        try:
            outcome, origin = self._lanes[arrival.tier].read(*place, payload)
        except Exception:
            log.exception("a read from %s failed", arrival.tier)
            self._counters.add("internal_errors_total", ("read",))
            outcome, origin = Outcome.ERROR, NOBODY
        digest = checksum(payload) if outcome is Outcome.OK else 0
        with self._dram.lock:
            del self._coming[place]
            if outcome is Outcome.OK:
                outcome = self._accept(arrival, origin)
            arrival.outcome, arrival.at = outcome, self._clock()
            if outcome is not Outcome.OK:
                self._dram.abort(*place, arrival.slot)
                return
            arrival.slot.behind, arrival.slot.origin = {arrival.tier}, origin
            self._dram.commit(*place, arrival.slot, digest, users=arrival.waiting)


def _last(arrivals: Iterable[Arrival], now: float) -> float:
    """When the last one ended; those on their way have lasted until now."""
    return max(now if arrival.outcome is None else arrival.at for arrival in arrivals)
