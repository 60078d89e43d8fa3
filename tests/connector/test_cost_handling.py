"""What a chunk's handling takes beside its bytes: one way, and chunks of several models' sizes on it."""

from math import log

import numpy as np
import pytest

from connector.ways import Way
from tiertune_connector.cost.fetch import REMEMBERED, SIZES, FetchCost, Handling

KIB, MIB = 1 << 10, 1 << 20
SMALL, LARGE = 64 * KIB, 16 * MIB
HANDLED_S, SPEED = 4e-4, 1.6e9
"""As measured of a local disk."""


def takes(chunks, nbytes, slower=1.0):
    return slower * chunks * (HANDLED_S + nbytes / SPEED)


def wrong(cost, chunks, nbytes, now, slower=1.0):
    """How many times too long a load is predicted to take, or too short."""
    error = log(cost.estimate(now).seconds(chunks, chunks * nbytes) / takes(chunks, nbytes, slower))
    return np.exp(abs(error))


def feed(cost, loads, now=0.0, *, slower=1.0, noise=None):
    """Loads of so many chunks of a size, one every second; the time afterwards."""
    for chunks, nbytes in loads:
        now += 1.0
        seconds = takes(chunks, nbytes, slower) * (noise() if noise else 1.0)
        cost.observe(chunks, chunks * nbytes, seconds, now)
    return now


def learned(**more):
    """What is believed after some loads of two models."""
    cost = FetchCost(**more)
    return cost, feed(cost, ([(64, SMALL)] * 5 + [(4, LARGE)] * 5) * 2)


@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_what_one_models_loads_teach_is_right_for_anothers(spread):
    """Chunks of 64 KiB beside those of 16 MiB, and noise: no prediction is half off once each was met twice."""
    rng, cost, now, worst = np.random.default_rng(1), FetchCost(), 0.0, 1.0
    for turn in range(6):
        for loads in ([(64, SMALL)] * 20, [(4, LARGE)] * 20):
            chunks, nbytes = loads[0]
            if turn > 1:
                worst = max(worst, wrong(cost, chunks, nbytes, now))
            now = feed(cost, loads, now, noise=lambda: rng.lognormal(0.0, spread))
    assert worst < 1.5


@pytest.mark.parametrize("slower", [8.0, 1 / 8])
@pytest.mark.parametrize("loads", [[(64, SMALL)] * 3, [(4, LARGE)] * 3])
def test_a_way_that_got_slower_did_so_for_chunks_of_every_size(slower, loads):
    """One model's loads tell it, and the other's are predicted by it: nothing is made of handling."""
    cost, now = learned()
    now = feed(cost, loads, now, slower=slower)
    for chunks, nbytes in ((64, SMALL), (4, LARGE)):
        assert wrong(cost, chunks, nbytes, now, slower) < 1.4


def test_of_chunks_of_one_size_there_is_nothing_to_tell_apart():
    """However many at once, and however the way changes: their bandwidth is all, as it has always been."""
    cost, now = FetchCost(), 0.0
    for chunks in (1, 40, 2, 60):
        now = feed(cost, [(chunks, LARGE)], now, slower=chunks)
    assert cost.estimate(now).per_chunk_s == 0.0


def test_a_way_that_changes_between_two_models_loads_is_not_taken_for_handling():
    """One pair of samples is none: the others' chunks are believed to be slower as well."""
    cost = FetchCost(bytes_per_s=1e9)
    for now, nbytes, bytes_per_s in ((1.0, LARGE, 1e9), (2.0, SMALL, 1e8)):
        cost.observe(1, nbytes, nbytes / bytes_per_s, now)
    estimate = cost.estimate(2.0)
    assert (estimate.per_chunk_s, estimate.bytes_per_s) == (0.0, pytest.approx(1e8, rel=0.01))


def test_a_nervous_way_without_handling_is_hardly_taken_for_one_with():
    """Its bandwidth wanders by 0.4 from sample to sample; large chunks stay as fast by the byte as small ones."""
    rng, cost, level, told = np.random.default_rng(2), FetchCost(), 0.0, []
    for step in range(600):
        level = 0.9 * level + 0.4 * rng.standard_normal()
        nbytes = (256 * KIB, 2 * MIB)[step % 3 > 0]
        cost.observe(1, nbytes, nbytes / (1e9 * np.exp(level)), 30.0 * step)
        if step > 100:
            estimate = cost.estimate(30.0 * step)
            told.append(log(estimate.speed(2 * MIB) / estimate.speed(256 * KIB)))
    assert np.median(told) < 0.1
    assert np.quantile(told, 0.9) < 0.5


def test_a_load_of_two_models_chunks_is_predicted():
    """And what it takes teaches nothing wrong of either."""
    cost, now = learned()
    both_s = takes(64, SMALL) + takes(4, LARGE)
    assert cost.estimate(now).seconds(68, 64 * SMALL + 4 * LARGE) == pytest.approx(both_s, rel=0.3)
    for _ in range(20):
        now += 1.0
        cost.observe(68, 64 * SMALL + 4 * LARGE, both_s, now)
    assert max(wrong(cost, 64, SMALL, now), wrong(cost, 4, LARGE, now)) < 1.4


def test_what_was_given_up_teaches_no_handling():
    """It may be of chunks that were half done, of any size; that the way is slow is for all."""
    cost, now = learned()
    before = cost.estimate(now)
    for _ in range(4):
        cost.observe(8, 8 * LARGE, takes(8, LARGE, 8.0), now, at_least=True)
        cost.observe(8, 8 * SMALL, takes(8, SMALL, 8.0), now, at_least=True)
    after = cost.estimate(now)
    assert after.bytes_per_s * after.per_chunk_s == pytest.approx(before.bytes_per_s * before.per_chunk_s)
    assert max(wrong(cost, 64, SMALL, now, 8.0), wrong(cost, 4, LARGE, now, 8.0)) < 1.5


def test_handling_that_is_known_is_not_learned():
    """A replay's link has it in its scenario, and DRAM has none."""
    cost = FetchCost(t0_s=0.0, bytes_per_s=SPEED)
    feed(cost, [(64, SMALL), (4, LARGE)] * 20)
    assert cost.estimate(0.0).per_chunk_s == 0.0


def test_handling_is_followed_where_it_changes():
    """After a while of pairs without it none is left."""
    handling = Handling()
    for turn in range(200):
        nbytes, handled_s = ((SMALL, LARGE)[turn % 2], HANDLED_S * (turn < 40))
        handling.learn(nbytes, handled_s + nbytes / SPEED)
        if turn == 39:
            assert handling.nbytes == pytest.approx(HANDLED_S * SPEED, rel=0.5)
    assert handling.nbytes == 0.0
    assert 0.0 in SIZES
    assert 0 < REMEMBERED < 1


def test_silence_is_of_chunks_of_a_size():
    """Those of a size that nobody fetched are silent for ever, whatever else is fetched."""
    cost = FetchCost()
    assert cost.silent_s(5.0, LARGE) == float("inf")
    now = feed(cost, [(64, SMALL)])
    assert cost.silent_s(now + 5.0, SMALL + 1000) == 5.0
    assert cost.silent_s(now + 5.0, LARGE) == float("inf")


def test_an_estimate_tells_the_speed_of_chunks_of_a_size():
    """Small ones come at less than the way's bandwidth; metrics tell that of the mean chunk of late."""
    cost, now = learned()
    estimate = cost.estimate(now)
    assert estimate.speed(LARGE) == pytest.approx(LARGE / takes(1, LARGE), rel=0.2)
    assert estimate.speed(SMALL) == pytest.approx(SMALL / takes(1, SMALL), rel=0.4)
    assert estimate.speed(0) == estimate.bytes_per_s
    assert FetchCost().chunk_bytes == 0
    feed(cost, [(4, LARGE)] * 200, now)
    assert cost.chunk_bytes == pytest.approx(LARGE, rel=0.01)


def test_who_gives_up_behind_another_models_large_chunks_tells_how_slow_these_are():
    """Eight of them were half done at most; taken for eight of its own, the way would seem 256 times slower."""
    way = Way(bytes_per_s=100.0 * MIB)
    for nbytes in [LARGE] * 8 + [SMALL] * 20:
        way.at(0.0).asked(nbytes)
    before = way.at(1.0).estimate()
    way.at(1.0).given_up(None, 1.0)
    assert way.at(1.0).estimate() == before, "128 MiB a second at most are no news"
    way.at(4.0).given_up(None, 4.0)
    assert way.at(4.0).estimate().bytes_per_s == pytest.approx(8 * LARGE / 4.0)
