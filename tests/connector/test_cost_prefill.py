"""What a prefill is believed to cost, after the steps that were seen."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.cost import TOKENS_ONLY, ModelShape, PrefillCost

LLAMA_70B = ModelShape(params=70.6e9, layers=80, width=8192, kv_bytes=327_680)
SECONDS_PER_FLOP = 1 / (989e12 * 8 * 0.5)


def truth(h, n, factor=1.0):
    return factor * (0.015 + SECONDS_PER_FLOP * LLAMA_70B.flops(h, n))


def learned(noise=0.05, steps=60):
    """An estimate after steps of all sizes, and its source of randomness."""
    rng, cost = random.Random(3), PrefillCost(LLAMA_70B)
    for _ in range(steps):
        n = rng.randint(64, 16_384)
        h = rng.randrange(n)
        cost.observe(h, n, truth(h, n) * rng.uniform(1 - noise, 1 + noise))
    return cost


def test_flops_are_the_references():
    """2 P (n-h) + 2 L d (n² - h²); a token of the 70B model costs 0.0357 ms on eight H100 at half their peak."""
    assert LLAMA_70B.flops(1000, 3000) == 2 * 70.6e9 * 2000 + 2 * 80 * 8192 * (3000**2 - 1000**2)
    assert SECONDS_PER_FLOP * LLAMA_70B.flops(0, 1) == pytest.approx(0.0357e-3, rel=0.01)


def test_it_is_unknown_until_three_steps_were_seen():
    """No prior and not enough data: None, rather than a guess."""
    cost = PrefillCost(LLAMA_70B)
    for step in range(3):
        assert cost.seconds(0, 1000) is None
        assert not cost.known
        cost.observe(0, 1000 + step, truth(0, 1000 + step))
    assert cost.seconds(0, 1000) == pytest.approx(truth(0, 1000), rel=0.01)


def test_a_prior_answers_at_once_and_gives_way_to_data():
    """A stated speed is used until three steps tell the true one."""
    cost = PrefillCost(LLAMA_70B, overhead_s=0.015, seconds_per_flop=SECONDS_PER_FLOP)
    assert cost.seconds(100, 1000) == pytest.approx(truth(100, 1000))
    for _ in range(2):
        cost.observe(0, 1000, 2 * truth(0, 1000))
    assert cost.seconds(100, 1000) == pytest.approx(truth(100, 1000))
    cost.observe(0, 1000, 2 * truth(0, 1000))
    assert cost.seconds(0, 1000) == pytest.approx(2 * truth(0, 1000), rel=0.01)


@pytest.mark.parametrize(("h", "n"), [(0, 512), (0, 8192), (4096, 8192), (0, 65_536)])
def test_overhead_and_speed_are_told_apart(h, n):
    """From noisy steps of all sizes, short and long prefills (also longer than any seen) are within a tenth."""
    assert learned().seconds(h, n) == pytest.approx(truth(h, n), rel=0.1)


def test_one_outlier_changes_nothing():
    """A step that hung for a minute is held back."""
    cost = learned()
    before = cost.seconds(0, 4096)
    cost.observe(0, 4096, 60.0)
    assert cost.seconds(0, 4096) == before
    cost.observe(0, 4096, truth(0, 4096))
    assert cost.seconds(0, 4096) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_two_outliers_in_a_row_are_a_change(factor):
    """An engine that became far slower or faster is followed from its second step on."""
    cost = learned()
    for n in (2000, 4000, 8000):
        cost.observe(0, n, truth(0, n, factor))
    assert cost.seconds(0, 8000) == pytest.approx(truth(0, 8000, factor), rel=0.15)


def test_alike_steps_still_give_a_line():
    """Steps of one size, as chunked prefill makes them, determine the cost at that size."""
    cost = PrefillCost(LLAMA_70B, overhead_s=0.01)
    for _ in range(20):
        cost.observe(0, 2048, truth(0, 2048))
    assert cost.seconds(0, 2048) == pytest.approx(truth(0, 2048), rel=0.01)
    assert cost.seconds(0, 4096) > 1.5 * cost.seconds(0, 2048)


def test_the_backlog_comes_on_top():
    """A request behind others waits for them first."""
    cost = learned()
    assert cost.seconds(0, 1000, backlog_s=0.5) == pytest.approx(cost.seconds(0, 1000) + 0.5)


def test_an_engine_without_a_shape_pays_by_the_token():
    """Seconds grow linearly with tokens, whatever their position."""
    cost = PrefillCost(TOKENS_ONLY)
    for n in (100, 200, 400, 800):
        cost.observe(0, n, 0.01 + 0.001 * n)
    assert cost.seconds(500, 1500) == pytest.approx(1.01, rel=0.02)


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 5000),
            st.integers(0, 20_000),
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 100),
        ),
        max_size=50,
    )
)
def test_no_step_makes_nonsense(steps):
    """Whatever is reported, the prediction is never negative and never falls with the prompt's length."""
    cost = PrefillCost(LLAMA_70B)
    for h, n, seconds in steps:
        cost.observe(h, n, seconds)
    if cost.known:
        assert 0 <= cost.seconds(0, 100) <= cost.seconds(0, 1000) < float("inf")
