"""Miss-ratio curve of tail-first LRU from a sample of the keys, while they come: one pass, bounded memory.

Sampling by hash (SHARDS, Waldspurger et al., FAST 2015) with an exact hot set: a few keys make a large part of the
accesses, and whether the hash picks one of those would decide the curve. Hot keys weigh 1, the others 1 / rate.
"""

from collections.abc import Iterable, Mapping, Sequence

from tiertune_connector.eviction import Key
from tiertune_connector.whatif.distances import STEPS, Distances
from tiertune_connector.whatif.hot import HotSet
from tiertune_connector.whatif.known import Known
from tiertune_connector.whatif.recency import Recency
from tiertune_connector.whatif.sampler import Hashes, hashes, lowest, threshold

MOST_TRACKED = 16_384
WHOLE = 4096
"""Different keys that are followed whatever their hash, before sampling begins."""


class Curve:
    """LRU has the inclusion property along a chain, so that distances of single keys give prefix hits exactly."""

    def __init__(
        self, rate: float, seed: int = 0, *, largest: int | None = None, most_tracked: int = MOST_TRACKED
    ) -> None:
        """Keys with a hash below ``rate`` are followed, until ``largest`` others were used after them.

        The rate halves whenever more than ``most_tracked`` keys are followed. At rate 1 the curve is exact.
        """
        self.rate = 1.0
        """At which keys are sampled now: 1 to begin with, so that no key that proves hot was sampled before."""
        self.hot = HotSet()
        self._rate, self._seed, self._largest, self._most_tracked = rate, seed, largest, most_tracked
        self.accesses = 0
        """Keys that came."""
        self._begun = 0  # keys that came for the first time
        self.below = threshold(self.rate)
        """Hashes of sampled keys lie below."""
        self._now = 0
        self._hot_keys: frozenset[Key] = frozenset()
        self._plain, self._fixed = Recency(), Recency()  # of sampled keys, and of hot ones
        self._known = Known(self.below)
        self._hot_accesses = self._hot_low = 0  # of hot keys, and those of them with a low hash, since the settlement
        self._hashes: dict[Key, int] = {}  # of the keys that are sampled, hot now or not
        self._distances = Distances(self.rate)
        self._most_sampled = self._limit()

    @property
    def tracked(self) -> int:
        """Keys that are followed."""
        return len(self._plain) + len(self._fixed)

    def request(self, keys: Sequence[Key], hashed: Hashes | None = None) -> bool:
        """One request's keys, head first, with their hashes; True if the hot set was refreshed.

        Where hashes are left out, keys are bytes.
        """
        hashed = hashes(keys, self._seed) if hashed is None else hashed
        return self.follow(keys, hashed, lowest(keys, hashed, self.below))

    def follow(self, keys: Sequence[Key], hashed: Hashes, sampled: Mapping[Key, int]) -> bool:
        """The same with the keys whose hash is below the rate, in their order, already found."""
        self.accesses += len(keys)
        if self._rate < 1:
            self._known.request(hashed)
        hot = self._hot_keys.intersection(keys)
        if hot:
            self._hot_low += len(sampled)
            sampled = {key: value for key, value in sampled.items() if key not in hot}
            self._hot_low -= len(sampled)
            self._observe(self._fixed, hot, self._distances.hot)
            self._hot_accesses += len(hot)
        if sampled:
            self._begun += len(sampled) - self._observe(self._plain, sampled, self._distances.sampled)
            self._hashes.update(sampled)
            self._use(self._plain, reversed(list(sampled)))
            if len(self._plain) > self._most_sampled:
                self._bound()
        if hot:
            self._use(self._fixed, hot)  # last: hot keys are heads of prompts
        if self.rate > self._rate and self._begun > WHOLE:
            self.thin(self._rate)
        return self.hot.request(keys) and self._refresh()

    def hit_ratios(self, sizes: Sequence[float]) -> list[float]:
        """Of caches of these sizes, in chunks, over all that came."""
        return [hits / max(1, self.accesses) for hits in self.hits(sizes)]

    def hits(self, sizes: Sequence[float]) -> list[float]:
        """Keys within cached prefixes so far, had the cache been of these sizes; never fewer in a larger one."""
        self._settle(self.rate)
        return [min(hits, self.accesses) for hits in self._distances.hits(sizes)]

    def thin(self, rate: float) -> None:
        """Go on at a lower rate."""
        self._settle(rate)
        self.rate = rate
        below = self.below = self._known.below = threshold(rate)
        self._most_sampled = self._limit()
        for key in [key for key, value in self._hashes.items() if value >= below]:
            self._forget(key)
        self._refresh()

    def reach(self, largest: int) -> None:
        """From now on, caches up to this size are of interest."""
        self._largest = largest
        self._most_sampled = self._limit()

    def _settle(self, rate: float) -> None:
        known, low = self._known.take()
        known, low = known - self._hot_accesses, low - self._hot_low
        self._distances.settle(known / low if low > 0 else 1 / self.rate, rate)
        self._hot_accesses = self._hot_low = 0

    def _limit(self) -> int:
        """Keys that are followed for their hash."""
        most = self._most_tracked
        return most if self._largest is None else min(most, int(self._largest * self.rate) + 1)

    def _observe(self, stack: Recency, keys: Iterable[Key], hits: dict[int, int]) -> int:
        """Count distances as they are before the request touches anything; returns how many keys came again."""
        again = 0
        plain, fixed, part = self._plain, self._fixed, STEPS * self.rate
        for key in keys:
            last = stack.last(key)
            if last is not None:
                hits[int(STEPS * plain.since(last) + part * fixed.since(last))] += 1
                again += 1
        return again

    def _use(self, stack: Recency, keys: Iterable[Key]) -> None:
        now = self._now
        for key in keys:
            now += 1
            stack.use(key, now)
        self._now = now

    def _bound(self) -> None:
        """Forget the longest unused beyond the largest size; of the others, follow fewer if they are too many."""
        while len(self._plain) > self._most_sampled:
            if self._most_sampled < self._most_tracked:
                self._forget(next(iter(self._plain)))
            else:
                self.thin(self.rate / 2)

    def _forget(self, key: Key) -> None:
        del self._hashes[key]
        if key in self._plain:
            self._plain.remove(key)

    def _refresh(self) -> bool:
        """Keys that became hot, or are no longer, keep their place in the order."""
        if self.rate == 1:
            return True  # all are followed one by one already
        old, new = self._hot_keys, frozenset(self.hot.shares)
        for key in old - new:
            if key in self._fixed:
                last = self._fixed.remove(key)
                if key in self._hashes:
                    self._plain.put(key, last)
        for key in new - old:
            if key in self._plain:
                self._fixed.put(key, self._plain.remove(key))
        self._hot_keys = new
        return True
