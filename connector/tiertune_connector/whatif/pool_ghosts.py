"""What a pool would have hit with each candidate algorithm, and with LRU at other sizes: its ghosts."""

from collections.abc import Collection, Iterable

import numpy as np

from tiertune_connector.eviction import CANDIDATES, LRU, Keys
from tiertune_connector.whatif.curve import Curve
from tiertune_connector.whatif.known import KnownKeys
from tiertune_connector.whatif.mini import Miniatures
from tiertune_connector.whatif.sampler import Hashes, HotSet

RATES = {128: 1.0, 1024: 1 / 16}
"""For pools below so many chunks, as a tiny ghost tells little; three algorithms cost about 3 µs per simulated key."""
USUAL_RATE = 1 / 32
"""For larger pools."""
MOST_CHUNKS = 2048
"""Most chunks in a ghost: with more, fewer keys are simulated."""
SPAN = 16
"""The curve goes up to this many times the capacity."""
_CURVE_SHARE, _CURVE_CHUNKS = 1 / 2, 8192
"""The curve is sampled at no more than this share of the ghosts' rate, and follows at most so many keys."""
_BATCH = 1024
"""Most keys that wait to be studied until counts are asked for."""
_CAPACITIES = 8
"""Most capacities remembered of the pool, its own included; the grid has at most as many sizes."""

Counts = dict[tuple[str, int], tuple[float, float]]
"""By algorithm and capacity."""


def rate_of(capacity: int) -> float:
    """Rate at which a pool is simulated: a power of two, so that small changes of capacity do not change it."""
    rate = next((rate for below, rate in RATES.items() if capacity < below), USUAL_RATE)
    return halved(rate, capacity, MOST_CHUNKS)


def halved(rate: float, capacity: int, most: int) -> float:
    """Halve the rate until at most ``most`` of ``capacity`` keys are sampled."""
    while capacity * rate > most:
        rate /= 2
    return rate


def grid(capacity: int) -> list[int]:
    """Sizes of the curve: powers of two from a quarter of the capacity on."""
    lowest = max(0, capacity.bit_length() - 2)
    return [1 << power for power in range(lowest, lowest + SPAN.bit_length() + 2) if 1 << power <= SPAN * capacity]


class PoolGhosts:
    """Miniature simulations of the candidate algorithms at a pool's own capacity, and LRU's curve over a grid."""

    def __init__(self, capacity: int, *, rate: float | None = None) -> None:
        """``rate`` replaces the one that follows from the capacity; 1 is exact."""
        self._wanted_rate = rate
        self._begin(capacity, rate or rate_of(capacity), HotSet())
        self._waiting: list[Keys] = []
        self._waiting_hashes: list[Hashes] = []
        self._waiting_keys = 0
        self._capacities = [capacity]  # of the pool, the present one last
        self._counts: Counts = {}
        self._seen: dict[int, float] = {}  # the curve's hits, by size, when they were counted last
        self._seen_keys = 0
        self._follow_sizes()

    def _begin(self, capacity: int, rate: float, hot: HotSet) -> None:
        """All that depends on the rate begins anew."""
        self._known = KnownKeys() if rate < 1 else None
        smallest, largest = _span(capacity)
        curve_rate = 1.0 if rate == 1 else halved(rate * _CURVE_SHARE, largest, _CURVE_CHUNKS)
        self._curve = Curve(curve_rate, smallest=smallest, largest=largest, hot=hot)
        self._lru_by_curve = self._curve.exact  # which knows what LRU holds
        others = [name for name in CANDIDATES if name != LRU.name]
        self._minis = Miniatures(capacity, others if self._lru_by_curve else CANDIDATES, rate)

    @property
    def rate(self) -> float:
        """Share of the keys that the ghosts see."""
        return self._minis.rate

    def requests(self, chains: Iterable[Keys], hashed: Hashes) -> None:
        """Take some requests' keys, head first, with all their hashes, one after another."""
        self._waiting.extend(chains)
        self._waiting_hashes.append(hashed)
        self._waiting_keys += hashed.size
        if self._waiting_keys >= _BATCH:
            self._study()

    def counts(self) -> Counts:
        """By algorithm and capacity: keys within cached prefixes, and all keys that came, estimated, so far.

        A size counts from when it is followed: one that is told again after it was left out begins at 0, as a counter
        of a process that has started anew. What comes from the ghosts and what from the curve adds up.
        """
        self._settle()
        return {which: (min(hits, keys), keys) for which, (hits, keys) in self._counts.items()}

    def resize(self, capacity: int) -> None:
        """The pool has a new capacity. Ghosts keep what they hold as far as it fits; at another rate all begin anew."""
        if capacity == self._minis.capacity:
            return
        self._settle(whole=True)
        if (rate := self._wanted_rate or rate_of(capacity)) != self.rate:
            self._begin(capacity, rate, self._curve.hot)
        else:
            if self._lru_by_curve and capacity > self._minis.capacity:
                self._lru_by_curve = False  # a pool that grows holds less than one that was as large all the time
                self._minis.begin(LRU.name, self._curve.latest(self._minis.capacity))
            self._minis.resize(capacity)
            self._curve.reach(*_span(capacity))
        self._minis.warm(self._curve.hot)
        self._capacities = [*(each for each in self._capacities if each != capacity), capacity][-_CAPACITIES:]
        self._follow_sizes()

    def _study(self) -> None:
        """The requests that wait: looked through together, as vectors of a few keys cost more than they hold."""
        if not self._waiting:
            return
        chains, hashed = self._waiting, np.concatenate(self._waiting_hashes)
        self._waiting, self._waiting_hashes, self._waiting_keys = [], [], 0
        again = hashed[self._known.before(hashed)] if self._known else hashed[:0]
        self._minis.requests(chains, hashed, again)
        if self._curve.requests(chains, hashed, again):
            self._minis.warm(self._curve.hot)

    def _settle(self, *, whole: bool = False) -> None:
        """Count what came since the last time: at the pool's own size by the miniatures, at the others by the curve.

        Not ``whole``: what too few were sampled of waits for more.
        """
        self._study()
        if whole:
            self._curve.settle()
        own, before, keys = self._minis.capacity, self._seen, self._seen_keys
        self._look(before)
        since = {size: hits - before[size] for size, hits in self._seen.items()}
        by_curve = since.pop(own)
        minis = self._minis.take(whole=whole, **({LRU.name: by_curve} if self._lru_by_curve else {}))
        came = float(self._seen_keys - keys)
        told = {(name, own): counts for name, counts in minis.items()}
        told |= {(LRU.name, size): (hits, came) for size, hits in since.items()}
        for which, (hits, asked) in told.items():
            counted = self._counts.get(which, (0.0, 0.0))
            self._counts[which] = counted[0] + hits, counted[1] + asked

    def _follow_sizes(self) -> None:
        """From now on count for the grid and the pool's own size; the others are forgotten, but for its latest ones."""
        sizes = {self._minis.capacity, *grid(self._minis.capacity)}
        self._counts = {which: told for which, told in self._counts.items() if which[1] in {*self._capacities, *sizes}}
        self._look(sizes)

    def _look(self, sizes: Collection[int]) -> None:
        """See what the curve has counted for these sizes by now."""
        self._seen = dict(zip(sizes, self._curve.hits(list(sizes)), strict=True))
        self._seen_keys = self._curve.counted


def _span(capacity: int) -> tuple[int, int]:
    """The smallest and the largest size of interest."""
    return min(grid(capacity), default=0), SPAN * capacity
