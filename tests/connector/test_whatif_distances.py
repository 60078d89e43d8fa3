"""Hits by distance: what caches of every size would have hit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.whatif.curve import STEPS, Distances

pytestmark = pytest.mark.slow

HITS = st.dictionaries(st.integers(0, 500), st.integers(1, 9), max_size=20)
EPOCHS = st.lists(st.tuples(HITS, HITS, st.floats(0.1, 50), st.sampled_from([1.0, 0.5, 0.125])), max_size=4)
SIZES = st.lists(st.floats(0, 2000) | st.integers(0, 2000).map(float), min_size=1, max_size=8)


@given(EPOCHS, SIZES)
def test_a_hit_counts_by_the_part_of_its_gap_that_the_cache_covers(epochs, sizes):
    """A hit at ``steps`` of a gap of 1 / rate counts in part where the size lies within the gap that begins there."""
    rate, distances, expected = 1.0, Distances(), np.zeros(len(sizes))
    for sampled, hot, scale, then in epochs:
        for hits, weight, told in ((sampled, scale, distances.sampled), (hot, 1.0, distances.hot)):
            for steps, count in hits.items():
                told[steps] += count
                share = (np.array(sizes) - steps / STEPS / rate) * rate
                expected += weight * count * np.clip(share, 0.0, 1.0)
        distances.settle(scale, rate)
        rate = then
    np.testing.assert_allclose(distances.hits(sizes), expected, rtol=1e-9, atol=1e-9)


def test_what_is_kept_is_bounded_by_the_longest_distance():
    """A thousand settlements of the same distances are kept in the room of one."""
    distances = Distances()
    for _ in range(1000):
        distances.sampled[40] += 1
        distances.settle(2.0, 0.5)
    assert distances.hits([1e6]) == [2000.0]
    assert [len(counts) for counts in distances._settled.values()] == [41]


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=20), SIZES)
def test_a_run_is_a_hit_at_each_of_its_distances(runs, sizes):
    """Told as a whole, it counts exactly as key by key."""
    whole, single = Distances(), Distances()
    for nearest, count in runs:
        whole.run(nearest, count)
        for distance in range(nearest, nearest + STEPS * count, STEPS):
            single.sampled[distance] += 1
    whole.unroll()
    assert whole.sampled == single.sampled
    for distances in (whole, single):
        distances.settle(3.0, 0.5)
    assert whole.hits(sizes) == single.hits(sizes)
