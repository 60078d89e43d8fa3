"""What a prefill is believed to cost, after the steps that were seen."""

import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tiertune_connector.cost import TOKENS_ONLY, ModelShape, PrefillCost
from tiertune_connector.cost.fetch import PLAUSIBLE_S
from tiertune_connector.cost.prefill import DECAY, REACH

LLAMA_70B = ModelShape(params=70.6e9, layers=80, width=8192)

SECONDS_PER_FLOP = 1 / (989e12 * 8 * 0.5)


def truth(h, n, factor=1.0):
    return factor * (0.015 + SECONDS_PER_FLOP * LLAMA_70B.flops(h, n))


def learned(noise=0.05, steps=60):
    """An estimate after steps of all sizes, and its source of randomness."""
    rng, cost = random.Random(3), PrefillCost(LLAMA_70B)
    for _ in range(steps):
        n = rng.randint(64, 16_384)
        h = rng.randrange(n)
        cost.observe_step([(h, n)], truth(h, n) * rng.uniform(1 - noise, 1 + noise))
    return cost


def test_flops_are_the_references():
    """2 P (n-h) + 2 L d (n² - h²); a token of the 70B model costs 0.0357 ms on eight H100 at half their peak."""
    assert LLAMA_70B.flops(1000, 3000) == 2 * 70.6e9 * 2000 + 2 * 80 * 8192 * (3000**2 - 1000**2)
    assert SECONDS_PER_FLOP * LLAMA_70B.flops(0, 1) == pytest.approx(0.0357e-3, rel=0.01)


def test_a_step_has_the_flops_of_its_requests():
    """Their sum, and nothing else."""
    several, one = (PrefillCost(ModelShape(params=0, layers=1, width=1)) for _ in range(2))
    for seconds in (1.0, 1.1, 1.2):
        several.observe_step([(0, 3), (1, 2)], seconds)
        one.observe_step([(2, 4)], seconds)
    assert several.line == one.line is not None


def test_it_is_unknown_until_three_steps_were_seen():
    """No prior and not enough data: None, rather than a guess."""
    cost = PrefillCost(LLAMA_70B)
    for step in range(3):
        assert cost.seconds(0, 1000) is None
        assert cost.line is None
        cost.observe_step([(0, 1000 + step)], truth(0, 1000 + step))
    assert cost.seconds(0, 1000) == pytest.approx(truth(0, 1000), rel=0.01)


def test_a_prior_answers_at_once_and_gives_way_to_data():
    """A stated speed is used until three steps tell the true one."""
    cost = PrefillCost(LLAMA_70B, overhead_s=0.015, seconds_per_flop=SECONDS_PER_FLOP)
    assert cost.seconds(100, 1000) == pytest.approx(truth(100, 1000))
    for _ in range(2):
        cost.observe_step([(0, 1000)], 2 * truth(0, 1000))
    assert cost.seconds(100, 1000) == pytest.approx(truth(100, 1000))
    cost.observe_step([(0, 1000)], 2 * truth(0, 1000))
    assert cost.seconds(0, 1000) == pytest.approx(2 * truth(0, 1000), rel=0.01)


@pytest.mark.parametrize(("h", "n"), [(0, 512), (0, 8192), (4096, 8192), (0, 65_536)])
def test_overhead_and_speed_are_told_apart(h, n):
    """From noisy steps of all sizes, short and long prefills (also longer than any seen) are within a tenth."""
    assert learned().seconds(h, n) == pytest.approx(truth(h, n), rel=0.1)


def by_token(*seconds_by_tokens, **settings):
    """An engine without a shape, after steps of so many tokens that took so long."""
    cost = PrefillCost(TOKENS_ONLY, **settings)
    for tokens, seconds in seconds_by_tokens:
        cost.observe_step([(0, tokens)], seconds)
    return cost


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_size_that_was_seen_once_has_outliers(scale):
    """However long its steps take: the second one of that size is held back if it took ten times as long."""
    cost = by_token((10, scale), (11, 1.1 * scale), (12, 1.2 * scale), (1000, 100 * scale))
    before = cost.seconds(0, 1000)
    cost.observe_step([(0, 1000)], 1000 * scale)
    assert (cost.seconds(0, 1000), cost.samples) == (before, 4)


def test_a_slow_and_a_quick_outlier_are_no_change():
    """Each is held back until one comes that is like itself: a step that hung, others that do not agree with it."""
    cost = learned()
    before = cost.seconds(0, 4096)
    for factor in (10.0, 0.1, 10.0, 0.1, 1000.0):
        cost.observe_step([(0, 4096)], truth(0, 4096, factor))
        assert cost.seconds(0, 4096) == before
    cost.observe_step([(0, 4096)], truth(0, 4096))
    assert cost.seconds(0, 4096) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_an_engine_that_became_another_is_so_much_slower_at_every_size(factor):
    """Two steps of one size tell it of all: what was learned of the others is taken as so much slower or faster."""
    cost = by_token(*((n, 0.1 + 0.001 * n) for n in (10, 100, 1000, 10_000) * 3))
    for _ in range(2):
        cost.observe_step([(0, 1000)], factor * 1.1)
    for n in (10, 10_000):
        assert cost.seconds(0, n) == pytest.approx(factor * (0.1 + 0.001 * n), rel=0.01)


def test_an_engine_that_became_another_is_believed_by_its_new_steps():
    """Five times slower by the token, and as quick as ever to begin: two steps outweigh all that was before."""
    cost = by_token(*((n, 0.1 + 0.001 * n) for n in (100, 1000) * 6))
    for n in (1000, 100):
        cost.observe_step([(0, n)], 0.1 + 0.005 * n)
    for n in (100, 1000):
        assert cost.seconds(0, n) == pytest.approx(0.1 + 0.005 * n, rel=0.05)


def test_a_step_that_was_slow_by_accident_hardly_counts():
    """One that took 2.5 times its seconds weighs less than a sixth of a usual one."""
    cost = by_token(*[(1000, 1.0)] * 300)
    cost.observe_step([(0, 1000)], 2.5)
    usual = DECAY / (1 - DECAY)
    assert cost.seconds(0, 1000) == pytest.approx((usual + 1 / 2.5) / (usual + 1 / 2.5**2), rel=1e-3)


def test_steps_that_take_the_same_time_whatever_they_compute_are_all_overhead():
    """A small model: a token costs nothing then, never less; and the next such step is no surprise."""
    cost = by_token((100, 0.012), (200, 0.011), (400, 0.010))
    overhead_s, per_token_s = cost.line
    assert (0.010 < overhead_s < 0.012, per_token_s) == (True, 0.0)
    for _ in range(2):
        cost.observe_step([(0, 400)], 0.011)
    assert cost.samples == 5


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_two_outliers_in_a_row_are_a_change(factor):
    """An engine that became far slower or faster is followed from its second step on."""
    cost = learned()
    for n in (2000, 4000, 8000):
        cost.observe_step([(0, n)], truth(0, n, factor))
    assert cost.seconds(0, 8000) == pytest.approx(truth(0, 8000, factor), rel=0.15)


def test_alike_steps_still_give_a_line():
    """Steps of one size, as chunked prefill makes them, determine the cost at that size."""
    cost = PrefillCost(LLAMA_70B, overhead_s=0.01)
    for _ in range(20):
        cost.observe_step([(0, 2048)], truth(0, 2048))
    assert cost.seconds(0, 2048) == pytest.approx(truth(0, 2048), rel=0.01)
    assert cost.seconds(0, 4096) > 1.5 * cost.seconds(0, 2048)
    assert cost.line == (pytest.approx(0.01), pytest.approx((truth(0, 2048) - 0.01) / LLAMA_70B.flops(0, 2048)))


def spans_of(steps):
    """Steps of one or more spans: (h, tokens) of each request."""
    return [[(h, h + tokens) for h, tokens in step] for step in steps]


prefills = st.lists(st.tuples(st.integers(0, 30_000), st.integers(16, 8192)), min_size=1, max_size=4)


@given(steps=st.lists(prefills, min_size=3, max_size=40).map(spans_of), factor=st.floats(0.1, 100))
def test_steps_without_noise_are_learned(steps, factor):
    """Steps that several requests share are a sum of FLOPs; what was seen is predicted within 1 %."""
    seconds = [step_truth(spans) for spans in steps]
    assume(max(seconds) > 2 * min(seconds))
    cost = PrefillCost(LLAMA_70B)
    for spans in steps:
        cost.observe_step(spans, step_truth(spans, factor))
    for spans in steps:
        flops = sum(LLAMA_70B.flops(h, n) for h, n in spans)
        assert cost.work_s(flops, 1) == pytest.approx(step_truth(spans, factor), rel=0.01)


def step_truth(spans, factor=1.0):
    return factor * (0.015 + SECONDS_PER_FLOP * sum(LLAMA_70B.flops(h, n) for h, n in spans))


@given(
    sizes=st.lists(st.integers(64, 8192), min_size=3, max_size=8), where=st.integers(0, 15), factor=st.floats(0.01, 100)
)
def test_an_outlier_leaves_the_order_of_magnitude(sizes, where, factor):
    """One step up to a hundred times too slow or too fast, of a size seen before, shifts no prediction by half."""
    cost, steps = PrefillCost(LLAMA_70B), 4 * sizes
    outlier = 2 * len(sizes) + where % (2 * len(sizes))
    for number, n in enumerate(steps):
        cost.observe_step([(0, n)], truth(0, n, factor if number == outlier else 1.0))
    for n in sizes:
        assert truth(0, n) / 1.5 < cost.seconds(0, n) < 1.5 * truth(0, n)


@pytest.mark.parametrize("slow", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_warming_up_is_forgotten(slow, seed):
    """After up to three steps that took ten times too long and ten usual ones, predictions are within 15 %."""
    rng, cost = random.Random(seed), PrefillCost(LLAMA_70B)
    sizes = [rng.randint(256, 8192) for _ in range(slow + 10)]
    for number, n in enumerate(sizes):
        cost.observe_step([(0, n)], truth(0, n, 10 if number < slow else 1) * rng.uniform(0.95, 1.05))
    for n in sizes[slow:]:
        assert cost.seconds(0, n) == pytest.approx(truth(0, n), rel=0.15)


def test_decoding_teaches_nothing():
    """Steps of decodes alone, or of more decodes than prefilled tokens, are bound by memory: they are left out."""
    cost = PrefillCost(LLAMA_70B, decode_tokens=3)
    decodes = [(900 + row, 903 + row) for row in range(64)]
    for _ in range(5):
        cost.observe_step(decodes, 0.02)
        cost.observe_step([*decodes, (0, 191)], 0.02)
    assert cost.samples == 0
    cost.observe_step([*decodes, (0, 192)], 0.02)
    assert cost.samples == 1


def test_prefills_are_counted_together_against_decodes():
    """Two that are shorter than all decodes of their step, and longer than these in sum, teach; so does a lone pair."""
    cost = PrefillCost(LLAMA_70B)
    cost.observe_step([(0, 40), *((900, 901) for _ in range(64)), (0, 40)], 0.02)
    assert cost.samples == 1
    cost.observe_step([(0, 2)], 0.02)
    assert cost.samples == 2
    cost.observe_step([(0, 1)], 0.02)
    assert cost.samples == 2


@pytest.mark.parametrize(
    ("seconds", "counts"),
    [(PLAUSIBLE_S[0], True), (PLAUSIBLE_S[1], True), (PLAUSIBLE_S[0] / 2, False), (PLAUSIBLE_S[1] * 2, False)],
)
def test_times_that_no_step_takes_teach_nothing(seconds, counts):
    """Nor does a step of a model that computes nothing."""
    assert by_token((100, seconds)).samples == counts
    nothing = PrefillCost(ModelShape(params=0, layers=0, width=0))
    nothing.observe_step([(0, 100)], seconds)
    assert nothing.samples == 0


def test_decodes_beside_a_prefill_count_with_their_flops():
    """A prefill is not held to be dearer for the decodes that shared its steps."""
    cost = PrefillCost(LLAMA_70B)
    for n in (500, 1000, 2000, 4000):
        spans = [(0, n), *((8000, 8001) for _ in range(64))]
        cost.observe_step(spans, step_truth(spans))
    assert cost.seconds(0, 2000) == pytest.approx(truth(0, 2000), rel=0.01)


def test_a_hundred_times_the_largest_step_is_not_believed():
    """After a few slow small steps a long prefill costs at most what eight of the largest one would."""
    cost = PrefillCost(LLAMA_70B)
    for n in (20, 40, 60):
        cost.observe_step([(0, n)], truth(0, n, 10))
    assert cost.seconds(0, 6000) == cost.seconds(0, 60_000)
    assert cost.seconds(0, 6000) <= 8 * cost.seconds(0, 60)
    assert cost.seconds(0, 240) < cost.seconds(0, 400)
    cost.observe_step([(0, 6000)], truth(0, 6000))
    assert cost.seconds(0, 6000) == pytest.approx(truth(0, 6000), rel=0.1)


def test_one_request_is_believed_up_to_eight_of_the_largest_step():
    """No further, and as far."""
    cost = by_token((10, 0.01), (20, 0.02), (40, 0.04))
    assert cost.seconds(0, 300) == pytest.approx(0.3)
    assert cost.seconds(0, 10_000) == pytest.approx(0.001 * REACH * 40)


def test_steps_of_full_size_tell_the_cost_of_any_length():
    """Where the engine cuts a prefill into steps, a long one costs their overheads too, and is no extrapolation."""
    cost = PrefillCost(LLAMA_70B, step_tokens=2048)
    for n in (256, 512, 1024, 2048):
        cost.observe_step([(0, n)], truth(0, n))
    steps = [(first, first + 2048) for first in range(0, 65_536, 2048)]
    assert cost.seconds(0, 65_536) == pytest.approx(sum(truth(*step) for step in steps), rel=0.02)


def test_small_steps_do_not_drown_what_large_ones_told():
    """After a thousand noisy small steps the cost of a large one still stands."""
    rng, cost = random.Random(5), learned()
    for _ in range(1000):
        n = rng.randint(64, 256)
        cost.observe_step([(0, n)], truth(0, n) * rng.uniform(0.9, 1.1))
    assert cost.seconds(0, 16_384) == pytest.approx(truth(0, 16_384), rel=0.15)


@given(
    starts=st.lists(st.integers(0, 100_000), min_size=1),
    step_tokens=st.sampled_from([0, 2048]),
    steps=st.integers(0, 9),
)
def test_many_beginnings_are_told_at_once(starts, step_tokens, steps):
    """Each costs what it costs alone, whether its overhead adds or is hidden, and before anything was learned."""
    for prior in (None, SECONDS_PER_FLOP):
        cost = PrefillCost(LLAMA_70B, seconds_per_flop=prior, step_tokens=step_tokens)
        for step in range(steps):
            n = 16 << step
            cost.observe_step([(0, n)], max(0.02, truth(0, n)))
        alone = [cost.seconds(h, 100_001) for h in starts]
        each = cost.each_s(np.array(starts, float), 100_001)
        assert alone == ([None] * len(starts) if each is None else pytest.approx(each.tolist()))


def test_requests_share_steps():
    """Eight short prefills that fit into one step cost their FLOPs and one overhead."""
    cost = PrefillCost(LLAMA_70B, overhead_s=0.015, seconds_per_flop=SECONDS_PER_FLOP, step_tokens=2048)
    flops = 8 * LLAMA_70B.flops(0, 256)
    assert cost.work_s(flops, 8 * 256, requests=8) == pytest.approx(0.015 + SECONDS_PER_FLOP * flops)


def test_an_engine_without_a_shape_pays_by_the_token():
    """Seconds grow linearly with tokens, whatever their position."""
    cost = PrefillCost(TOKENS_ONLY)
    for n in (100, 200, 400, 800):
        cost.observe_step([(0, n)], 0.01 + 0.001 * n)
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
        cost.observe_step([(h, n)], seconds)
    if cost.line is not None:
        assert 0 <= cost.seconds(0, 100) <= cost.seconds(0, 1000) < float("inf")
