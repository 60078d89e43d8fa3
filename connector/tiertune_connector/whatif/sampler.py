"""Which keys stand for all: sampling by a hash of the key, the same on every store of a fleet; and which are hot."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiertune_connector.eviction import Key, Keys

Hashes = npt.NDArray[np.uint64]
Low = dict[Key, int]
"""Keys with low hashes, and these, in order."""
_FULL = 1 << 64
_SEED_STEP = 1_000_003
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)
_LOT_STEP, _LOT_SHIFT = 6_364_136_223_846_793_005, 1_442_695_040_888_963_407
"""Multiplier and increment of a linear congruential generator (Knuth's MMIX)."""
_HEAD = 8
"""Bytes of a key that are hashed."""
_NONE = (1 << 62, 0)
"""Place and hash when no low key is left."""
HOT_KEYS = 64
"""Keys in a hot set: the heads of system prompts and tools that most requests begin with."""
COUNTED = 16
"""Least count of a key beyond these: on entering, it loses a hit if it was not sampled."""
USES = 4
"""A key that comes this often, while as many keys come as a cache holds, does not leave it."""
_FIRST_REFRESH, _REFRESH = 64, 2048
"""Requests between two refreshes: the first come at 64, 128, 256, ..."""


def mix(ids: Hashes, seed: int) -> Hashes:
    """Murmur3's 64-bit finaliser of every id + 1000003 * seed: uniform over 0 to 2**64."""
    mixed = ids + np.uint64(_SEED_STEP * seed % _FULL)
    for multiplier in _MULTIPLIERS:
        mixed ^= mixed >> _SHIFT
        mixed *= multiplier
    mixed ^= mixed >> _SHIFT
    return mixed


def hashes(keys: Sequence[bytes], seed: int) -> Hashes:
    """Hashes of opaque keys: their first 8 bytes, mixed."""
    lengths = set(map(len, keys))
    if len(lengths) != 1 or (length := lengths.pop()) < _HEAD:
        keys, length = [key[:_HEAD].ljust(_HEAD, b"\0") for key in keys], _HEAD
    ids: Hashes = np.ndarray(len(keys), "<u8", b"".join(keys), strides=(length,))
    return mix(ids, seed)


def threshold(rate: float) -> int:
    """A key is sampled if its hash is below this; ``rate`` is the share of such keys."""
    return min(_FULL - 1, int(rate * _FULL))


def lowest_of(chains: Sequence[Keys], hashed: Hashes, below: int) -> Iterator[Low]:
    """The keys of each chain with hashes below ``below``; ``hashed`` are the hashes of all keys, one after another."""
    low = (hashed < np.uint64(below)).nonzero()[0]
    left = zip(low.tolist(), hashed[low].tolist(), strict=True)
    place, value = next(left, _NONE)
    start = 0
    for keys in chains:
        end, found = start + len(keys), {}
        while place < end:
            found[keys[place - start]] = value
            place, value = next(left, _NONE)
        yield found
        start = end


def once_each(chains: Iterable[Keys], hashed: Hashes) -> Iterator[tuple[Keys, Hashes]]:
    """Every chain with its part of ``hashed``; a key that is twice in one, which no engine asks for, comes once."""
    start = 0
    for keys in chains:
        values = hashed[start : start + len(keys)]
        start += len(keys)
        if len(set(keys)) < len(keys):
            places = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))  # the first of each
            first = sorted(places.values())
            keys, values = [keys[place] for place in first], values[first]  # noqa: PLW2901
        yield keys, values


class Pick(NamedTuple):
    """A sampled key of a request."""

    position: int
    """From the head of the prompt, in chunks."""
    key: Key
    hot: bool


class Sampler:
    """Picks the sampled keys of requests: those of the fleet's hot set, and those whose hash is low.

    All samplers of a fleet use one rate, one hot set, and one seed for the hash, so that what one store samples another
    does too.
    """

    def __init__(self, rate: float, hot: Iterable[Key] = ()) -> None:
        self.rate, self.hot = rate, frozenset(hot)
        self._below = np.uint64(threshold(rate))

    def pick(self, chains: Sequence[Keys], hashed: Hashes) -> list[list[Pick]]:
        """The sampled keys of each request, head first; several at once are cheaper if they are short.

        ``hashed`` are the hashes of all their keys, one after another.
        """
        ends = list(accumulate(map(len, chains)))
        picked: list[list[Pick]] = [[] for _ in chains]
        for place in (hashed < self._below).nonzero()[0].tolist():
            index = bisect_right(ends, place)
            keys = chains[index]
            position = place - ends[index] + len(keys)
            picked[index].append(Pick(position, keys[position], hot=False))
        for index, keys in enumerate(chains) if self.hot else ():
            if hot := self.hot.intersection(keys):  # no key is twice in a prompt
                every = {pick.position: pick for pick in picked[index]}
                every.update({place: Pick(place, keys[place], hot=True) for place in map(keys.index, hot)})
                picked[index] = [every[place] for place in sorted(every)]
        return picked


@dataclass(eq=False)
class Frequent:
    """Finds the keys that come most often: counts the keys of one request in a few (Misra and Gries 1982).

    A hot key is frequent among all keys, wherever in prompts it stands. The table is bounded: when it overflows, every
    count falls by one. Counts halve from time to time, so that what was hot once is forgotten.

    At most ``room`` keys are counted, in one request of ``every``; ``half_life`` is in counted requests.
    """

    room: int = 8192
    every: int = 8
    half_life: int = 1024

    def __post_init__(self) -> None:
        self.total = 0
        """Keys that were counted, halved as the counts are."""
        self._counts: Counter[Key] = Counter()
        self._counted = 0
        self._lot = 0
        self._skipped = self._gap()

    def requests(self, chains: Sequence[Keys]) -> None:
        """Requests came: count some of them."""
        index, count = self._skipped, len(chains)
        while index < count:
            self._count(chains[index])
            index += 1 + self._gap()
        self._skipped = index - count

    def top(self, number: int) -> dict[Key, int]:
        """The most frequent keys with their counts, most frequent first; none that came once only."""
        often = ((key, count) for key, count in self._counts.items() if count > 1)
        return dict(nlargest(number, often, key=itemgetter(1)))

    def _gap(self) -> int:
        """Requests to skip before counting one: not always as many, because traffic has periods of its own."""
        self._lot = (self._lot * _LOT_STEP + _LOT_SHIFT) % _FULL
        return (self._lot >> 32) % (2 * self.every - 1)

    def _count(self, keys: Keys) -> None:
        self._counts.update(keys)
        self._counted += 1
        self.total += len(keys)
        if self._counted % self.half_life == 0:
            self.total //= 2
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
        while len(self._counts) > self.room:
            self._counts = Counter({key: count - 1 for key, count in self._counts.items() if count > 1})


class HotSet:
    """The few keys used so often that sampling must not decide about them: they are followed one by one.

    They are the most frequent keys of late, at most ``HOT_KEYS``, and those beyond that came often.
    """

    def __init__(self, room: int = HOT_KEYS, frequent: Frequent | None = None) -> None:
        """At most ``room`` in all; ``frequent`` counts them, by default as a store does."""
        self.shares: Mapping[Key, float] = {}
        """Shares of all accesses, by key, largest first."""
        self.keys: frozenset[Key] = frozenset()
        """The same without shares."""
        self._frequent = frequent or Frequent()
        self._room = room
        self._requests = 0
        self._refresh_at = _FIRST_REFRESH

    def never_lost(self, capacity: float) -> frozenset[Key]:
        """The keys that a cache of so many chunks always holds."""
        return frozenset(key for key, share in self.shares.items() if share * capacity >= USES)

    def requests(self, chains: Sequence[Keys]) -> bool:
        """Count some requests; True if the set was refreshed after them."""
        self._frequent.requests(chains)
        self._requests += len(chains)
        if self._requests < self._refresh_at:
            return False
        while self._refresh_at <= self._requests:
            self._refresh_at += min(self._refresh_at, _REFRESH)
        total = self._frequent.total
        top = self._frequent.top(self._room).items()
        often = [each for place, each in enumerate(top) if place < HOT_KEYS or each[1] >= COUNTED]
        self.shares = {key: count / total for key, count in often}
        self.keys = frozenset(self.shares)
        return True
