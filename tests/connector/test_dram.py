"""Host memory: growth, shrinking, pins, generations, quarantine."""

import os
import time

import numpy as np
import pytest

from connector.local_dram import LocalDram, fill, intact
from connector.stores import A, B, Clock, amid, at_once, chain, in_turns, payload, view
from tiertune_connector.chunk import NOBODY, checksum
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.segment import PAGE

SEGMENT = 16
"""Chunks of a page in a segment."""


@pytest.fixture
def tier(clock):
    tier = LocalDram(segment_bytes=SEGMENT * PAGE, clock=clock)
    tier.attach(A, PAGE, "lru")
    yield tier
    tier.close()


def resize(tier: LocalDram, chunks: int, **asked: tuple[int | None, str]) -> None:
    tier.retune(chunks * PAGE, asked)
    settle(tier)


def settle(tier: LocalDram) -> int:
    """Steps until nothing is left to do."""
    steps = 0
    while tier.settle():
        steps += 1
        assert steps < 1000
    return steps


def memory(tier: LocalDram) -> int:
    """Chunks' worth of memory that is really taken."""
    segments = [segment for pool in tier.pools.values() for segment in pool.segments.values()]
    return sum(os.fstat(s.fd).st_blocks * 512 - s.geometry.offset(0) for s in segments) // PAGE


def test_memory_grows_by_segments_and_never_past_the_capacity(tier):
    """One segment a step, the last one smaller."""
    tier.retune(40 * PAGE, {})
    taken = []
    while tier.settle():
        taken.append(memory(tier))
    assert taken == [16, 32, 40]


def test_a_smaller_capacity_returns_memory_to_the_machine(tier):
    """The oldest chunks leave, their memory is given back, empty segments are dropped and told; the rest is intact."""
    keys = chain("k", 64)
    resize(tier, 64)
    fill(tier, keys)
    assert memory(tier) == 64
    tier.retune(8 * PAGE, {})
    assert tier.present(A, keys[-8:])[1] == 8, "the youngest stay"
    assert tier.usage().resident_bytes == 8 * PAGE
    settle(tier)
    assert memory(tier) == 8
    assert len(tier.pools[A].segments) == 1
    assert len(tier.dropped_segments()) == 3
    assert tier.dropped_segments() == [], "told once"
    assert all(intact(tier, key) for key in keys[-8:])


def test_capacity_comes_back_after_a_shrink(tier):
    """Slots that were given back are used again before new segments are made, and hold bytes again: for good."""
    keys = chain("k", 48)
    resize(tier, 48)
    fill(tier, keys[:40])
    resize(tier, 20)
    resize(tier, 48)
    assert memory(tier) == 48
    fill(tier, keys)
    tier._clock.now += 2.0
    settle(tier)
    assert all(intact(tier, key) for key in keys)


def test_capacity_zero_gives_everything_back(tier):
    """Zero is a legal size: nothing is held, nothing is taken, a write is refused."""
    resize(tier, 32)
    fill(tier, chain("k", 32))
    resize(tier, 0)
    assert (memory(tier), tier.pools[A].segments) == (0, {})
    assert tier.write(A, b"key", view(payload(b"key", PAGE)), NOBODY) is Outcome.FULL


def test_pinned_chunks_survive_a_shrink_and_leave_with_their_last_user(tier):
    """A transfer in progress keeps its slot and its bytes; its memory follows the release."""
    keys = chain("k", 32)
    resize(tier, 32)
    fill(tier, keys)
    slots = [tier.pin(A, key) for key in keys[:6]]
    resize(tier, 2)
    assert memory(tier) == 6
    for slot, key in zip(slots, keys, strict=False):
        assert np.array_equal(slot.view(), payload(key, PAGE))
    for key in keys[:6]:
        tier.unpin(A, key)
    settle(tier)
    assert memory(tier) == 2
    assert tier.usage().resident_bytes <= 2 * PAGE


@pytest.mark.parametrize("users", [0, 1])
def test_a_chunk_that_was_written_during_a_shrink_leaves_afterwards(tier, users):
    """It was reserved before and is whole after: it stays only as long as somebody waited for it."""
    key = b"key"
    resize(tier, 1)
    slot = tier.reserve(A, key, NOBODY)
    resize(tier, 0)
    tier.commit(A, key, slot, checksum(slot.view()), users=users)
    assert len(tier.pools[A].pool) == users
    for _ in range(users):
        tier.unpin(A, key)
    assert len(tier.pools[A].pool) == 0
    settle(tier)
    assert memory(tier) == 0


def test_a_slot_changes_generation_when_its_contents_may_change_hands(tier):
    """Eviction, reuse, flush and abort each tell a reader that it came too late."""
    resize(tier, 1)
    seen = set()

    def generation() -> int:
        (segment,) = tier.pools[A].segments.values()
        return int(segment.generations[0])

    for key in chain("k", 4):
        fill(tier, [key])
        assert generation() not in seen
        seen.add(generation())
    tier.flush()
    assert generation() not in seen
    seen.add(generation())
    slot = tier.reserve(A, b"aborted", NOBODY)
    assert slot.generation == generation() not in seen
    tier.abort(A, b"aborted", slot)
    assert generation() not in seen | {slot.generation}


def test_a_flushed_chunk_that_is_being_read_is_gone_at_once_but_keeps_its_bytes(tier):
    """Nobody finds it any more; its reader finishes; its slot is free afterwards."""
    resize(tier, 1)
    fill(tier, [b"key"])
    slot = tier.pin(A, b"key")
    assert tier.flush() == (Outcome.OK, 1)
    assert tier.present(A, [b"key"])[1] == 0
    assert tier.write(A, b"other", view(payload(b"other", PAGE)), NOBODY) is Outcome.FULL
    assert np.array_equal(slot.view(), payload(b"key", PAGE))
    tier.unpin(A, b"key")
    fill(tier, [b"other"])


def test_a_quarantined_slot_is_not_used(tier):
    """Somebody may still be writing into it: the pool is smaller until that has ended."""
    resize(tier, 4)
    slot = tier.reserve(A, b"lost", NOBODY)
    tier.abort(A, b"lost", slot, quarantine=True)
    fill(tier, chain("k", 12))
    assert tier.pools[A].pool.capacity == 3
    assert all(tier.pools[A].pool.get(key) is not slot for key in tier.pools[A].pool)
    tier.release_quarantine(A, slot)
    fill(tier, chain("l", 12))
    assert tier.pools[A].pool.capacity == 4
    assert memory(tier) == 4


def test_quarantine_survives_a_shrink(tier):
    """The slot's memory is not given back under its writer, and counts towards the capacity meanwhile."""
    resize(tier, 8)
    slot = tier.reserve(A, b"lost", NOBODY)
    tier.abort(A, b"lost", slot, quarantine=True)
    resize(tier, 1)
    assert memory(tier) == 1
    slot.view()[:] = b"\1" * PAGE
    assert memory(tier) == 1
    tier.release_quarantine(A, slot)
    settle(tier)
    assert memory(tier) == 1
    fill(tier, [b"key"])
    assert intact(tier, b"key")


def test_memory_moves_between_namespaces_without_exceeding_the_whole(tier):
    """A pool grows only into what the other has given back."""
    tier.attach(B, PAGE, "lru")
    resize(tier, 32)
    fill(tier, chain("a", 16))
    assert [pool.allowed for pool in tier.pools.values()] == [16, 16]
    tier.retune(32 * PAGE, {A: (28 * PAGE, "lru"), B: (None, "lru")})
    while tier.settle():
        assert memory(tier) <= 32
    assert [pool.provisioned for pool in tier.pools.values()] == [28, 4]
    pins = chain("a", 16)
    for key in pins:
        tier.pin(A, key)
    tier.retune(32 * PAGE, {A: (0, "lru"), B: (None, "lru")})
    settle(tier)
    assert [pool.provisioned for pool in tier.pools.values()] == [16, 16], "pinned memory cannot move yet"
    for key in pins:
        tier.unpin(A, key)
    settle(tier)
    assert [pool.provisioned for pool in tier.pools.values()] == [0, 32]
    assert memory(tier) == 32


def test_what_one_pool_gives_back_another_has_in_the_same_step(tier):
    """Whichever came first: the first chunks of a client that comes back find room."""
    tier.attach(B, PAGE, "lru")
    full = 2 * SEGMENT * PAGE
    for grows, shrinks in ((A, B), (B, A)):
        tier.retune(full, {shrinks: (full, "")})
        settle(tier)
        assert tier.pools[grows].provisioned == 0
        tier.retune(full, {grows: (full, "")})
        assert tier.settle()
        assert tier.pools[grows].free


def test_threads_that_settle_at_once_take_no_more_than_is_allowed(clock):
    """A connecting client and the upkeep do not both make the last segment."""
    for _ in range(10):
        tier = LocalDram(segment_bytes=4 * PAGE, clock=clock)
        tier.attach(A, PAGE, "lru")
        tier.retune(20 * PAGE, {})
        at_once(lambda _, tier=tier: settle(tier), 4)
        assert memory(tier) == 20
        tier.close()


def test_capacity_changes_amid_writes_lose_no_slot(tier):
    """Writers, a resizer and the upkeep at once: every slot is somewhere afterwards, and no write fails oddly."""

    def write(turn: int) -> None:
        key = b"%d" % (turn % 97)
        tier.write(A, key, view(payload(key, PAGE)), NOBODY)
        intact(tier, key)

    def retune(turn: int) -> None:
        tier.retune((turn * 7 % 50) * PAGE, {})

    with amid(in_turns(write, write, retune, lambda _: tier.settle()), 4):
        time.sleep(1.0)
    resize(tier, 40)
    pool = tier.pools[A]
    assert pool.provisioned == memory(tier) == 40
    assert len(pool.free) + len(pool.pool) == 40
    fill(tier, chain("after", 40))
    assert all(intact(tier, key) for key in chain("after", 40))


def test_a_settle_that_has_nothing_to_do_goes_through_no_segments(tier):
    """A store of half a terabyte has 8,000, and settles twenty times a second with requests waiting for the lock."""

    class Segments(dict):
        def values(self):
            raise AssertionError("all segments are gone through")

    resize(tier, 32)
    pool = tier.pools[A]
    segments, pool.segments = pool.segments, Segments(pool.segments)
    assert not tier.settle()
    pool.segments = segments


def test_lack_of_memory_shows_in_what_is_effective_and_is_tried_again_later(tier, monkeypatch, caplog):
    """The store goes on with what it has, and says so once; the machine is not asked at every step."""
    resize(tier, 16)
    asked = []

    def refuse(fd: int, offset: int, length: int) -> None:
        asked.append(length)
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        tier.retune(48 * PAGE, {})
        for _ in range(5):
            assert not tier.settle()
        assert len(asked) == 1
        tier._clock.now += 2.0
        assert not tier.settle()
    assert caplog.messages == ["dram has 64.0 KiB of 192.0 KiB: Cannot allocate memory; it goes on trying"]
    pool = tier.pools[A]
    assert (pool.allowed, pool.provisioned, pool.pool.capacity) == (48, 16, 16)
    tier._clock.now += 2.0
    settle(tier)
    assert pool.pool.capacity == 48


def test_lack_of_memory_is_told_again_for_a_capacity_that_is_asked_for_again(tier, monkeypatch, caplog):
    """Of a tuning that changes something else it is not; one that takes the capacity back ends the matter."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    resize(tier, 16)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for chunks in (48, 48, 16, 48):
        tier._clock.now += 2.0
        resize(tier, chunks)
    assert len(caplog.messages) == 2


def test_a_pool_keeps_its_chunk_size(tier):
    """A namespace with another chunk size is refused."""
    assert tier.attach(A, 2 * PAGE, "lru") is None
    assert tier.attach(A, PAGE, "lru") is tier.pools[A]


def test_evictions_are_told_with_reason_and_age(tier):
    """Room and capacity are told apart, with the seconds of the last use."""
    told = []
    tier.on_evicted = told.extend
    clock: Clock = tier._clock
    resize(tier, 2)
    fill(tier, [b"1", b"2"])
    clock.now += 5
    fill(tier, [b"3"])
    resize(tier, 1)
    assert [(chunk.reason, chunk.used_at) for chunk in told] == [("room", 1000.0), ("capacity", 1000.0)]
