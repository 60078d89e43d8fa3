"""One pool, read as its users read it; what holds under any sequence of calls is in the eviction contract."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.eviction import ALGORITHMS, CANDIDATES
from tiertune_connector.pool import Pool
from tiertune_connector.whatif.simulated import SimulatedPool


def pool_of(*keys):
    pool = Pool(3)
    for place, key in enumerate(keys):
        assert pool.reserve(key) == []
        pool.commit(key, place)
    return pool


def test_the_prefix_ends_at_the_first_gap():
    """Chunks behind a gap do not count."""
    pool = pool_of(b"a", b"b", b"d")
    assert pool.prefix([b"a", b"b", b"c", b"d"]) == 2


def test_a_touch_of_a_chain_makes_its_tail_the_next_victim():
    """Tail first: a suffix leaves before its prefix."""
    pool = pool_of(b"1", b"2", b"3")
    pool.touch([b"1", b"2", b"3"])
    assert list(pool) == [b"3", b"2", b"1"]


@given(
    chains=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=32, unique=True), max_size=40),
    capacity=st.integers(0, 40),
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
)
def test_write_through_is_reserve_and_commit_in_one(chains, capacity, algorithm):
    """The replay's short way leaves exactly the contents of the store's long way."""
    short, long = SimulatedPool(capacity, algorithm), Pool(capacity, algorithm)
    for chain in chains:
        for key in reversed(chain):
            if key in long:
                long.touch([key])
                continue
            if long.reserve(key) is not None:
                long.commit(key, 0)
        short.write_through(chain)
        assert list(short) == list(long)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_what_is_pinned_stays_in_a_flood(algorithm):
    """A chain of many times the pool's size leaves only room for itself."""
    pool = SimulatedPool(4, algorithm)
    pool.write_through([b"a", b"b", b"c", b"d"])
    pool.pin(b"c")
    pool.write_through([b"%d" % index for index in range(64)])
    assert b"c" in pool
    assert len(pool) == 4


@pytest.mark.parametrize("algorithm", CANDIDATES)
@pytest.mark.parametrize("free", [0, 299, 300, 599])
def test_what_is_free_is_found_behind_all_that_is_pinned(algorithm, free):
    """Wherever the only victim stands, among keys used once or more often."""
    pool = SimulatedPool(600, algorithm)
    for _ in range(3):
        pool.write_through(range(300))
    pool.write_through(range(300, 600))
    held = set(range(600)) - {free}
    assert all(map(pool.pin, held))
    assert pool.reserve(1_000) == [(free, True)]
    assert pool.reserve(1_001) is None
