"""Miss-ratio curves from samples, beside a cache that is simulated whole."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.chains import generated, grown, hits_of, requests
from tiertune_connector.whatif.curve import WHOLE, Curve, Distances
from tiertune_connector.whatif.known import KnownKeys, Weight
from tiertune_connector.whatif.recency import Recency
from tiertune_connector.whatif.sampler import HotSet, mix, threshold

SIZES = [2, 20, 200, 2_000, 20_000, 200_000]


def curve_of(chains, rate, seed=0, together=1, **limits):
    curve = Curve(rate, **limits)
    for asked in requests(chains, seed, together):
        curve.requests(*asked)
    return curve


def tracked(curve):
    """How many keys it follows."""
    return len(curve._plain) + len(curve._fixed)


@given(chains=grown(), capacity=st.integers(1, 40))
def test_at_rate_1_it_is_the_simulation(chains, capacity):
    """Every size at once has exactly the hits of a pool of that size."""
    assert curve_of(chains, 1.0).hits([capacity]) == [hits_of(chains, capacity)]


@given(chains=grown(), rate=st.floats(0.01, 1.0), whole=st.integers(0, 20))
def test_a_sampled_curve_never_falls_nor_passes_1(chains, rate, whole):
    """A larger LRU has no fewer hits, whatever was sampled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiertune_connector.whatif.curve.WHOLE", whole)
        ratios = curve_of(chains, rate).hit_ratios(range(1, 60))
    assert ratios == sorted(ratios)
    assert all(0 <= ratio <= 1 for ratio in ratios)


@given(chains=grown(), together=st.integers(1, 9))
def test_an_exact_curve_takes_whole_requests(chains, together):
    """It has a pool's hits at every size; a key that stands in a request twice counts once."""
    limits = {"together": together, "largest": 200, "most_tracked": 400}
    curve, doubled = (curve_of(asked, 1.0, **limits) for asked in (chains, [chain + chain[:2] for chain in chains]))
    assert curve.exact
    assert curve.hits(range(1, 60)) == doubled.hits(range(1, 60)) == [hits_of(chains, size) for size in range(1, 60)]
    assert curve._hashes == doubled._hashes


@settings(deadline=None)
@given(chains=grown(), most=st.integers(4, 40), together=st.integers(2, 9))
def test_requests_may_come_together(chains, most, together):
    """Some at once make the curve that they make one after another, also where the rate falls amid them."""
    single, some = (curve_of(chains, 1.0, together=count, most_tracked=most) for count in (1, together))
    assert (some.rate, some._hashes, list(some._plain)) == (single.rate, single._hashes, list(single._plain))
    assert some.rate < 1 or some.hits(range(20)) == single.hits(range(20))


@settings(deadline=None)
@given(chains=grown(), most=st.integers(4, 40), largest=st.none() | st.integers(1, 30))
def test_what_is_followed_is_bounded(chains, most, largest):
    """The rate falls, or what is beyond the largest size is forgotten, so that keys and hashes stay few."""
    curve = Curve(1.0, largest=largest, most_tracked=most)
    for asked in requests(chains):
        curve.requests(*asked)
        assert tracked(curve) <= most + 64
        assert len(curve._hashes) <= tracked(curve)
        assert largest is None or len(curve._plain) <= largest + 1


@pytest.fixture(scope="module")
def large():
    """More than 100,000 different blocks, some system prompts, sessions that grow and end."""
    chains = generated(requests=12_000, seed=7)
    assert len({key for chain in chains for key in chain}) > 100_000
    return chains, np.array(curve_of(chains, 1.0, most_tracked=10**9).hit_ratios(SIZES))


@pytest.mark.slow
def test_one_key_in_a_hundred_is_enough(large):
    """Mean absolute error of at most 1.5 percentage points at rate 0.01, over seeds; fewer than 16k keys followed."""
    chains, exact = large
    for seed in range(2):
        curve = curve_of(chains, 0.01, seed)
        assert 0 < tracked(curve) < 3_000
        assert np.mean(np.abs(curve.hit_ratios(SIZES) - exact)) < 0.015


@pytest.mark.slow
def test_fixed_size_sampling_lowers_its_rate(large):
    """With room for few keys the rate halves by itself, and the curve stays right within some points."""
    chains, exact = large
    curve = curve_of(chains, 0.1, most_tracked=2_000)
    assert curve.rate < 0.1
    assert np.mean(np.abs(curve.hit_ratios(SIZES) - exact)) < 0.03


def test_few_keys_are_followed_whole():
    """Before sampling begins everything is exact, at any rate."""
    chains = generated(requests=20, seed=3)
    assert len({key for chain in chains for key in chain}) < WHOLE
    assert curve_of(chains, 0.001).hits([50]) == [hits_of(chains, 50)]


def test_keys_that_no_cache_of_interest_loses_have_no_place():
    """What most prompts begin with is a hit at all sizes from the smallest on; the others are told as before."""
    chains, sizes = generated(requests=4_000, seed=9), [400, 1_600, 6_400]
    placed, free = curve_of(chains, 0.25), curve_of(chains, 0.25, smallest=400)
    assert not placed.sure
    assert free.sure
    assert not any(key in free._fixed for key in free.sure)
    assert free.hit_ratios(sizes) == pytest.approx(placed.hit_ratios(sizes), abs=0.005)


@given(
    chains=st.lists(
        st.sampled_from([[], [1], [1, 2, 3], [1, 2, 3, 4, 5], [7, 8], [1, 2, 8], [2, 1], [3, 2, 1]]), max_size=30
    ),
    largest=st.integers(1, 9),
)
def test_an_exact_curve_counts_whole_runs_as_it_would_count_keys(chains, largest):
    """Also of requests that come again, or their heads; what was used too long ago is forgotten alike."""
    runs, single = Curve(1.0, largest=largest), Curve(1.0, largest=largest)
    assert runs.exact
    for chain in chains:
        hashed = mix(np.array(chain, dtype=np.uint64), 0)
        for curve in (runs, single):
            curve.came(len(chain), hashed[:0])
        runs.follow_all(chain, hashed)
        single.follow(dict(zip(chain, hashed.tolist(), strict=True)), frozenset())
        assert (list(runs._plain), runs._hashes) == (list(single._plain), single._hashes)
    assert runs.hits(range(10)) == single.hits(range(10))


def test_a_curve_that_was_thinned_is_not_exact_again():
    """Also if only small caches are of interest then: it follows keys with low hashes, each for several."""
    curve = Curve(1.0, largest=100, most_tracked=100)
    assert not curve.exact
    curve.reach(0, 60)
    assert curve.exact
    curve.reach(0, 1000)
    for asked in requests(list(range(start, start + 10)) for start in range(0, 4000, 10)):
        curve.requests(*asked)
    assert curve.rate < 1
    curve.reach(0, 60)
    assert not curve.exact


HOT = st.frozensets(st.integers(0, 5))
PLAIN = st.lists(st.integers(10, 13), unique=True, max_size=2)


@given(pairs=st.lists(st.tuples(HOT, PLAIN), max_size=40), smallest=st.sampled_from([0, 10]))
def test_hits_are_told_by_what_was_used_since(pairs, smallest):
    """By the gaps between sampled keys and the hot ones in them; those that are never lost are hits all the time."""
    hot = HotSet()
    hot.shares = {key: 0.5 if key > 3 else 0.1 for key in range(6)}
    hot.keys = frozenset(hot.shares)
    curve, order = Curve(1 / 8, hot=hot, smallest=smallest), []
    hits, plain_hits = Counter(), Counter()
    curve.thin(1 / 8)
    sure = {4, 5} if smallest else set()
    assert curve.sure == sure
    for often, plain in pairs:
        curve.follow(dict.fromkeys(plain, 0), often)
        lost = often - sure
        used = [*plain[::-1], *lost]
        for key in set(used).intersection(order):
            since = order[order.index(key) + 1 :]
            distance = len(sure) + sum(1 if other in hot.keys else 8 for other in since)
            (hits if key in hot.keys else plain_hits)[distance] += 1
        hits[0] += len(often & sure)
        order = [key for key in order if key not in used] + used
    assert +Counter(curve._distances.hot) == +hits
    assert curve._distances.sampled == plain_hits


@given(chains=grown())
def test_recency_tells_who_was_used_since(chains):
    """Counts equal those of a list in order of last use; removed keys come back at their old place, the oldest go."""
    recency, order, now = Recency(), [], 1
    for chain in chains:
        lasts = recency.lasts(chain)
        assert recency.since(lasts) == [len(order) - at - 1 for at, key in enumerate(order) if key in chain]
        recency.use(chain, now, lasts)
        assert recency.ends(chain)
        now += len(chain)
        order = [key for key in order if key not in chain] + chain
        assert list(recency) == order
    for key in order:
        last = recency.remove(key)
        assert recency.since([last]) == [len(order) - order.index(key) - 1]
        recency.put(key, last)
    assert recency.since(recency.lasts(order)) == list(range(len(order)))[::-1]
    assert recency.forget(3) == order[:3]
    assert (list(recency), len(recency)) == (order[3:], len(order[3:]))
    assert not any(key in recency for key in order[:3])


def test_between_two_sampled_keys_hits_grow_evenly():
    """A hit behind three sampled keys at rate 0.1 stands for distances from 30 to 40."""
    distances = Distances()
    distances.sampled[3 * 8] += 2
    distances.settle(10.0, 0.1)
    assert distances.hits([30, 35, 40, 99]) == [0.0, 10.0, 20.0, 20.0]


@given(ids=st.lists(st.integers(0, 300), max_size=200), cuts=st.lists(st.integers(1, 20), max_size=10))
def test_known_keys_are_those_that_came_before(ids, cuts):
    """However they are split into requests."""
    hashed = mix(np.array(ids, dtype=np.uint64), 1)
    known, before, start = KnownKeys(), [], 0
    for cut in [*cuts, len(ids)]:
        before += known.before(hashed[start : start + cut]).tolist()
        start += cut
    assert before == [key in ids[:place] for place, key in enumerate(ids)]


def test_new_keys_are_not_taken_for_known_ones():
    """However many came before; known ones are forgotten by and by, low ones as likely as others."""
    known, parts = KnownKeys(), np.array_split(mix(np.arange(500_000, dtype=np.uint64), 0), 250)
    assert not any(known.before(part).any() for part in parts)
    again = np.concatenate([part[known.before(part)] for part in parts])
    assert 250_000 < again.size < 450_000
    weight = Weight(threshold(0.1))
    weight.came(again)
    assert weight.take(otherwise=0.0) == pytest.approx(10, rel=0.02)


def test_a_sampled_key_stands_for_those_that_came_before():
    """But for hot ones, since it was asked last; where none came, what else is said."""
    weight = Weight(100)
    weight.came(np.array([5, 99, 100, 2000, 7, 300], np.uint64))
    weight.came(np.array([1, 500], np.uint64))
    weight.leave_out(2, 1)
    assert weight.take(otherwise=9.0) == 6 / 3
    assert weight.take(otherwise=9.0) == 9.0
