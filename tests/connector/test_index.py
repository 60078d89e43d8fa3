"""The index of chunks in shared memory, alone: what is found in it is what was put last, or nothing."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import chain
from tiertune_connector.tiers.index import LAYOUT, WAYS, SharedIndex, buckets_for, total_bytes
from tiertune_connector.tiers.segment import PAGE, Geometry, Segment

KEYS = chain("k", 2)
SLOTS = 64


@pytest.fixture
def index():
    made = SharedIndex.create(0)
    yield made
    made.close()


@pytest.fixture
def segments():
    made = {number: Segment.create(number, Geometry(SLOTS, PAGE)) for number in (1, 2)}
    yield made
    for segment in made.values():
        segment.close()


@given(st.lists(st.tuples(st.integers(0, 30), st.one_of(st.none(), st.tuples(st.integers(1, 2), st.integers(0, 63))))))
def test_it_tells_what_was_put_last(steps):
    """Of each key that was not removed since; of others nothing."""
    index, names, held = SharedIndex.create(0), chain("i", 31), {}
    segments = {number: Segment.create(number, Geometry(SLOTS, PAGE)) for number in (1, 2)}
    for which, place in steps:
        key = names[which]
        if place is None:
            held.pop(key, None)
            index.remove(key)
        else:
            held[key] = (*place, 0)
            index.put(key, held[key])
    assert [index.find([key], segments) for key in names] == [[held[key]] if key in held else [] for key in names]
    leading = next((at for at, key in enumerate(names) if key not in held), len(names))
    assert index.find(names, segments) == [held[key] for key in names[:leading]]
    for each in (index, *segments.values()):
        each.close()


@pytest.mark.parametrize(
    ("chunks", "buckets"),
    [(0, 256), (512, 256), (513, 512), (1024, 512), (100_000, 65_536), (1 << 18, 1 << 17), (10**9, 1 << 17)],
)
def test_a_bucket_has_two_entries_on_average_or_fewer(chunks, buckets):
    """Where the tier holds what it may, of at most a quarter of a million chunks."""
    assert buckets_for(chunks) == buckets


def test_hardly_a_key_is_lost_in_a_full_tier(segments):
    """Those that are, are asked for."""
    names, index = chain("many", 4000), SharedIndex.create(4000)
    for number, key in enumerate(names):
        index.put(key, (1, number % SLOTS, 0))
    found = sum(bool(index.find([key], segments)) for key in names)
    assert 0.998 * len(names) <= found
    index.close()


def test_keys_looked_up_all_at_once_are_found_as_one_by_one(segments):
    """Also the second and later of a bucket: each of 2000 has a generation of its own."""
    names, index = chain("many", 2000), SharedIndex.create(2000)
    for number, key in enumerate(names):
        segments[1].generations[number % SLOTS] = number
        index.put(key, (1, number % SLOTS, number))
    last = names[-SLOTS:]
    assert index.find(last, segments) == [index.place(key, segments) for key in last]
    assert len(index.find(last, segments)) == SLOTS
    index.close()


def test_in_a_bucket_that_is_full_the_newest_is_found(index, segments, monkeypatch):
    """It takes the place of another one."""
    monkeypatch.setattr(index, "buckets", 1)
    names = chain("b", 3 * WAYS)
    for number, key in enumerate(names):
        index.put(key, (1, number, 0))
        assert index.find([key], segments) == [(1, number, 0)]
    assert sum(bool(index.find([key], segments)) for key in names) == WAYS


def test_a_slot_that_has_another_generation_is_not_found(index, segments):
    """Its chunk has left; nor is one of a segment that the client has not."""
    index.put(KEYS[0], (1, 5, 0))
    index.put(KEYS[1], (3, 5, 0))
    segments[1].renew(5)
    assert [index.find([key], segments) for key in KEYS[:2]] == [[], []]


@given(st.binary(min_size=64, max_size=64))
def test_whatever_is_in_it_is_no_failure(noise):
    """An entry may be torn: then it names no slot, or one that there is."""
    index, segment = SharedIndex.create(0), Segment.create(1, Geometry(SLOTS, PAGE))
    index.put(KEYS[0], (1, 7, 0))
    numbers = np.frombuffer(noise, np.uint64)
    at = int(index._prints.argmax())
    index._places[at] = np.uint64(1 << 32) | (numbers[0] & np.uint64(0xFFFFFFFF))
    index._generations[at] = numbers[1] % np.uint64(2)
    assert all(slot < SLOTS for _, slot, _ in index.find(KEYS[:1], {1: segment}))
    index.close()
    segment.close()


def test_one_that_is_too_small_is_refused():
    """The descriptor is not kept."""
    fd = os.memfd_create("small")
    os.ftruncate(fd, total_bytes(256) - PAGE)
    with pytest.raises(ValueError, match="mmap"):
        SharedIndex(256, fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_layout_1_is_where_it_is():
    """Clients of other versions look there: with anything else here, ``LAYOUT`` is raised."""
    index = SharedIndex.create(1)
    index.put(b"key", (3, 5, 7))
    index.tell(1.5, [0.25])
    with os.fdopen(os.dup(index.fd), "rb") as file:
        words = np.frombuffer(file.read(), np.uint64)
    bucket = 8 * (13540649951185429987 % 256)
    entries = {16 + bucket: 13540649951185429987, 16 + 2048 + bucket: 3 << 32 | 5, 16 + 4096 + bucket: 7}
    assert LAYOUT == 1
    assert words.view(np.float64)[:2].tolist() == [1.5, 0.25]
    assert {at: int(words[at]) for at in np.flatnonzero(words[16:]) + 16} == entries


def test_segments_of_protocol_1_are_laid_out_so():
    """Client and store each work out where a slot is: with anything else here, ``PROTOCOL`` is raised."""
    segment = Segment.create(1, Geometry(slots=3, chunk_bytes=PAGE + 1))
    assert segment.renew(2) == 1
    segment.slot(1)[-1] = 9
    with os.fdopen(os.dup(segment.fd), "rb") as file:
        data = np.frombuffer(file.read(), np.uint8)
    assert {at: int(data[at]) for at in np.flatnonzero(data)} == {16: 1, PAGE + 2 * PAGE + PAGE: 9}
    assert len(data) == 7 * PAGE
    segment.close()
