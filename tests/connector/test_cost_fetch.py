"""What a fetch is believed to cost, after what was seen."""

from math import exp, log

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.cost import FetchCost, FetchEstimate
from tiertune_connector.cost.fetch import PLAUSIBLE_S

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


def known(*, bytes_per_s=1e9, **options):
    """A tier whose latency is known to be nothing."""
    return FetchCost(bytes_per_s=bytes_per_s, **options)


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_step_of_four_times_is_followed_by_the_next_probe(factor):
    """Probes every 30 s: one later the estimate is there, as far as noise lets it."""
    for noise in (0.0, 0.02, 0.1, 0.2):
        rng, cost = np.random.default_rng(3), known()
        now = 0.0
        for bandwidth in [1e9] * 40 + [factor * 1e9]:
            now += 30.0
            cost.observe(1, CHUNK, CHUNK / bandwidth * rng.lognormal(0.0, noise), now)
        assert cost.estimate(now).bytes_per_s == pytest.approx(factor * 1e9, rel=0.3), noise


@pytest.mark.parametrize(("every_s", "closer"), [(1.0, 4), (0.001, 6)])
def test_among_noise_the_long_memory_is_believed(every_s, closer):
    """Loads of one bandwidth that differ by chance: the estimate is four times closer than the newest load.

    Where they follow within milliseconds no bandwidth moves, and it is closer still.
    """
    rng, cost, errors = np.random.default_rng(4), known(), []
    for step in range(600):
        cost.observe(10, 10 * CHUNK, 10 * CHUNK / 1e9 * rng.lognormal(0.0, 0.4), every_s * step)
        errors.append(log(cost.estimate(every_s * step).bytes_per_s / 1e9))
    assert np.std(errors[100:]) < 0.4 / closer


def test_a_moving_bandwidth_is_predicted_as_well_as_it_can_be():
    """A random walk seen without noise: errors are those of the walk itself, and the doubt says so."""
    rng, cost, errors, doubts = np.random.default_rng(5), known(), [], []
    truth = 0.0
    for step in range(500):
        truth += 0.4 * rng.standard_normal()
        estimate = cost.estimate(30.0 * step)
        errors.append(log(estimate.bytes_per_s / 1e9) - truth)
        doubts.append(estimate.doubt)
        cost.observe(1, CHUNK, CHUNK / (1e9 * exp(truth)), 30.0 * (step + 1))
    assert np.sqrt(np.mean(np.square(errors[20:]))) < 1.1 * 0.4
    assert np.mean(doubts[20:]) == pytest.approx(0.4, rel=0.15)


def test_one_outlier_is_not_believed_whole():
    """A load a thousand times too slow moves the estimate tenfold at most, and two good ones bring it back."""
    cost = known()
    now = feed(cost, [10] * 30, t0_s=0.0)
    feed(cost, [10], t0_s=0.0, slower=1000.0, start=now)
    assert cost.estimate(now + 30.0).bytes_per_s > 0.99e8
    feed(cost, [10, 10], t0_s=0.0, start=now + 30.0)
    assert cost.estimate(now + 90.0).bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_doubt_is_small_where_predictions_come_true_and_grows_where_they_do_not():
    """A steady tier is hardly doubted after a while; after a surprise it is, either way."""
    cost = known()
    assert cost.estimate(0.0).doubt == pytest.approx(0.3)
    now = feed(cost, [10] * 60, t0_s=0.0)
    steady = cost.estimate(now).doubt
    assert steady < 0.05
    for slower in (4.0, 0.25):
        now = feed(cost, [10], t0_s=0.0, slower=slower, start=now)
        assert cost.estimate(now).doubt > steady + 0.2
        now = feed(cost, [10] * 60, t0_s=0.0, start=now)


def test_silence_makes_doubt():
    """Nothing is believed less for a minute without news; after an hour everything is, up to a bound."""
    cost = known()
    now = feed(cost, [10] * 5, t0_s=0.0)
    fresh, minute, hour, week = (cost.estimate(now + age).doubt for age in (0.0, 60.0, 3600.0, 600_000.0))
    assert fresh == minute < hour < week == 2.0


def test_loads_that_take_longer_than_predicted_make_doubt():
    """However well the bandwidth is known; where nothing is loaded any more, probes restore confidence."""
    cost = known()
    now = feed(cost, [10] * 60, t0_s=0.0)
    for _ in range(10):
        cost.judge(1.0, 2.0)
    doubtful = cost.estimate(now).doubt
    assert 0.4 < doubtful <= log(2.0)
    now = feed(cost, [1] * 60, t0_s=0.0, start=now)
    assert cost.estimate(now).doubt < 0.25 * doubtful


def test_a_load_given_up_teaches_only_that_it_was_slow():
    """That it was at most as fast as believed is no news."""
    exact = known(bytes_per_s=1.0)
    exact.observe(1, CHUNK, CHUNK, 1.0, at_least=True)
    assert exact.estimate(1.0).samples == 0
    cost = known()
    cost.observe(1, CHUNK, CHUNK / 5e9, 1.0, at_least=True)
    assert cost.estimate(1.0).samples == 0
    cost.observe(1, CHUNK, CHUNK / 2e8, 2.0, at_least=True)
    assert cost.estimate(2.0).bytes_per_s == pytest.approx(2e8)


@pytest.mark.parametrize(
    ("chunks", "nbytes", "seconds", "counts"),
    [
        (1, 1, PLAUSIBLE_S[0], True),
        (1, CHUNK, PLAUSIBLE_S[1], True),
        (0, CHUNK, 1.0, False),
        (1, 0, 1.0, False),
        (1, CHUNK, PLAUSIBLE_S[0] / 2, False),
        (1, CHUNK, PLAUSIBLE_S[1] * 2, False),
    ],
)
def test_what_cannot_be_is_not_learned(chunks, nbytes, seconds, counts):
    """Nothing that came, and times that no fetch takes; each that can be counts once."""
    cost = FetchCost(bytes_per_s=1e9)
    for turn in range(1, 3):
        cost.observe(chunks, nbytes, seconds, 30.0 * turn)
        assert cost.estimate(60.0).samples == counts * turn
        assert cost.age_s(60.0) == 60.0 - counts * 30.0 * turn


@pytest.mark.parametrize("chunks", [1, 40])
def test_a_steady_tier_costs_what_is_stated(chunks):
    """Where loads take what the nominal speed tells, the estimate stays there."""
    cost = FetchCost(t0_s=0.001, bytes_per_s=1e9)
    for step in range(50):
        cost.observe(chunks, chunks * CHUNK, 0.001 + chunks * CHUNK / 1e9, 30.0 * step)
        assert cost.estimate(0.0).bytes_per_s == pytest.approx(1e9)


def test_a_fetch_takes_its_wait_its_latency_its_handling_and_its_bytes():
    """Four chunks of together 8 kB behind 2 s: half a second, a quarter for each, and 8 s of a kB each."""
    assert FetchEstimate(0.5, 0.25, 1000.0, queue_s=2.0).seconds(4, 8000) == 2.0 + 0.5 + 4 * 0.25 + 8.0


def test_a_load_that_takes_less_than_the_latency_corrects_it():
    """It is at most nine tenths of what the quickest load took, bytes and all."""
    cost = FetchCost()
    cost.observe_latency(0.010)
    cost.observe(1, CHUNK, 0.004, 1.0)
    assert cost.estimate(1.0).t0_s == pytest.approx(0.0036)


def test_a_latency_that_is_told_is_not_learned():
    """No probe moves it."""
    cost = FetchCost(t0_s=0.001, bytes_per_s=1e9)
    cost.observe_latency(0.5)
    cost.observe_latency(1e-4)
    assert cost.estimate(0.0).t0_s == 0.001


@pytest.mark.parametrize(
    ("seconds", "counts"),
    [(PLAUSIBLE_S[0], True), (PLAUSIBLE_S[1], True), (PLAUSIBLE_S[0] / 2, False), (PLAUSIBLE_S[1] * 2, False)],
)
def test_what_cannot_be_is_neither_a_latency_nor_a_judgement(seconds, counts):
    """Times that no probe and no load takes; all others are."""
    cost = FetchCost(bytes_per_s=1e9)
    sure = cost.estimate(0.0).doubt
    cost.observe_latency(seconds)
    assert cost.estimate(0.0).t0_s == (seconds if counts else 0.0)
    cost.judge(seconds, 1.0)
    assert (cost.estimate(0.0).doubt > sure) == counts


def test_of_two_loads_that_end_together_the_second_is_the_newest():
    """No time is between them; where nothing was noise so far, its bandwidth is believed as it is."""
    cost = known()
    for bytes_per_s in (1e9, 1.2e9):
        cost.observe(1, CHUNK, CHUNK / bytes_per_s, 1.0)
        assert cost.estimate(1.0).bytes_per_s == pytest.approx(bytes_per_s)


def test_the_estimate_tells_its_age_and_its_queue():
    """Age counts from the newest observation; waiting transfers come before this one."""
    cost = FetchCost(bytes_per_s=CHUNK, now=5.0)
    assert cost.estimate(15.0).age_s == 10.0
    cost.observe(1, CHUNK, 1.0, 20.0)
    estimate = cost.estimate(50.0, queue_s=0.25)
    assert (estimate.age_s, estimate.seconds(2, 2 * CHUNK)) == (30.0, pytest.approx(2.25))
    assert estimate.transfers == 0


def test_an_estimate_survives_the_wire():
    """msgpack gives back the same estimate."""
    estimate = FetchEstimate(0.001, 0.0002, 1e9, 0.1, 3.0, 7, 0.4, 5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(estimate), type=FetchEstimate) == estimate


def test_an_older_store_tells_neither_doubt_nor_transfers():
    """Its estimates are understood, and taken as they are."""
    older = msgspec.msgpack.encode({"t0_s": 0.001, "per_chunk_s": 0.0, "bytes_per_s": 1e9, "queue_s": 0.5})
    assert msgspec.msgpack.decode(older, type=FetchEstimate) == FetchEstimate(0.001, 0.0, 1e9, 0.5)


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
        cost.observe(chunks, chunks * CHUNK, seconds, now, at_least=chunks == 1)
        cost.judge(now, seconds)
    estimate = cost.estimate(0.0)
    if estimate is not None:
        assert 0 <= estimate.doubt <= 2
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
