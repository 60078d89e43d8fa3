"""What a fetch is believed to cost, after what was seen."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.cost import FetchCost, FetchEstimate

MIB = 2**20
CHUNK = 3 * MIB


def feed(cost, loads, *, t0_s=0.002, bytes_per_s=1e9, slower=1.0, start=0.0, every=30.0):
    """Observe loads of so many chunks on a tier with that speed; the time afterwards."""
    now = start
    for chunks in loads:
        now += every
        cost.observe(chunks, chunks * CHUNK, slower * (t0_s + chunks * CHUNK / bytes_per_s), now)
    return now


def predicted(cost, chunks, now=0.0):
    return cost.estimate(now).seconds(chunks, chunks * CHUNK)


def test_the_cost_is_unknown_until_something_was_seen():
    """No observation and no nominal bandwidth: no estimate, rather than a guess."""
    cost = FetchCost()
    assert cost.estimate(0.0) is None
    feed(cost, [1])
    assert cost.estimate(30.0).samples == 1


def test_latency_and_bandwidth_are_told_apart():
    """From probes without bytes, and loads of one and of many chunks, both are within a tenth of the truth."""
    cost = FetchCost()
    for chunks in [1, 40, 2, 60, 1, 20] * 5:
        cost.observe_latency(0.004)
        feed(cost, [chunks], t0_s=0.004)
    estimate = cost.estimate(30.0)
    assert estimate.t0_s == pytest.approx(0.004, rel=0.1)
    assert estimate.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_less_latency_is_believed_at_once_and_more_by_and_by():
    """A probe may have waited for a busy link, but none is faster than the way there and back."""
    cost = FetchCost(bytes_per_s=1e9)
    for seconds, expected in [(0.010, 0.010), (0.020, 0.012), (0.002, 0.002)]:
        cost.observe_latency(seconds)
        assert cost.estimate(0.0).t0_s == pytest.approx(expected)


@pytest.mark.parametrize("chunks", [1, 50])
def test_a_slowdown_is_followed_within_three_probes(chunks):
    """After three probes of one chunk a tier that is 20 times slower is predicted at least 10 times slower."""
    cost = FetchCost()
    now = feed(cost, [1, 50, 4, 1, 30] * 4, every=1.0)
    before = predicted(cost, chunks)
    feed(cost, [1, 1, 1], slower=20.0, start=now)
    assert predicted(cost, chunks) > 10 * before


def test_a_recovery_is_followed_within_six_probes():
    """The estimate comes back to twice the truth by probes of one chunk alone, so that fetching can begin again."""
    cost = FetchCost()
    now = feed(cost, [1, 50, 4, 1, 30] * 4, every=1.0)
    before = predicted(cost, 50)
    now = feed(cost, [1] * 5, slower=20.0, start=now)
    feed(cost, [1] * 6, start=now)
    assert predicted(cost, 50) < 2 * before


def test_worse_news_weighs_more_than_good_news():
    """In doubt a fetch is dear: one slow load moves the estimate further than one equally fast load."""
    slower, faster = FetchCost(t0_s=0.0), FetchCost(t0_s=0.0)
    feed(slower, [10], t0_s=0.0)
    feed(faster, [10], t0_s=0.0)
    feed(slower, [10], t0_s=0.0, bytes_per_s=5e8)
    feed(faster, [10], t0_s=0.0, bytes_per_s=2e9)
    assert 1e9 - slower.estimate(0.0).bytes_per_s == pytest.approx(0.8 * 5e8)
    assert faster.estimate(0.0).bytes_per_s - 1e9 == pytest.approx(0.5 * 1e9)


def test_after_a_long_silence_a_new_sample_weighs_more():
    """What was believed long ago counts for less."""
    fresh, stale = (FetchCost(t0_s=0.0, bytes_per_s=1e9, stale_s=60.0) for _ in range(2))
    fresh.observe(1, CHUNK, CHUNK / 2e9, 60.0)
    stale.observe(1, CHUNK, CHUNK / 2e9, 600.0)
    assert fresh.estimate(60.0).bytes_per_s == pytest.approx(1.5e9)
    assert stale.estimate(600.0).bytes_per_s > 1.99e9


def test_a_known_latency_gives_the_plain_average_of_bandwidths():
    """With fixed latencies the estimate is the reference's: half the old bandwidth, half the new."""
    cost = FetchCost(alpha=0.5, slower_alpha=0.5, t0_s=0.001, per_chunk_s=0.0002, bytes_per_s=1e9)
    expected = 1e9
    for step, bandwidth in enumerate([3e9, 2e8, 1e9, 5e8]):
        cost.observe(1, CHUNK, 0.001 + 0.0002 + CHUNK / bandwidth, 30.0 * (step + 1))
        expected = 0.5 * expected + 0.5 * bandwidth
        assert cost.estimate(0.0).bytes_per_s == pytest.approx(expected)


def test_the_estimate_tells_its_age_and_its_queue():
    """Age counts from the newest observation; waiting transfers come before this one."""
    cost = FetchCost(t0_s=0.0, bytes_per_s=CHUNK, now=5.0)
    assert cost.estimate(15.0).age_s == 10.0
    cost.observe(1, CHUNK, 1.0, 20.0)
    estimate = cost.estimate(50.0, queue_s=0.25)
    assert (estimate.age_s, estimate.seconds(2, 2 * CHUNK)) == (30.0, 2.25)


def test_an_estimate_survives_the_wire():
    """msgpack gives back the same estimate."""
    estimate = FetchEstimate(0.001, 0.0002, 1e9, 0.1, 3.0, 7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(estimate), type=FetchEstimate) == estimate


@given(
    loads=st.lists(
        st.tuples(
            st.integers(-1, 100), st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 100), st.floats(0, 1e6)
        ),
        max_size=40,
    )
)
def test_no_observation_makes_nonsense(loads):
    """Whatever is reported, the prediction stays positive and finite, and grows with the load."""
    cost = FetchCost()
    for chunks, seconds, now in loads:
        cost.observe(chunks, chunks * CHUNK, seconds, now)
    estimate = cost.estimate(0.0)
    if estimate is not None:
        one, ten = estimate.seconds(1, CHUNK), estimate.seconds(10, 10 * CHUNK)
        assert 0 < one < ten < float("inf")
        assert estimate.seconds(0, 0) == 0


def test_a_busy_slow_link_is_not_taken_for_latency():
    """Loads of any size that end at one deadline, and probes that wait for them, still cost by the byte.

    Taken for latency, the wait would make large loads look as cheap as small ones.
    """
    cost = FetchCost()
    cost.observe_latency(0.0002)
    now = feed(cost, [1, 40, 2, 60] * 3, t0_s=0.0, every=1.0)
    for chunks in (1, 4, 1, 5, 1, 8):
        now += 1.0
        cost.observe(chunks, chunks * CHUNK, 0.1, now)
        cost.observe_latency(0.0002)
    now = feed(cost, [1] * 4, t0_s=0.0, slower=20.0, start=now, every=1.0)
    assert predicted(cost, 60, now) == pytest.approx(60 * predicted(cost, 1, now), rel=0.25)
