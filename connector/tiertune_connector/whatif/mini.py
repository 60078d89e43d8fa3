"""Caches in miniature: production pools and algorithms over sampled keys, at a capacity smaller by the rate.

Miniature simulation (Waldspurger et al., ATC 2017) with a hot set: the few keys that a cache of the full capacity never
loses are left out, and count as hits.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from tiertune_connector.eviction import Key, Keys
from tiertune_connector.whatif.known import Weight
from tiertune_connector.whatif.sampler import Hashes, HotSet, Low, lowest_of, once_each, threshold
from tiertune_connector.whatif.simulated import SimulatedPool
from tiertune_connector.whatif.tiny import MOST_KEYS, TINY, Numbers, Tiny


class Miniatures:
    """Several algorithms at one capacity, on the same sample, so that they can be compared."""

    def __init__(self, capacity: int, algorithms: Iterable[str], rate: float) -> None:
        """``capacity`` in chunks of the real cache; at rate 1 it is simulated exactly."""
        self.capacity, self.rate = capacity, rate
        self.hot: frozenset[Key] = frozenset()
        """Keys that the caches never lose: hits that are not simulated."""
        self._minis: dict[str, SimulatedPool] = {}
        self._tiny: dict[str, Tiny] = {}
        self._numbers = Numbers()  # of the keys of the tiny ones
        for name in algorithms:
            self.begin(name)
        self._weight = Weight(threshold(rate))
        self._keys = self._sure = self._sampled = 0  # all that came, hot ones (sure hits), sampled ones: since taken

    def begin(self, algorithm: str, held: Keys = ()) -> None:
        """Follow this algorithm; ``held``: what its cache holds, the next victim first; a tiny one begins empty."""
        capacity = self._scaled()
        if self.rate == 1 and capacity < MOST_KEYS and algorithm in TINY:  # sampled keys hardly ever lie in runs
            self._tiny[algorithm] = TINY[algorithm](capacity)
        else:
            self._minis[algorithm] = SimulatedPool(capacity, algorithm)
            self._minis[algorithm].write_through(held[::-1])

    def requests(self, chains: Sequence[Keys], hashed: Hashes, again: Hashes) -> None:
        """Some requests' keys, head first, with all their hashes, one after another.

        ``again``: hashes of those keys that came before, at rates below 1. One cache sees all requests before the next
        does, so what it holds stays close to the processor meanwhile.
        """
        self._keys += hashed.size
        self._weight.came(again)
        if self.rate == 1:
            sampled: Iterable[Keys] = (keys for keys, _ in once_each(chains, hashed))
        else:
            sampled = map(self._plain, chains, lowest_of(chains, hashed, threshold(self.rate)))
        every = [keys for keys in sampled if keys]
        self._sampled += sum(map(len, every))
        for mini in self._minis.values():
            for keys in every:
                mini.request(keys)
        if self._tiny:
            self._follow_tiny(every)

    def _plain(self, keys: Keys, low: Low) -> Keys:
        """One request's keys with low hashes, without hot ones."""
        hot = self.hot.intersection(keys)
        if not hot:
            return list(low)
        plain = [key for key in low if key not in hot]
        self._sure += len(hot)
        self._weight.leave_out(len(hot), len(low) - len(plain))
        return plain

    def take(self, *, whole: bool = False, **more: float) -> dict[str, tuple[float, float]]:
        """By algorithm: hits, and all keys that came, since the last time.

        Not ``whole``: nothing yet if too few came.
        ``more``: hits of sampled keys, with algorithms that are followed elsewhere.
        """
        if not whole and self.rate < 1 and self._weight.too_few():
            return {}
        scale, keys = self._scale(), float(self._keys)
        hits = {**{name: mini.hits for name, mini in self._caches().items()}, **more}
        taken = {name: (min(self._sure + each * scale, keys), keys) for name, each in hits.items()}
        for mini in self._caches().values():
            mini.hits = 0
        self._keys = self._sure = self._sampled = 0
        return taken

    def _scale(self) -> float:
        """Keys that a sampled key's hit stands for."""
        if self.rate == 1:
            plain = self._keys - self._sure
            return plain / self._sampled if self._sampled else 0.0  # not 1 where a key was twice in a request
        return self._weight.take(otherwise=1 / self.rate)

    def warm(self, often: HotSet) -> None:
        """The hot set or the capacity has changed: below rate 1, keys that the cache never loses are hot."""
        if self.rate == 1:
            return
        hot = often.never_lost(self.capacity)
        for mini in self._minis.values():
            for key in hot - self.hot:  # no longer sampled
                mini.discard(key)
        self.hot = hot
        self.resize(self.capacity)

    def resize(self, capacity: int) -> None:
        """Caches keep what they hold as far as it fits."""
        self.capacity = capacity
        for mini in self._caches().values():
            mini.resize(self._scaled())

    def _follow_tiny(self, every: Iterable[Keys]) -> None:
        """The same for those that know keys by numbers: all share what is looked up for them."""
        numbers, minis = self._numbers, list(self._tiny.values())
        chains = [numbers.of(reversed(keys)) for keys in every]
        looks = [itemgetter(*chain) for chain in chains]
        for mini in minis:
            mini.extend(len(numbers))
            for chain, look in zip(chains, looks, strict=True):
                mini.request(chain, look)
        numbers.sweep(minis)

    def _caches(self) -> Mapping[str, SimulatedPool | Tiny]:
        return {**self._minis, **self._tiny}

    def _scaled(self) -> int:
        return max(0, round((self.capacity - len(self.hot)) * self.rate))
