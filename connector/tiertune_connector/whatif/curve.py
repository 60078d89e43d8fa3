"""Miss-ratio curve of tail-first LRU from a sample of the keys, while they come: one pass, bounded memory.

Sampling by hash (SHARDS, Waldspurger et al., FAST 2015) with an exact hot set: a few keys make a large part of the
accesses, and whether the hash picks one of those would decide the curve. Hot keys weigh 1, the others 1 / rate.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from tiertune_connector.eviction import Key, Keys
from tiertune_connector.whatif.known import Weight
from tiertune_connector.whatif.recency import Recency
from tiertune_connector.whatif.sampler import Hashes, HotSet, lowest_of, once_each, threshold

MOST_TRACKED = 16_384
WHOLE = 4096
"""Different keys followed whatever their hash, before sampling begins."""
STEPS = 8
"""Parts told apart in the gap between two sampled keys: hot keys fall into it."""

Floats = NDArray[np.float64]
Hits = dict[int, int]
"""By distance in steps."""


class Distances:
    """A key with k sampled and h hot ones used after it stands for distances from k / rate + h on, 1 / rate wide.

    Sampled keys are scaled by their share of the accesses to keys that came before, not by the rate: only those can be
    hits, and how many they are is known of all keys, by hash (SHARDS-adj does so with the share of all accesses).
    """

    def __init__(self) -> None:
        self.sampled: Hits = defaultdict(int)
        """Hits of sampled keys since the settlement, by distance in steps, STEPS to the gap of 1 / rate."""
        self.hot: Hits = defaultdict(int)
        """Those of hot keys."""
        self._rises: Hits = defaultdict(int)  # of sampled keys: hits more than a gap before
        self._settled: dict[float, Floats] = {}  # by rate: hits at each distance in steps

    def run(self, nearest: int, count: int) -> None:
        """Count hits of ``count`` sampled keys at distances a gap apart, from ``nearest`` steps on."""
        self._rises[nearest] += 1
        self._rises[nearest + STEPS * count] -= 1

    def unroll(self) -> None:
        """Turn runs into hits at each of their distances."""
        if not self._rises:
            return
        rises = np.zeros((max(self._rises) // STEPS + 1, STEPS), dtype=np.int64)
        rises.flat[list(self._rises)] = list(self._rises.values())
        hits = rises.cumsum(axis=0).ravel()
        for distance in hits.nonzero()[0].tolist():
            self.sampled[distance] += int(hits[distance])
        self._rises.clear()

    def settle(self, scale: float, rate: float) -> None:
        """A sampled key's hit stood for ``scale`` of the whole stream; keys were sampled at ``rate``."""
        self.unroll()
        for hits, weight in ((self.sampled, scale), (self.hot, 1.0)):
            if hits:
                self._add(hits, weight, rate)
                hits.clear()

    def hits(self, sizes: Sequence[float]) -> list[float]:
        """Settled hits of caches of these sizes. O(distances + sizes).

        A hit counts from its distance on, whole a gap above it, and in proportion between.
        """
        total = np.zeros(len(sizes))
        for rate, counts in self._settled.items():
            below = np.concatenate([np.zeros(STEPS), counts.cumsum()])  # hits up to each distance, from -STEPS on
            steps = np.minimum(np.asarray(sizes, dtype=np.float64) * STEPS * rate, below.size)
            whole = steps.astype(np.int64)
            within = below[np.minimum(whole[:, None] + np.arange(STEPS + 1), below.size - 1)]
            total += (within[:, :-1].sum(axis=1) + (steps - whole) * (within[:, -1] - within[:, 0])) / STEPS
        return total.tolist()

    def _add(self, hits: Hits, weight: float, rate: float) -> None:
        counts = self._settled.get(rate, np.zeros(0))
        missing = max(hits) + 1 - len(counts)
        if missing > 0:
            counts = np.pad(counts, (0, missing))
        counts[list(hits)] += weight * np.fromiter(hits.values(), dtype=np.float64)
        self._settled[rate] = counts


class Curve:
    """An LRU curve: LRU has the inclusion property along a chain, so single keys' distances give exact prefix hits."""

    def __init__(
        self,
        rate: float,
        *,
        smallest: int = 0,
        largest: int | None = None,
        most_tracked: int = MOST_TRACKED,
        hot: HotSet | None = None,
    ) -> None:
        """Keys with a hash below ``rate`` are followed, until ``largest`` others were used after them.

        The rate halves whenever more than ``most_tracked`` keys are followed. At rate 1 the curve is exact.
        Sizes below ``smallest`` are of no interest; ``hot`` comes from a curve that this one follows.
        """
        self.rate = 1.0
        """Present sampling rate: 1 to begin with, so that no key that proves hot was sampled before."""
        self.hot = hot or HotSet()
        self._rate, self._most_tracked = rate, most_tracked
        self._smallest, self._largest = smallest, largest
        self.accesses = 0
        """Keys that came."""
        self.counted = 0
        """Those among which hits are told; the latest wait until some that came before were sampled."""
        self._begun = 0  # keys that came for the first time
        self._now = 1
        self._hot_keys: frozenset[Key] = frozenset()
        self.sure: frozenset[Key] = frozenset()
        """Hot keys that hit in a cache of any size, so they have no place."""
        self._plain, self._fixed = Recency(), Recency()  # of sampled keys, and of hot ones
        self._weight = Weight(threshold(self.rate))
        self._hashes: dict[Key, int] = {}  # of the keys that are sampled, hot now or not
        self._distances = Distances()
        self._most_sampled = self._limit()

    @property
    def exact(self) -> bool:
        """All keys are followed, and will be while the sizes of interest are the same: no hot ones apart."""
        return self.rate == self._rate == 1 and self._most_sampled < self._most_tracked

    def requests(self, chains: Sequence[Keys], hashed: Hashes, again: Hashes) -> bool:
        """Some requests' keys, head first, with all their hashes, one after another, and ``again`` as of `came`.

        True if the hot set was refreshed.
        """
        self.came(hashed.size, again)
        if self.exact:
            for keys, values in once_each(chains, hashed):
                self.follow_all(keys, values)
        else:
            often, below = self.hot.keys, self._weight.below
            for keys, low in zip(chains, lowest_of(chains, hashed, below), strict=True):
                fell = self._weight.below < below  # as too many were followed
                sampled = {key: value for key, value in low.items() if value < self._weight.below} if fell else low
                self.follow(sampled, often.intersection(keys))
        refreshed = self.hot.requests(chains)
        if refreshed:
            self.refresh()
        return refreshed

    def came(self, keys: int, again: Hashes) -> None:
        """``keys`` keys came, of one request or more; ``again``: hashes of those known before, at rates below 1.

        They are followed after this. If enough came before, they are the first to be sampled.
        """
        if self.rate > self._rate and self._begun > (WHOLE if self._largest is None else min(WHOLE, self._largest)):
            self.thin(self._rate)
        self.accesses += keys
        self._weight.came(again)

    def follow(self, sampled: Mapping[Key, int], hot: AbstractSet[Key]) -> None:
        """Follow one request's keys with a hash below the rate, in order, and those in the hot set."""
        hot_lasts = None
        if hot and self._hot_keys:
            came = len(sampled)
            if not hot.isdisjoint(sampled):
                sampled = {key: value for key, value in sampled.items() if key not in hot}
            self._weight.leave_out(len(hot), came - len(sampled))
            if sure := self.sure & hot:
                self._distances.hot[0] += len(sure)
                hot = hot - sure
            hot_lasts = self._fixed.lasts(hot)
            self._observe(hot_lasts, self._distances.hot)
        if sampled:
            lasts = self._plain.lasts(sampled)
            self._begun += len(sampled) - len(lasts)
            self._observe(lasts, self._distances.sampled)
            self._hashes.update(sampled)
            self._use(self._plain, list(sampled)[::-1], lasts)
            if len(self._plain) > self._most_sampled:
                self._bound()
        if hot_lasts is not None and hot:
            self._use(self._fixed, list(hot), hot_lasts)  # last: hot keys are heads of prompts

    def follow_all(self, keys: Keys, hashed: Hashes) -> None:
        """``follow`` for an exact curve: all keys of one request, head first, none twice. Most go in whole runs."""
        if not keys:
            return
        latest = keys[::-1]
        new, lasts = self._plain.lasts_of(latest)
        for run in self._plain.runs_since(lasts):
            self._distances.run(STEPS * run[-1], len(run))
        if len(lasts) < len(keys):
            self._begun += len(keys) - len(lasts)
            start = len(lasts) if new + len(lasts) == len(keys) else 0
            self._hashes.update(zip(keys[start:], hashed[start:].tolist(), strict=True))
        if not self._plain.ends(latest):  # else it is the request before, or its head: the order stays as it is
            self._use(self._plain, latest, lasts)
        if len(self._plain) > self._most_sampled:
            self._bound()

    def latest(self, count: int) -> list[Key]:
        """Of an exact curve: at most ``count`` keys used last, longest unused first."""
        return list(self._plain)[-count:] if count else []

    def hit_ratios(self, sizes: Sequence[float]) -> list[float]:
        """Hit ratios of caches of these sizes, in chunks, over all that were counted."""
        return [hits / max(1, self.counted) for hits in self.hits(sizes)]

    def hits(self, sizes: Sequence[float]) -> list[float]:
        """Counted keys within cached prefixes so far, in caches of these sizes; never fewer in a larger one."""
        if not self._weight.too_few():
            self.settle()
        return [min(hits, self.counted) for hits in self._distances.hits(sizes)]

    def settle(self) -> None:
        """Count all that came, also what too few were sampled of to tell how much it hits."""
        self._distances.settle(self._weight.take(otherwise=1 / self.rate), self.rate)
        self.counted = self.accesses

    def thin(self, rate: float) -> None:
        """Go on at a lower rate."""
        self.settle()
        self.rate = rate
        below = self._weight.below = threshold(rate)
        self._most_sampled = self._limit()
        for key in [key for key, value in self._hashes.items() if value >= below]:
            del self._hashes[key]
            if key in self._plain:
                self._plain.remove(key)
        self.refresh()

    def refresh(self) -> None:
        """Take over the new hot set; keys that become hot, or cease to be, keep their place in the order."""
        if self.rate == 1:
            return  # all are followed singly already
        old, new = self._hot_keys, self.hot.keys
        sure = self.hot.never_lost(self._smallest)
        for key in (old - new) | sure:
            if key in self._fixed:
                last = self._fixed.remove(key)
                if key in self._hashes and key not in sure:
                    self._plain.put(key, last)
        for key in new - old:
            if key in self._plain:
                last = self._plain.remove(key)
                if key not in sure:
                    self._fixed.put(key, last)
        for key in sure:
            self._hashes.pop(key, None)
        self._hot_keys, self.sure = new, sure

    def reach(self, smallest: int, largest: int) -> None:
        """Set the sizes of interest from now on."""
        self._smallest, self._largest = smallest, largest
        self._most_sampled = self._limit()
        self.refresh()

    def _limit(self) -> int:
        """Most keys to follow for their hash."""
        most = self._most_tracked
        return most if self._largest is None else min(most, int(self._largest * self.rate) + 1)

    def _observe(self, lasts: Sequence[int], hits: dict[int, int]) -> None:
        """Count distances to these last uses, before the request touches anything."""
        if not lasts:
            return
        part, sure = STEPS * self.rate, len(self.sure)
        if lasts[0] == self._now - 1:  # nothing was used since
            hits[int(part * sure)] += 1
            return
        behind = self._plain.since(lasts)
        if not len(self._fixed):
            first = int(part * sure)
            for plain in behind:
                hits[STEPS * plain + first] += 1
            return
        for plain, fixed in zip(behind, self._fixed.since(lasts), strict=True):
            hits[int(STEPS * plain + part * (fixed + sure))] += 1

    def _use(self, stack: Recency, keys: Keys, lasts: Sequence[int]) -> None:
        stack.use(keys, self._now, lasts)
        self._now += len(keys)

    def _bound(self) -> None:
        """Forget the longest unused beyond the largest size; follow fewer of the others if they are too many."""
        while len(self._plain) > self._most_sampled:
            if self._most_sampled < self._most_tracked:
                for key in self._plain.forget(len(self._plain) - self._most_sampled):
                    del self._hashes[key]
            else:
                self.thin(min(self.rate / 2, self._rate))
