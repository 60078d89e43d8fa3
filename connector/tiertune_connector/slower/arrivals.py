"""Chunks on their way from a slower tier into DRAM: each is fetched once, however many loads wait for it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiertune_connector.chunk import NOBODY, Origin
from tiertune_connector.slower.lane import Lane, Lanes
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.slots import Slot
from tiertune_connector.tuning import LEFT_SHARE
from tiertune_connector.units import Clock

if TYPE_CHECKING:
    from concurrent.futures import Future

Place = tuple[str, bytes]
"""Namespace and key."""
_TOLD = {Outcome.OK: "hit", Outcome.MISS: "miss", Outcome.FULL: "miss", Outcome.CORRUPT: "corrupt"}


@dataclass(eq=False)
class Arrival:
    """One chunk on its way. Guarded by the store's lock, except ``nbytes`` and ``heard``.

    A listener is added before it looks, and the reader sets before it tells, so that nobody misses the last bytes.
    """

    place: Place
    lane: Lane
    slot: Slot
    era: int
    """The store's era of flushes when it was asked for."""
    since: float
    predicted_s: float | None
    """Until it and all before it come; None: unknown."""
    done: "Future[None]" = field(init=False)
    waiting: int = 0
    """Loads to pin it for, once each."""
    nbytes: int = 0
    """Leading bytes in the slot, not verified yet."""
    heard: list[Callable[[int], None]] = field(default_factory=list)
    """Called when more have come, on the reading thread; must not wait."""
    outcome: Outcome | None = None
    """None while it is on its way."""
    reading: bool = False
    """Given up while a thread may be filling the slot."""
    at: float = 0.0
    """Time of the outcome."""

    def came(self, nbytes: int) -> None:
        self.nbytes = nbytes
        for hear in self.heard:
            hear(nbytes)

    def take(self) -> str:
        """End one load's wait: hit (the chunk is pinned for it), late (it still comes), or why it did not come."""
        if self.outcome is None:
            self.waiting -= 1
            return "late"
        return _TOLD.get(self.outcome, "error")


@dataclass(eq=False)
class Arrivals:
    """All chunks on their way. Call with the store's lock held, which is DRAM's; bytes move outside it."""

    dram: DramTier
    lanes: Lanes
    clock: Clock
    accept: Callable[[Arrival, Origin], Outcome]
    """Whether a whole chunk may stay: OK, or the outcome for its loads."""

    def __post_init__(self) -> None:
        self._coming: dict[Place, Arrival] = {}
        self._numbers = Counter[tuple[str, Lane]]()
        """How many are coming, by namespace and lane."""

    def fetch(self, place: Place, tier: str, era: int) -> Arrival | None:
        """Count one load more for a chunk, fetched unless it is coming already; None if no room is left.

        None, too, while the tier already asked for it is dead: no other can be asked until it is given up there.
        """
        arrival = self._coming.get(place)
        if arrival is not None and arrival.lane.breaker.open:
            return None
        if arrival is None:
            lane, (_, share) = self.lanes[tier], self.room(place[0])
            slot = self.dram.reserve(*place, NOBODY) if self._numbers[place[0], lane] < share else None
            if slot is None:
                return None
            predicted_s = lane.transit.asked(slot.nbytes)
            arrival = self._coming[place] = Arrival(place, lane, slot, era, self.clock(), predicted_s)
            self._numbers[place[0], lane] += 1
            arrival.done = lane.readers.submit(self._bring, arrival)
        arrival.waiting += 1
        return arrival

    def coming(self, namespace: str, keys: Iterable[bytes]) -> Counter[str]:
        """How many of these chunks are on their way already, by tier."""
        found = [self._coming.get((namespace, key)) for key in keys] if self._coming else []
        return Counter(arrival.lane.name for arrival in found if arrival is not None)

    def room(self, namespace: str) -> tuple[int, int]:
        """Chunks that DRAM can hold for loads at once, and how many of them one slower tier may be bringing."""
        pool = self.dram.pools.get(namespace)
        capacity = pool.pool.capacity if pool else 0
        return capacity, capacity - capacity // LEFT_SHARE

    def give_up(self, lane: Lane) -> None:
        """Call off what waits its turn at a tier that died; its loads hear of it at their deadline.

        If the tier hangs, also what is being read: the key is free at once, the slot only when the read ends.
        """
        hangs = lane.hangs
        for arrival in list(self._coming.values()):
            if arrival.lane is lane and ((waits := arrival.done.cancel()) or hangs):
                arrival.reading = not waits
                self._end(arrival, Outcome.ERROR)
                lane.transit.ended(arrival.slot.nbytes, Outcome.ERROR)
                self.dram.abort(*arrival.place, arrival.slot, quarantine=arrival.reading)

    @contextmanager
    def awaited(self, arrivals: Iterable[Arrival]) -> Iterator[None]:
        """While a load waits for these, count one more transfer on their lanes. Call without the store's lock."""
        lanes = {arrival.lane for arrival in arrivals}
        for lane in lanes:
            lane.transit.awaited(1)
        try:
            yield
        finally:
            for lane in lanes:
                lane.transit.awaited(-1)

    def waited(self, arrivals: Iterable[Arrival], started: float) -> dict[str, float]:
        """A load's wait for ``arrivals``, in asking order, ends; seconds from ``started`` to each tier's last chunk.

        It teaches how good predictions are, if it asked for its last chunk itself and none failed.
        """
        now, seconds = self.clock(), dict[str, float]()
        by_lane: dict[Lane, list[Arrival]] = {}
        for arrival in arrivals:
            by_lane.setdefault(arrival.lane, []).append(arrival)
        for lane, group in by_lane.items():
            took = seconds[lane.name] = (
                max(now if arrival.outcome is None else arrival.at for arrival in group) - started
            )
            told = group[-1].predicted_s if group[-1].since >= started else None
            outcomes = {arrival.outcome for arrival in group}
            if outcomes == {Outcome.OK}:
                lane.transit.loaded(told, took)
            elif None in outcomes and not lane.breaker.open:  # else: how long it hangs is not what a fetch costs
                lane.transit.given_up(told, took)
        return seconds

    def _called_off(self, arrival: Arrival) -> bool:
        """Whether it was given up: its slot is another chunk's, or nobody's from now on."""
        if arrival.reading:
            self.dram.release_quarantine(arrival.place[0], arrival.slot)
        return arrival.outcome is not None

    def _end(self, arrival: Arrival, outcome: Outcome) -> None:
        del self._coming[arrival.place]
        self._numbers -= {(arrival.place[0], arrival.lane): 1}  # which forgets one at 0
        arrival.outcome, arrival.at = outcome, self.clock()

    def _bring(self, arrival: Arrival) -> None:
        """Read a chunk into its reserved slot; runs on its tier's thread, without the lock."""
        with self.dram.lock:
            if self._called_off(arrival):
                return
        payload, lane = arrival.slot.view(), arrival.lane
        outcome, origin = lane.read(*arrival.place, payload, arrival.came)
        if outcome is Outcome.OK:
            arrival.came(payload.nbytes)  # for a tier that does not tell sooner
        digest = origin.sum_of(payload) if outcome is Outcome.OK else 0
        with self.dram.lock:
            if self._called_off(arrival):
                return
            lane.transit.ended(payload.nbytes, outcome)
            if outcome is Outcome.OK:
                outcome = self.accept(arrival, origin)
            self._end(arrival, outcome)
            if outcome is not Outcome.OK:
                self.dram.abort(*arrival.place, arrival.slot)
                return
            arrival.slot.behind, arrival.slot.origin = {lane.name: arrival.at}, origin
            self.dram.commit(*arrival.place, arrival.slot, digest, users=arrival.waiting)
