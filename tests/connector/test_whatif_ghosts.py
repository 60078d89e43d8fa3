"""Miniature simulations of a pool, beside pools that are simulated whole."""

from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.chains import generated, grown, hits_of, requests, sessions
from tiertune_connector.eviction import CANDIDATES
from tiertune_connector.whatif.mini import Miniatures
from tiertune_connector.whatif.pool_ghosts import MOST_CHUNKS, PoolGhosts, grid, rate_of
from tiertune_connector.whatif.sampler import HotSet, mix
from tiertune_connector.whatif.simulated import SimulatedPool

pytestmark = pytest.mark.slow

NONE = np.empty(0, np.uint64)
LOW_LOW_HIGH = np.array([0, 0, 2**64 - 1], np.uint64)


def hashed(keys, seed=0):
    return mix(np.array(keys, dtype=np.uint64), seed)


def feed(ghosts, chains, seed=0):
    for chain in chains:
        ghosts.requests([chain], hashed(chain, seed))
    return ghosts


@settings(deadline=None)
@given(chains=st.one_of(grown(), sessions()), capacity=st.integers(0, 40))
def test_a_small_pool_is_simulated_whole(chains, capacity):
    """All algorithms at its capacity, and LRU over the grid, have exactly the hits of a real pool.

    Also of prompts longer than the pool, most of whose keys leave before the request ends.
    """
    counts = feed(PoolGhosts(capacity), chains).counts()
    total = sum(map(len, chains))
    assert set(counts) == {(name, capacity) for name in CANDIDATES} | {("lru", size) for size in grid(capacity)}
    for (name, size), told in counts.items():
        real = SimulatedPool(size, name)
        hits = 0
        for chain in chains:
            hits += real.prefix(chain)
            for key in reversed(chain):
                real.write_through([key])
        assert told == (hits, total)


@given(chains=grown(), capacity=st.integers(1, 40), rate=st.sampled_from([0.25, 0.5]))
def test_no_ghost_hits_more_than_came(chains, capacity, rate):
    """However few were sampled; counts of all that came are exact once some were."""
    ghosts, total, before = PoolGhosts(capacity, rate=rate), 0, {}
    for chain in chains:
        feed(ghosts, [chain])
        total += len(chain)
        counts = ghosts.counts()
        assert all(0 <= hits <= keys <= total for hits, keys in counts.values())
        assert all(counts[which][1] >= keys for which, (_, keys) in before.items())
        before = counts


@given(
    chains=grown(),
    capacities=st.lists(st.sampled_from([4, 5, 8, 16]), min_size=1, max_size=8),
    rate=st.sampled_from([0.125, 0.5]),
)
def test_nothing_counts_twice_where_the_capacity_changes(chains, capacities, rate):
    """What too few were sampled of is told of the capacity under which it came, by the ghosts or by the curve."""
    ghosts, came = PoolGhosts(capacities[0], rate=rate), 0
    for number, chain in enumerate(chains):
        feed(ghosts, [chain])
        came += len(chain)
        ghosts.resize(capacities[number % len(capacities)])
        assert all(keys <= came for _, keys in ghosts.counts().values())
    ghosts.resize(99)
    assert sum(keys for (name, _), (_, keys) in ghosts.counts().items() if name == "arc") == came


@pytest.mark.parametrize("capacity", [0, 1, 127, 128, 129, 1_023, 1_024, 65_536, 65_537, 100_000, 10**7])
def test_the_rate_follows_the_capacity(capacity):
    """Small pools are simulated whole, of others at most one key in 16 or 32; a ghost never holds too many or few."""
    rate = rate_of(capacity)
    assert (rate == 1) == (capacity < 128)
    assert (rate <= 1 / 32) == (capacity >= 1_024)
    assert rate in {1.0, *(0.5**power for power in range(4, 20))}
    assert capacity * rate <= MOST_CHUNKS
    assert capacity < 128 or capacity * rate >= 8
    assert len(grid(capacity)) <= 8


@pytest.fixture(scope="module")
def traffic():
    chains = generated(requests=3_000, seed=5)
    return chains, sum(map(len, chains))


@pytest.mark.parametrize(("capacity", "points"), [(500, 9), (4_000, 4)])
def test_the_best_algorithm_is_found(traffic, capacity, points):
    """Ghosts of 31 and 125 chunks err alike for all algorithms, so that the pick loses less than half a point."""
    chains, total = traffic
    exact = {name: 100 * hits_of(chains, capacity, name) / total for name in CANDIDATES}
    ghosts = feed(PoolGhosts(capacity), chains)
    told = {name: 100 * ghosts.counts()[name, capacity][0] / total for name in CANDIDATES}
    assert told == pytest.approx(exact, abs=points)
    assert exact[max(told, key=told.__getitem__)] >= max(exact.values()) - 0.5


def test_after_a_resize_counts_go_on(traffic):
    """What was told of the old capacity stays, the new one begins; nothing falls; all that came is counted once."""
    chains, total = traffic
    ghosts = feed(PoolGhosts(400), chains[:1_000])
    before = dict(ghosts.counts())
    ghosts.resize(100_000)
    assert ghosts.rate < 1 / 16
    feed(ghosts, chains[1_000:])
    ghosts.resize(400)
    counts = ghosts.counts()
    assert counts["arc", 400] == before["arc", 400]
    assert counts["arc", 400][1] + counts["arc", 100_000][1] == total
    assert all(counts[name, 400] >= before[name, 400] for name in CANDIDATES)


def test_a_former_capacity_goes_on_as_a_size_of_the_curve(traffic):
    """LRU at a power of two is counted by the ghosts while it is the pool's own, by the curve after: all that came."""
    chains, total = traffic
    ghosts = feed(PoolGhosts(512), chains[:1_000])
    ghosts.resize(600)
    before = ghosts.counts()["lru", 512]
    feed(ghosts, chains[1_000:])
    hits, keys = ghosts.counts()["lru", 512]
    assert keys == total
    missed = hits_of(chains, 512, "lru") - hits_of(chains[:1_000], 512, "lru")
    assert hits - before[0] == pytest.approx(missed, abs=0.09 * (total - before[1]))
    ghosts.resize(512)
    assert ghosts.counts()["lru", 512] == (hits, keys)


@pytest.mark.parametrize("away", [2_000, 100_000])
def test_a_size_that_comes_back_begins_at_nothing(traffic, away):
    """What came while a size was not told, or before, is of no window after: it counts from when it is told again."""
    chains, _ = traffic
    ghosts = feed(PoolGhosts(400), chains[:1_000])
    lowest = grid(400)[0]
    assert ghosts.counts()["lru", lowest][1] > 0
    ghosts.resize(away)
    feed(ghosts, chains[1_000:2_000])
    assert ("lru", lowest) not in ghosts.counts()
    highest = grid(away)[-1]
    ghosts.resize(400)
    assert ghosts.counts()["lru", lowest] == (0, 0)
    feed(ghosts, chains[2_000:])
    assert ghosts.counts()["lru", lowest][1] == sum(map(len, chains[2_000:]))
    ghosts.resize(away)
    assert ghosts.counts()["lru", highest] == (0, 0)


@given(chains=grown(), capacities=st.lists(st.integers(0, 120), min_size=1, max_size=12))
def test_counts_never_fall_nor_jump(chains, capacities):
    """A resize alone counts nothing, and begins new sizes at nothing; then all that are live grow by what came."""
    ghosts, sizes = PoolGhosts(capacities[0]), [*capacities[1:], *[capacities[-1]] * len(chains)]
    for chain, capacity in zip(chains, sizes, strict=False):
        before = ghosts.counts()
        ghosts.resize(capacity)
        assert all(told == before.get(which, (0, 0)) for which, told in ghosts.counts().items())
        before, after = ghosts.counts(), feed(ghosts, [chain]).counts()
        live = {(name, capacity) for name in CANDIDATES} | {("lru", size) for size in grid(capacity)}
        for which, (hits, keys) in after.items():
            had_hits, had = before.get(which, (0.0, 0.0))
            assert keys - had == (len(chain) if which in live else 0)
            assert 0 <= hits - had_hits <= keys - had


@pytest.mark.parametrize("together", [1, 100])
def test_hits_count_as_much_when_sampling_begins(together):
    """The requests of one batch that come before that, and those after it, count each at the rate of its own."""
    chains = generated(2_000, seed=3)
    ghosts = PoolGhosts(10**6)
    for start in range(0, len(chains), together):
        some = chains[start : start + together]
        ghosts.requests(some, hashed([key for chain in some for key in chain]))
    truth = hits_of(chains, 10**6) / sum(map(len, chains))
    found = [hits / keys for (name, _), (hits, keys) in ghosts.counts().items() if name == "lru"]
    assert found == pytest.approx([truth] * len(found), abs=0.02)


@pytest.mark.parametrize("requests_between", [1, 3])
def test_however_often_counts_are_asked_for_they_tell_the_same(traffic, requests_between):
    """What comes between two questions may show no sampled key that came before: it counts with what comes after."""
    chains, _ = traffic
    ghosts, once = PoolGhosts(4_000), feed(PoolGhosts(4_000), chains).counts()
    for start in range(0, len(chains), requests_between):
        often = feed(ghosts, chains[start : start + requests_between]).counts()
    told, expected = ({which: hits / keys for which, (hits, keys) in counts.items()} for counts in (often, once))
    assert told == pytest.approx(expected, abs=0.02)


def test_many_capacities_are_not_all_remembered(traffic):
    """At most 16 are told, the latest ones."""
    ghosts = PoolGhosts(50)
    for capacity in range(60, 90):
        feed(ghosts, traffic[0][:1])
        ghosts.resize(capacity)
    sizes = {capacity for _, capacity in ghosts.counts()}
    assert len(sizes) <= 16
    assert 88 in sizes


def test_all_ghosts_of_a_pool_follow_few_keys(traffic):
    """At most 16k, whatever came."""
    for capacity in (500, 30_000, 10**6):
        ghosts = feed(PoolGhosts(capacity), traffic[0])
        assert not ghosts._minis._tiny
        held, curve = sum(map(len, ghosts._minis._minis.values())), ghosts._curve
        assert held + len(curve._plain) + len(curve._fixed) <= 16_384


@given(chains=st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=30), capacity=st.integers(0, 9))
def test_what_is_twice_in_a_request_does_no_harm_in_a_small_pool(chains, capacity):
    """No engine asks so. All that came is counted; what is twice hits once; the pool's size tells shares."""
    total, different = sum(map(len, chains)), [list(dict.fromkeys(chain)) for chain in chains]
    counts, once = (feed(PoolGhosts(capacity), each).counts() for each in (chains, different))
    assert counts.keys() == once.keys()
    for (algorithm, size), (hits, keys) in counts.items():
        assert keys == total
        scale = total / max(1, sum(map(len, different))) if size == capacity else 1
        assert hits == pytest.approx(once[algorithm, size][0] * scale)


def test_keys_of_most_requests_become_hot():
    """The head of all prompts is found, with its share; keys that came once are not."""
    hot = HotSet()
    refreshed = [hot.requests([[0, 1, 1_000 + number]]) for number in range(600)]
    assert [number for number, new in enumerate(refreshed, 1) if new] == [64, 128, 256, 512]
    assert set(hot.shares) == {0, 1}
    assert hot.shares[0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("capacity", [16, 100, 300])
def test_a_pool_that_shrinks_forgets_what_was_hot_in_it(traffic, capacity):
    """Keys that a large pool never loses are lost by a small one: it is told what one that was always small hits."""
    chains, _ = traffic
    shrunk, small = feed(PoolGhosts(8_000), chains), feed(PoolGhosts(capacity), chains)
    shrunk.resize(capacity)
    before = small.counts()
    feed(shrunk, chains)
    feed(small, chains)
    for name in CANDIDATES:
        hits, keys = (
            now - then for now, then in zip(small.counts()[name, capacity], before[name, capacity], strict=True)
        )
        told, came = shrunk.counts()[name, capacity]
        assert told / came == pytest.approx(hits / keys, abs=0.05)


@pytest.mark.parametrize("before", [200, 2_000, 100_000])
def test_where_the_rate_changes_all_ghosts_begin_anew(traffic, before):
    """Of what they held, only some had been sampled as it is now: they tell what those of a new pool do."""
    chains, _ = traffic
    resized, new = feed(PoolGhosts(before), chains[:1_000]), feed(PoolGhosts(100), chains[1_000:])
    resized.resize(100)
    then = resized.counts()
    told = feed(resized, chains[1_000:]).counts()
    for which, counted in new.counts().items():
        since = (now - begun for now, begun in zip(told[which], then.get(which, (0, 0)), strict=True))
        assert tuple(since) == pytest.approx(counted)


@given(chains=grown(), cuts=st.integers(1, 9))
def test_requests_may_be_followed_together(chains, cuts):
    """Some at once count what they count one after another, hot keys among them or not."""
    ours, theirs = Miniatures(20, CANDIDATES, 0.5), Miniatures(20, CANDIDATES, 0.5)
    often = HotSet()
    often.shares = {0: 0.5}
    for minis, together in ((ours, cuts), (theirs, 1)):
        minis.warm(often)
        for asked in requests(chains, together=together):
            minis.requests(*asked)
    assert ours.take() == theirs.take()
    held, expected = ({name: list(mini.visible) for name, mini in minis._minis.items()} for minis in (ours, theirs))
    assert held == expected
    assert set(held) == set(CANDIDATES)


def test_hot_keys_count_as_hits_and_leave_the_sample():
    """A key that comes four times while the pool turns over once is never simulated again."""
    minis = Miniatures(100, ["lru", "arc"], 0.5)
    minis.requests([[1, 2, 3]], LOW_LOW_HIGH, NONE)
    minis.take()
    often = HotSet()
    often.shares = {1: 0.04, 2: 0.03}
    minis.warm(often)
    minis.requests([[1, 4, 5]], LOW_LOW_HIGH, LOW_LOW_HIGH[:1])
    assert minis.take() == {"lru": (1.0, 3.0), "arc": (1.0, 3.0)}


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_prompts_that_come_once_do_not_blur_how_much_the_others_hit(seed):
    """Thirty system prompts, many keys of which are in no hot set, before one-off keys: which of them the sample has
    decides little, as hits are scaled by keys that came before."""
    rng, capacity, once = np.random.default_rng(5), 6000, count(10_000)
    lengths = rng.integers(3, 40, 30)
    chains = []
    for system in rng.zipf(1.3, 3_000) % 30:
        head = [100 * int(system) + place for place in range(lengths[system])]
        chains.append([*head, *islice(once, int(rng.integers(20, 80)))])
    counts = feed(PoolGhosts(capacity), chains, seed).counts()
    total = sum(map(len, chains))
    for name in CANDIDATES:
        hits, keys = counts[name, capacity]
        assert hits / keys == pytest.approx(hits_of(chains, capacity, name) / total, abs=0.01)
