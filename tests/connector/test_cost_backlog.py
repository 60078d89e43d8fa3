"""What is ahead of a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.cost import TOKENS_ONLY, Backlog, ModelShape, PrefillCost
from tiertune_connector.cost.backlog import BLOCK
from tiertune_connector.cost.prefill import REACH

SHAPE = ModelShape(params=8.03e9, layers=32, width=4096)
SECONDS_PER_FLOP = 2e-15


def prefill(**settings):
    return PrefillCost(SHAPE, overhead_s=0.01, seconds_per_flop=SECONDS_PER_FLOP, step_tokens=2048, **settings)


def test_nothing_is_ahead_of_the_first():
    """Neither its own prefill nor those behind it are a request's backlog."""
    backlog = Backlog(prefill())
    backlog.arrived("a", 5000)
    backlog.arrived("b", 5000)
    assert backlog.seconds("a") == 0


@pytest.mark.parametrize("cost", [prefill(), PrefillCost(TOKENS_ONLY, seconds_per_flop=1.0)])
def test_the_backlog_is_what_is_left_of_those_before(cost):
    """A prompt of which a part is computed counts with the rest, at the rest's FLOPs, or its tokens without a shape."""
    backlog = Backlog(cost)
    backlog.arrived("a", 8192)
    backlog.arrived("b", 100)
    assert backlog.seconds("b") == pytest.approx(cost.seconds(0, 8192))
    backlog.computed("a", 4096)
    assert backlog.seconds("b") == pytest.approx(cost.seconds(4096, 8192))


@pytest.mark.parametrize("ends", [lambda backlog: backlog.computed("a", 8192), lambda backlog: backlog.left("a")])
def test_a_request_that_decodes_or_ended_is_no_backlog(ends):
    """Only prefills count, and later tokens of a request that was forgotten change nothing."""
    backlog = Backlog(prefill())
    backlog.arrived("a", 8192)
    backlog.arrived("b", 100)
    ends(backlog)
    backlog.computed("a", 8193)
    assert backlog.seconds("b") == 0
    assert len(backlog) == 1


def test_requests_that_ended_leave_nothing_behind():
    """An engine serves millions; of each one that is over, not even its place in the row is kept."""
    backlog = Backlog(prefill())
    for number in range(3 * BLOCK):
        backlog.arrived(str(number), 1000)
        backlog.left(str(number))
    assert (len(backlog), backlog._blocks) == (0, {})


def test_the_others_are_all_that_are_not_finished_but_oneself():
    """Before and behind; whoever is not among them has one more."""
    backlog = Backlog(prefill())
    for name in "abc":
        backlog.arrived(name, 1000)
    assert [backlog.others(name) for name in ("a", "b", "nobody")] == [2, 2, 3]
    backlog.computed("a", 999)
    backlog.computed("c", 1000)
    assert [backlog.others(name) for name in ("a", "b", "c")] == [1, 1, 2]


def test_an_unknown_cost_is_no_backlog():
    """In doubt nothing hides a fetch; nor is anything ahead of a request that is not waiting."""
    backlog = Backlog(PrefillCost(SHAPE))
    backlog.arrived("a", 8192)
    backlog.arrived("b", 100)
    assert backlog.seconds("b") == 0
    assert Backlog(prefill()).seconds("nobody") == 0


def test_a_queue_is_not_taken_for_one_long_prefill():
    """Many prompts like those that were seen are believed, though together they are far more than any of them."""
    cost = PrefillCost(SHAPE)
    for n in (500, 1000, 2000):
        cost.observe_step([(0, n)], 0.01 + SECONDS_PER_FLOP * SHAPE.flops(0, n))
    backlog = Backlog(cost)
    for number in range(100):
        backlog.arrived(str(number), 2000)
    assert backlog.seconds("99") == pytest.approx(99 * SECONDS_PER_FLOP * SHAPE.flops(0, 2000), rel=0.02)


def test_of_each_request_ahead_as_much_is_believed_as_of_one():
    """Prompts longer than the cost is known for count as the longest that it is known for, in a long queue too."""
    cost = PrefillCost(TOKENS_ONLY)
    for n in (10, 20, 40):
        cost.observe_step([(0, n)], 0.001 * n)
    backlog, ahead = Backlog(cost), 2 * BLOCK + 3
    for number in range(ahead + 1):
        backlog.arrived(str(number), 100_000)
    assert backlog.seconds("1") == pytest.approx(0.001 * REACH * 40)
    assert backlog.seconds(str(ahead)) == pytest.approx(ahead * 0.001 * REACH * 40)


def test_a_prompt_of_one_token_waits_and_an_empty_one_does_not():
    """Nothing of the latter is to be computed, whatever is said to be."""
    backlog = Backlog(prefill())
    backlog.arrived("a", 1)
    backlog.arrived("b", 0)
    backlog.computed("b", -1)
    assert (len(backlog), backlog.others("b")) == (1, 1)


def test_a_question_is_not_the_work_of_the_whole_queue():
    """At its head, in its midst and at its tail, as each step of the scheduler asks: counted, not timed."""
    done = 0

    class Work(float):
        def __add__(self, other):
            nonlocal done
            done += 1
            return float(self) + float(other)

        __radd__ = __add__

    class Shape(ModelShape):
        def flops(self, h, n):
            return Work(super().flops(h, n))

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal done
            done += 1
            return str.__eq__(self, other)

    waiting = 10_000
    backlog = Backlog(PrefillCost(Shape(8.03e9, 32, 4096), seconds_per_flop=SECONDS_PER_FLOP))
    for number in range(waiting):
        backlog.arrived(Name(number), 1000)
    for number in (0, 1, waiting // 2, waiting - 1):
        done = 0
        assert (backlog.seconds(Name(number)) > 0) == (number > 0)
        assert done < waiting / 20


events = st.lists(
    st.tuples(st.sampled_from(["arrived", "computed", "left"]), st.integers(0, 99), st.integers(0, 10_000)),
    max_size=300,
)


@given(events=events)
def test_it_is_the_sum_over_those_before(events):
    """Whatever came, went and was computed, told without the sums over blocks."""
    backlog, cost = Backlog(prefill()), prefill()
    waiting: dict[int, tuple[int, int]] = {}
    for number in range(100):  # more than one block
        backlog.arrived(str(number), 100 + number)
        waiting[number] = (0, 100 + number)
    for kind, number, tokens in events:
        if kind == "left":
            backlog.left(str(number))
            waiting.pop(number, None)
        elif kind == "arrived":
            backlog.arrived(str(number), tokens)
            waiting.pop(number, None)
            if tokens:
                waiting[number] = (0, tokens)
        else:
            backlog.computed(str(number), tokens)
            if number in waiting:
                waiting[number] = (tokens, waiting[number][1])
                if tokens >= waiting[number][1]:
                    del waiting[number]
    assert len(backlog) == len(waiting)
    flops, ahead = 0.0, 0
    for number, (h, n) in waiting.items():
        expected = cost.work_s(flops, ahead) if ahead else 0.0
        assert backlog.seconds(str(number)) == pytest.approx(expected)
        flops, ahead = flops + SHAPE.flops(h, n), ahead + n - h
