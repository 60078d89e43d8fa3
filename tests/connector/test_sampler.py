"""Which keys are sampled, and which are hot."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import chain
from tiertune_connector.whatif.sampler import Frequent, Pick, Sampler, hashes, mix, threshold

KEYS = st.lists(st.binary(min_size=1, max_size=40), max_size=40, unique=True)
CHAINS = st.lists(KEYS, max_size=6)


@given(KEYS, st.integers(0, 5))
def test_a_key_is_hashed_by_its_head(keys, seed):
    """The first eight bytes decide, as a little-endian number, whatever the keys' lengths are."""
    ids = np.array([int.from_bytes(key[:8], "little") for key in keys], np.uint64)
    assert hashes(keys, seed).tolist() == mix(ids, seed).tolist()


@given(CHAINS, st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 3), st.data())
def test_picked_are_the_hot_and_those_of_low_hash(chains, rate, seed, data):
    """Every such key once at its place, in order, each request by itself; hot wins."""
    every = sorted({key for keys in chains for key in keys})
    hot = data.draw(st.sets(st.sampled_from(every))) if every else set()
    sampler, hashed = Sampler(rate, hot), [hashes(keys, seed) for keys in chains]
    every_hash = np.concatenate([np.empty(0, np.uint64), *hashed])
    for keys, own, picked in zip(chains, hashed, sampler.pick(chains, every_hash), strict=True):
        low = own < np.uint64(threshold(rate))
        expected = [Pick(position, key, key in hot) for position, key in enumerate(keys) if key in hot or low[position]]
        assert [picked] == [expected] == sampler.pick([keys], own)


def test_keys_that_are_numbers_come_with_their_hashes():
    """As a replay has them: ids instead of bytes."""
    ids = np.arange(50_000, dtype=np.uint64)
    sampler = Sampler(0.01, [7])
    (picked,) = sampler.pick([ids.tolist()], mix(ids, 3))
    assert Pick(7, 7, True) in picked
    assert 400 < len(picked) < 600


def test_stores_that_sample_alike_pick_the_same():
    """One seed, one rate and one hot set: what one store sampled another does too, others with another seed."""
    keys = chain("k", 5000)
    one, two = Sampler(0.1, keys[:3]), Sampler(0.1, keys[2::-1])
    picked = one.pick([keys], hashes(keys, 1))
    assert picked == two.pick([keys], hashes(keys, 1)) != one.pick([keys], hashes(keys, 2))


def requests(hot, count, *, common_every):
    """Prompts of ten chunks that never come again; every so manieth has one hot key in its middle."""
    for index in range(count):
        keys = [hashlib.sha256(f"{index}/{position}".encode()).digest() for position in range(10)]
        if index % common_every == 0:
            keys[5] = hot[index // common_every % len(hot)]
        yield keys


def test_frequent_keys_are_found_wherever_they_stand():
    """Four keys, each in one request of 40, among a hundred thousand that come once, in a table of 2048."""
    hot, frequent = chain("hot", 4), Frequent(room=2048)
    for keys in requests(hot, 10_000, common_every=10):
        frequent.requests([keys])
    assert set(frequent.top(4)) == set(hot)
    assert len(frequent.top(10_000)) <= 2048


def test_what_was_hot_is_forgotten():
    """A key that no longer comes makes way for those that do."""
    old, new = chain("old", 1), chain("new", 1)
    frequent = Frequent(every=1, half_life=100)
    for keys in requests(old, 500, common_every=2):
        frequent.requests([keys])
    assert list(frequent.top(1)) == old
    for keys in requests(new, 500, common_every=4):
        frequent.requests([keys])
    assert list(frequent.top(1)) == new
    for keys in requests(new, 1500, common_every=4):
        frequent.requests([keys])
    assert old[0] not in frequent.top(100)


def test_a_period_of_the_traffic_hides_nothing():
    """Which requests are counted has no period: of eight prompts in turn each is seen."""
    prompts, frequent = [chain(f"p{index}", 1) for index in range(8)], Frequent(every=8)
    for turn in range(8 * 500):
        frequent.requests([prompts[turn % 8]])
    counts = frequent.top(8)
    assert len(counts) == 8
    assert min(counts.values()) > 30
