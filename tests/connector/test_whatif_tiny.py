"""Algorithms over a few keys, run by run, beside pools that use and insert key by key."""

from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.chains import generated, grown, sessions
from tiertune_connector.eviction import CANDIDATES
from tiertune_connector.whatif.mini import Miniatures
from tiertune_connector.whatif.pool_ghosts import PoolGhosts
from tiertune_connector.whatif.sampler import hashes
from tiertune_connector.whatif.simulated import SimulatedPool
from tiertune_connector.whatif.tiny import TINY, Numbers

pytestmark = pytest.mark.slow

CHAINS = st.one_of(grown(), sessions(), st.lists(st.lists(st.integers(0, 60), min_size=1, unique=True), max_size=40))


def asked(cache, numbers, chain):
    keys = numbers.of(reversed(chain))
    cache.extend(len(numbers))
    cache.request(keys, itemgetter(*keys))


def state(cache, numbers):
    """As a pool's algorithm has it: queues and their ghosts in order, uses, the target."""
    names = {number: key for key, number in numbers._numbers.items()}
    queues = [[names[number] for number in queue.keys] for queue in cache._queues]
    first, second = (queue.ghosts for queue in cache._queues)
    told = {"ghosts": (queues[0][:first], queues[1][:second]), "residents": (queues[0][first:], queues[1][second:])}
    kinds = {key: cache._kinds[number] for number, key in names.items()}
    return told, kinds, getattr(cache, "_target", None)


def expected(algorithm, eviction):
    if algorithm == "arc":
        orders = {"g": eviction._recent_ghosts, "h": eviction._frequent_ghosts}
        orders |= {"r": eviction._recent, "f": eviction._frequent}
        kinds = {key: kind for kind, order in orders.items() for key in order}
        ghosts, residents = [list(orders[kind]) for kind in "gh"], [list(orders[kind]) for kind in "rf"]
        return {"ghosts": tuple(ghosts), "residents": tuple(residents)}, kinds, eviction.target
    kinds = dict.fromkeys(eviction._ghosts, "g")
    for order, letters in ((eviction._small, "0123"), (eviction._main, "ABCD")):
        kinds |= {key: letters[eviction._uses.get(key, 0)] for key in order}
    return (
        {"ghosts": (list(eviction._ghosts), []), "residents": (list(eviction._small), list(eviction._main))},
        kinds,
        None,
    )


@settings(deadline=None)
@given(chains=CHAINS, capacities=st.lists(st.integers(0, 40), min_size=1, max_size=6), every=st.integers(1, 9))
@pytest.mark.parametrize("algorithm", sorted(TINY))
def test_runs_do_what_their_keys_do_one_by_one(algorithm, chains, capacities, every):
    """Hits, queues and ghosts in their order, uses and targets are a pool's, whatever is resized."""
    cache, numbers, pool = TINY[algorithm](capacities[0]), Numbers(), SimulatedPool(capacities[0], algorithm)
    hits = 0
    for number, chain in enumerate(chains):
        hits += pool.prefix(chain)
        for key in reversed(chain):
            pool.write_through([key])
        asked(cache, numbers, chain)
        if number % every == 0:
            capacity = capacities[number // every % len(capacities)]
            pool.resize(capacity)
            cache.resize(capacity)
        told, kinds, target = state(cache, numbers)
        assert (cache.hits, cache._capacity - cache._room) == (hits, len(pool))
        assert (told, {key: kind for key, kind in kinds.items() if kind != "-"}, target) == expected(
            algorithm, pool._eviction
        )


@pytest.mark.parametrize("algorithm", sorted(TINY))
def test_numbers_of_what_no_cache_knows_are_forgotten(algorithm):
    """However many keys come, few have numbers; hits are a pool's all the time."""
    minis, pool = Miniatures(60, [algorithm], 1.0), SimulatedPool(60, algorithm)
    most = 0
    for chain in generated(4_000, seed=1, live=4):
        hashed = np.array(chain, np.uint64)
        minis.requests([chain], hashed, hashed[:0])
        pool.request(chain)
        most = max(most, len(minis._numbers))
    assert most < 8_192 + 100 < len({key for chain in generated(4_000, seed=1, live=4) for key in chain})
    assert minis.take()[algorithm][0] == pool.hits > 0


@settings(deadline=None)
@given(chains=st.one_of(grown(), sessions()), capacities=st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_a_small_pool_that_is_resized_is_simulated_whole(chains, capacities):
    """Request by request all algorithms hit what a pool hits, whether the curve counts for LRU or not."""
    ghosts, pools = PoolGhosts(capacities[0]), [SimulatedPool(capacities[0], name) for name in CANDIDATES]
    for number, chain in enumerate(chains):
        keys = [b"%8d" % key for key in chain]
        before = ghosts.counts()
        ghosts.requests([keys], hashes(keys, 0))
        after = ghosts.counts()
        for pool in pools:
            which = pool.algorithm, pool.capacity
            assert after[which][0] - before[which][0] == pool.prefix(keys)
            pool.write_through(keys)
            pool.resize(capacities[number % len(capacities)])
        ghosts.resize(capacities[number % len(capacities)])
