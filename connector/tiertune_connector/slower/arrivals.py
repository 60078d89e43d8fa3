"""Chunks on their way from a slower tier into DRAM: each is fetched once, however many loads wait for it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiertune_connector.chunk import NOBODY, Origin
from tiertune_connector.counters import Counters
from tiertune_connector.slower.lane import Lane
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.slots import Slot

if TYPE_CHECKING:
    from concurrent.futures import Future

LEFT_SHARE = 4
"""One in so many chunks of a pool is not for those on their way from a tier: one that hangs must not take all of it."""
Place = tuple[str, bytes]
"""Namespace and key."""
_TOLD = {Outcome.OK: "hit", Outcome.MISS: "miss", Outcome.FULL: "miss", Outcome.CORRUPT: "corrupt"}


@dataclass(eq=False)
class Arrival:
    """One chunk on its way. Guarded by the store's lock, but for ``nbytes`` and ``heard``.

    Who wants to hear is added first and looks then; who reads sets first and tells then: nobody misses the last bytes.
    """

    tier: str
    slot: Slot
    era: int
    """Of the store's flushes when it was asked for."""
    since: float
    predicted_s: float | None
    """Until it and all before it are here; None: unknown."""
    done: "Future[None]" = field(init=False)
    waiting: int = 0
    """Loads that it will be pinned for, once each."""
    nbytes: int = 0
    """Leading bytes that are in the slot, to be verified yet."""
    heard: list[Callable[[int], None]] = field(default_factory=list)
    """Told whenever more are, on the thread that reads; they must not wait."""
    outcome: Outcome | None = None
    """None while it is on its way."""
    reading: bool = False
    """It was given up while a thread may be filling the slot."""
    at: float = 0.0
    """When the outcome was there."""

    def came(self, nbytes: int) -> None:
        self.nbytes = nbytes
        for hear in self.heard:
            hear(nbytes)

    def take(self) -> str:
        """End one load's waiting: hit (the chunk is pinned for it), late (it comes all the same), or why not."""
        if self.outcome is None:
            self.waiting -= 1
            return "late"
        return _TOLD.get(self.outcome, "error")


@dataclass(eq=False)
class Arrivals:
    """All chunks on their way. Call with the store's lock held, which is DRAM's; bytes move outside it."""

    dram: DramTier
    lanes: Mapping[str, Lane]
    counters: Counters
    clock: Callable[[], float]
    accept: Callable[[str, Arrival, Origin], Outcome]
    """Whether a whole chunk of a namespace may stay: OK, or what its loads are told instead."""

    def __post_init__(self) -> None:
        self._coming: dict[Place, Arrival] = {}
        self._numbers = Counter[tuple[str, str]]()
        """How many of a namespace from a tier."""

    def fetch(self, place: Place, tier: str, era: int) -> Arrival | None:
        """A chunk that comes, or is coming already, for one load more; None if there is no room for it.

        None, too, while the tier that was asked for it is dead: until it is given up there, no other can be asked.
        """
        arrival = self._coming.get(place)
        if arrival is not None and self.lanes[arrival.tier].breaker.open:
            return None
        if arrival is None:
            slot = self.dram.reserve(*place, NOBODY) if self._has_share(place[0], tier) else None
            if slot is None:
                return None
            predicted_s = self.lanes[tier].transit.asked(slot.nbytes)
            arrival = self._coming[place] = Arrival(tier, slot, era, self.clock(), predicted_s)
            self._numbers[place[0], tier] += 1
            if not self._asked(place, arrival):
                self._call_off(place, arrival)
                return None
        arrival.waiting += 1
        return arrival

    def coming(self, namespace: str, keys: Iterable[bytes]) -> Counter[str]:
        """How many of these are on their way already, by tier."""
        found = [self._coming.get((namespace, key)) for key in keys] if self._coming else []
        return Counter(arrival.tier for arrival in found if arrival is not None)

    def give_up(self, tier: str, *, hangs: bool) -> None:
        """What waits for its turn behind a tier that died does not come; its loads hear of it at their deadline.

        Nor does what is being read, if that ``hangs``: the slot is kept until it ends, and the key is free meanwhile.
        """
        for place, arrival in list(self._coming.items()):
            if arrival.tier == tier and ((waits := arrival.done.cancel()) or hangs):
                arrival.reading = not waits
                self._call_off(place, arrival)

    @contextmanager
    def awaited(self, arrivals: Iterable[Arrival]) -> Iterator[None]:
        """A load waits for these, without the store's lock: a transfer more on their tiers' ways."""
        with ExitStack() as ways:
            for tier in {arrival.tier for arrival in arrivals}:
                ways.enter_context(self.lanes[tier].transit.awaited())
            yield

    def waited(self, arrivals: Iterable[Arrival], started: float) -> dict[str, float]:
        """A load waits no longer for its chunks, in the order of asking; seconds since ``started`` to each tier's last.

        It teaches how good predictions are, if it asked for its last chunk itself and none failed.
        """
        now, seconds = self.clock(), dict[str, float]()
        by_tier: dict[str, list[Arrival]] = {}
        for arrival in arrivals:
            by_tier.setdefault(arrival.tier, []).append(arrival)
        for tier, group in by_tier.items():
            took = seconds[tier] = max(now if arrival.outcome is None else arrival.at for arrival in group) - started
            told = group[-1].predicted_s if group[-1].since >= started else None
            outcomes = {arrival.outcome for arrival in group}
            lane = self.lanes[tier]
            if outcomes == {Outcome.OK}:
                lane.transit.loaded(told, took)
            elif None in outcomes and not lane.breaker.open:  # else: how long it hangs is not what a fetch costs
                lane.transit.given_up(told, took)
        return seconds

    def _has_share(self, namespace: str, tier: str) -> bool:
        pool = self.dram.pools.get(namespace)
        if pool is None:
            return False
        capacity = pool.pool.capacity
        return self._numbers[namespace, tier] < capacity - capacity // LEFT_SHARE

    def _asked(self, place: Place, arrival: Arrival) -> bool:
        """Have a thread read the chunk; False, and it may be in their queue all the same, if none can be had."""
        with self.counters.surviving("read", f"no thread can be had to read from {arrival.tier}"):
            arrival.done = self.lanes[arrival.tier].readers.submit(self._bring, place, arrival)
            return True
        return False

    def _call_off(self, place: Place, arrival: Arrival) -> None:
        """It does not come."""
        self._end(place, arrival, Outcome.ERROR)
        self.lanes[arrival.tier].transit.ended(arrival.slot.nbytes, Outcome.ERROR)
        self.dram.abort(*place, arrival.slot, quarantine=arrival.reading)

    def _called_off(self, place: Place, arrival: Arrival) -> bool:
        """Whether it was: the slot is another chunk's by now, or nobody's from now on."""
        if arrival.reading:
            self.dram.release_quarantine(place[0], arrival.slot)
        return arrival.outcome is not None

    def _end(self, place: Place, arrival: Arrival, outcome: Outcome) -> None:
        del self._coming[place]
        self._numbers[place[0], arrival.tier] -= 1
        arrival.outcome, arrival.at = outcome, self.clock()

    def _bring(self, place: Place, arrival: Arrival) -> None:
        """Read a chunk into its reserved slot; runs on a thread of its tier's, without the lock."""
        with self.dram.lock:
            if self._called_off(place, arrival):
                return
        payload = arrival.slot.view()
        outcome, origin = self.lanes[arrival.tier].read(*place, payload, arrival.came)
        if outcome is Outcome.OK:
            arrival.came(payload.nbytes)  # of a tier that could not tell before
        digest = origin.sum_of(payload) if outcome is Outcome.OK else 0
        with self.dram.lock:
            if self._called_off(place, arrival):
                return
            self.lanes[arrival.tier].transit.ended(payload.nbytes, outcome)
            if outcome is Outcome.OK:
                outcome = self.accept(place[0], arrival, origin)
            self._end(place, arrival, outcome)
            if outcome is not Outcome.OK:
                self.dram.abort(*place, arrival.slot)
                return
            arrival.slot.behind, arrival.slot.origin = {arrival.tier: arrival.at}, origin
            self.dram.commit(*place, arrival.slot, digest, users=arrival.waiting)
