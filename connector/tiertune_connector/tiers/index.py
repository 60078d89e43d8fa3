"""Shared index of where one namespace's chunks lie in host memory: a client that looks there asks nobody.

It is a hint. An entry may be overwritten by another key's, or torn while it is read; then a client finds nothing, or
what the store's reply to its load does not confirm. So no lock is needed: only the store writes.

A memfd of float64 and unsigned 64 bit numbers in native order: a header, then for each entry a fingerprint of its key
(0: none), its place (segment and slot), and the slot's generation. A key has its entry among the eight of its bucket;
if all are taken, another one is lost.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from tiertune_connector.tiers.segment import Mapped, Segment, touched

LAYOUT = 1
"""Version of the memfd's layout, and of the store's numbers in it."""

WAYS = 8
"""Entries of a bucket: with two on average, one key in 5,000 is lost."""
_FEWEST_BUCKETS = 1 << 8
_MOST_CHUNKS = 1 << 18
"""Most that an index is made for, of 24 MiB; if more come, more are lost."""
_HEADER = 16
"""Numbers: when it was last true, and 15 more of the store's."""
_SHIFT, _SLOT = np.uint64(32), np.uint64((1 << 32) - 1)
"""A place is a segment's number, and a slot in it."""
_FEW = 12
"""Keys, up to which vectors do not pay."""
Place = tuple[int, int, int]
"""Segment, slot, and the slot's generation."""


def buckets_for(chunks: int) -> int:
    """A power of two with which so many chunks take two entries per bucket, or fewer."""
    return max(_FEWEST_BUCKETS, 1 << ((min(chunks, _MOST_CHUNKS) - 1) // 2).bit_length())


class SharedIndex(Mapped):
    """A client's view, made of the descriptor that it was sent; `create` makes the store's, which alone writes."""

    def __init__(self, buckets: int, fd: int, *, keep: bool = False) -> None:
        super().__init__(fd, total_bytes(buckets), keep=keep)
        self.buckets = buckets
        entries = buckets * WAYS
        self._header = np.frombuffer(self._map, np.float64, _HEADER)
        words = np.frombuffer(self._map, np.uint64, 3 * entries, 8 * _HEADER).reshape(3, entries)
        self._prints, self._places, self._generations = words
        self._sets = self._prints.reshape(buckets, WAYS)

    @classmethod
    def create(cls, chunks: int) -> "SharedIndex":
        """Empty, with room for ``chunks``: OSError if the machine has not that much memory."""
        buckets = buckets_for(chunks)
        with touched("tiertune-index", total_bytes(buckets)) as fd:
            return cls(buckets, fd, keep=True)

    def _bucket(self, key: bytes) -> tuple[int, int, list[int]]:
        """A key's fingerprint, the first entry of its bucket, and the fingerprints there."""
        name = xxhash.xxh3_64_intdigest(key)
        first = (name & self.buckets - 1) * WAYS
        return name, first, self._prints[first : first + WAYS].tolist()

    # -- the store's side

    def put(self, key: bytes, place: Place) -> None:
        """Make a chunk visible to all."""
        name, first, there = self._bucket(key)
        way = there.index(name) if name in there else there.index(0) if 0 in there else name % 7
        at = first + way
        segment, slot, generation = place
        self._prints[at] = 0
        self._places[at] = segment << 32 | slot
        self._generations[at] = generation
        self._prints[at] = name

    def remove(self, key: bytes) -> None:
        """Make a chunk invisible."""
        name, first, there = self._bucket(key)
        if name in there:
            self._prints[first + there.index(name)] = 0

    def tell(self, now: float, numbers: Sequence[float]) -> None:
        """State that it is true at ``now``, monotonic seconds; 0: not to be believed. At most 15 ``numbers``."""
        self._header[1 : 1 + len(numbers)] = numbers
        self._header[0] = now

    # -- a client's side

    @property
    def told_at(self) -> float:
        """When the store last said that it is true, monotonic seconds; 0: it is not."""
        return float(self._header[0])

    def numbers(self, count: int) -> list[float]:
        """The first ``count`` of the store's numbers."""
        told: list[float] = self._header[1 : 1 + count].tolist()
        return told

    def place(self, key: bytes, segments: Mapping[int, Segment]) -> Place | None:
        """Where a chunk lies, if it is found in ``segments``."""
        name, first, there = self._bucket(key)
        if name not in there:
            return None
        at = first + there.index(name)
        where, generation = int(self._places[at]), int(self._generations[at])
        number, slot = where >> 32, where & 0xFFFFFFFF
        segment = segments.get(number)
        if segment is None or slot >= segment.geometry.slots or int(segment.generations[slot]) != generation:
            return None
        return number, slot, generation

    def find(self, keys: Sequence[bytes], segments: Mapping[int, Segment]) -> list[Place]:
        """The places of the leading ``keys``; looked up all at once if more than a few."""
        if len(keys) <= _FEW:
            few: list[Place] = []
            for key in keys:
                place = self.place(key, segments)
                if place is None:
                    break
                few.append(place)
            return few
        names = np.frombuffer(b"".join(map(xxhash.xxh3_64_digest, keys)), ">u8").astype(np.uint64)
        buckets = (names & np.uint64(self.buckets - 1)).astype(np.intp)
        same = self._sets[buckets] == names[:, None]
        at = buckets * WAYS + same.argmax(1)
        found, places, generations = same.any(1), self._places[at], self._generations[at]
        numbers, slots = places >> _SHIFT, (places & _SLOT).astype(np.intp)
        for number in set(numbers.tolist()):
            here = numbers == number
            segment = segments.get(number)
            if segment is None:
                found[here] = False
                continue
            now = segment.generations.take(slots[here], mode="clip")  # an entry that is being written names any slot
            found[here] &= (now == generations[here]) & (slots[here] < segment.geometry.slots)
        leading = len(keys) if found.all() else int(found.argmin())
        told = zip(numbers.tolist(), slots.tolist(), generations.tolist(), strict=True)
        return list(told)[:leading]

    def close(self) -> None:
        del self._header, self._prints, self._places, self._generations, self._sets
        super().close()


def total_bytes(buckets: int) -> int:
    """Size of the memfd."""
    return 8 * (_HEADER + 3 * WAYS * buckets)
