"""What nodes believe of the link in a replay: taught by probes, and by the loads that they made themselves."""

import numpy as np
import pytest

from tiertune_agent.replay.link import Beliefs, Link
from tiertune_agent.replay.scenario import Event, Fluctuation, LinkSpec

CHUNK = 1 << 20
NOMINAL = 10 * 1e9 / 8 * 0.9
MOVING = LinkSpec(gbps=10, fluctuation=Fluctuation(kind="ar1", sigma=0.9, phi=0.9))


def link(spec=None, *events, seed=1):
    return Link(spec or LinkSpec(gbps=10), events, 3600.0, np.random.default_rng(seed))


def event(**values):
    return Event.model_validate({"at_s": 100, "for_s": 200, **values})


def believed(beliefs, at_s):
    return beliefs.estimate(at_s).bytes_per_s


def test_a_steady_link_is_believed_as_it_is():
    """From the first request on; doubt goes by and by."""
    beliefs = Beliefs(link(), CHUNK)
    for at_s in (0.0, 31.0, 3000.0):
        assert believed(beliefs, at_s) == pytest.approx(NOMINAL)
    assert beliefs.estimate(3000.0).doubt < 0.05 < Beliefs(link(), CHUNK).estimate(0.0).doubt


@pytest.mark.parametrize("factor", [1, 0.1, 10])
def test_a_bandwidth_is_learned_however_long_the_latency(factor):
    """A chunk of 16 KiB takes 15 us of a probe's 0.5 s: the scenario tells the rest."""
    far = link(LinkSpec(gbps=10, latency_s=0.4, per_chunk_s=0.1), event(at_s=0, for_s=3600, link_factor=factor))
    beliefs = Beliefs(far, 1 << 14)
    assert believed(beliefs, 300.0) == pytest.approx(factor * NOMINAL)
    estimate = beliefs.estimate(300.0)
    assert (estimate.t0_s, estimate.per_chunk_s) == (0.4, 0.1)


def test_a_probe_counts_from_the_next_span_on():
    """A step of four times at 100 s is probed at 120 s and believed at 150 s."""
    beliefs = Beliefs(link(None, event(link_factor=0.25)), CHUNK)
    assert believed(beliefs, 149.9) == pytest.approx(NOMINAL)
    assert believed(beliefs, 150.0) == pytest.approx(NOMINAL / 4)


@pytest.mark.parametrize("probe_s", [0.1, 0.3, 0.7])
def test_spans_that_binary_numbers_cannot_tell_lose_no_probe(probe_s):
    """Five spans of 0.1 s have passed at 0.5 s, though 0.5 // 0.1 is 4."""
    beliefs = Beliefs(link(LinkSpec(gbps=25, probe_s=probe_s)), CHUNK)
    assert [beliefs.estimate(span * probe_s).samples for span in range(100)] == [*range(100)]


def test_a_load_teaches_the_node_that_made_it_once_a_piece_is_there():
    """A load of 1,600 chunks in 10 s tells of it after a quarter of a second; other nodes learn nothing of it."""
    way = link()
    beliefs, others = Beliefs(way, CHUNK), Beliefs(way, CHUNK)
    beliefs.observed(3.0, 1600, 10.0)
    assert believed(beliefs, 3.2) == pytest.approx(NOMINAL)
    assert believed(beliefs, 3.25) == pytest.approx(1600 * CHUNK / (10.0 - 0.001 - 1600 * 0.0002))
    assert believed(others, 3.25) == pytest.approx(NOMINAL)


def test_loads_and_probes_are_learned_in_the_order_of_their_end():
    """A load that ended before the span did counts before its probe, whenever the node asks."""
    beliefs = Beliefs(link(), CHUNK)
    beliefs.observed(1.0, 1, 5.0)
    assert believed(beliefs, 40.0) == pytest.approx(NOMINAL)


def test_a_step_of_four_times_is_followed_within_a_span_by_loads():
    """A node that loads knows at once, long before its next probe."""
    slow = link(None, event(link_factor=0.25))
    beliefs = Beliefs(slow, CHUNK)
    for at_s in range(130):
        seconds = slow.truth(at_s).seconds(4, 4 * CHUNK)
        beliefs.observed(at_s, 4, seconds)
        if at_s == 102:
            assert believed(beliefs, at_s) == pytest.approx(NOMINAL / 4, rel=0.05)


def test_a_factor_of_one_changes_nothing():
    """It is a legal one: a sweep over factors ends there."""
    same = link(None, event(link_factor=1))
    assert same.truth(150.0) == same.truth(50.0)


def test_a_link_that_is_down_teaches_nothing():
    """It is down while the event lasts; the estimate ages, and doubt grows with it."""
    broken = link(None, event(link="down"))
    assert [broken.down(at_s) for at_s in (99.9, 100.0, 299.9, 300.0)] == [False, True, True, False]
    beliefs = Beliefs(broken, CHUNK)
    before, during = beliefs.estimate(99.0), beliefs.estimate(299.0)
    assert (before.samples, during.samples) == (3, 4)
    assert during.age_s > 150
    assert during.doubt > beliefs.estimate(150.0).doubt
    assert beliefs.estimate(360.0).samples == 6


def test_beliefs_under_fluctuation_are_near_the_best_that_probes_allow():
    """The mean square error of the logarithm is within a tenth of the newest probe's: nothing can tell more."""
    errors, newest = [], []
    for seed in range(5):
        moving = link(MOVING, seed=seed)
        beliefs = Beliefs(moving, CHUNK)
        for at_s in range(600, 3600, 30):
            truth = moving.truth(at_s).bytes_per_s
            errors.append(np.log(believed(beliefs, at_s) / truth) ** 2)
            newest.append(np.log(moving.truth(at_s - 30).bytes_per_s / truth) ** 2)
    assert np.mean(errors) <= 1.1 * np.mean(newest)


def test_the_queue_is_passed_on():
    """Transfers that wait on the link come before this one."""
    assert Beliefs(link(), CHUNK).estimate(5.0, queue_s=2.5).queue_s == 2.5
