"""The guard: what it refuses, and how it bounds."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.fakes import START
from tiertune_agent.guard import Recent, Rules, guard
from tiertune_agent.tuners.base import NoChange, Proposal

AUTO = Rules(mode="auto", min_requests=100, changes_per_hour=2, hold_off=600.0)
WISH = Proposal("tiers.remote.fetch", "on", "off", "it costs", requests=100)
NOW = Recent(now=START)


def test_a_sound_wish_passes_unchanged():
    """What no rule forbids is let through as it is."""
    assert guard(WISH, AUTO, NOW) is WISH


def test_no_change_passes_through():
    """An answer of no change is not the guard's business."""
    answer = NoChange("all is well")
    assert guard(answer, AUTO, Recent(START, frozen="by me")) is answer


@pytest.mark.parametrize(
    ("recent", "said"),
    [
        (Recent(START, frozen="by ops: release"), "frozen: by ops: release"),
        (Recent(START, last_change=START - timedelta(seconds=400)), "held off for another 3m 20s"),
        (Recent(START, changes_last_hour=2), "the budget of 2 changes per hour is spent"),
    ],
)
def test_auto_is_refused_and_what_was_wished_is_told(recent, said):
    """Freeze, hold-off and budget turn a wish into no change that names the rule and the wish."""
    answer = guard(WISH, AUTO, recent)
    assert isinstance(answer, NoChange)
    assert answer.reason.startswith(said)
    assert "wished on to off: it costs" in answer.reason


@pytest.mark.parametrize("mode", ["observe", "recommend"])
def test_a_mere_recommendation_is_not_held_back(mode):
    """Freeze, hold-off and budget are about changes; a recommendation makes none."""
    recent = Recent(START, frozen="by me", last_change=START, changes_last_hour=99)
    assert guard(WISH, Rules(mode=mode, min_requests=0, changes_per_hour=0, hold_off=600.0), recent) is WISH


@pytest.mark.parametrize("mode", ["observe", "recommend", "auto"])
def test_few_requests_are_no_evidence_in_any_mode(mode):
    """A wish that rests on too few requests is refused; one that does not rest on requests is not."""
    rules = Rules(mode=mode, min_requests=101, changes_per_hour=9)
    answer = guard(WISH, rules, NOW)
    assert isinstance(answer, NoChange)
    assert "100 requests, the guard asks for 101" in answer.reason
    assert isinstance(guard(Proposal("f", "off", "on", "probes say so"), rules, NOW), Proposal)


def sized(before, after, **bounds):
    rules = Rules(mode="recommend", min_requests=0, changes_per_hour=9, **{"max_step": 0.5, **bounds})
    return guard(Proposal("tiers.dram.capacity_bytes", before, after, "because"), rules, NOW)


@pytest.mark.parametrize(
    ("before", "wish", "bounds", "after"),
    [
        (100, 120, {}, 120),
        (100, 500, {}, 150),
        (100, 0, {}, 50),
        (100, 500, {"most": 130}, 130),
        (100, 10, {"least": 80}, 80),
        (0, 100, {}, 50),
        (1000, 800, {"most": 100}, 500),
    ],
    ids=["free", "step up", "step down", "most", "least", "from nothing", "towards the bounds by steps"],
)
def test_capacities_are_bounded(before, wish, bounds, after):
    """One bounded step at a time, within the bounds."""
    answer = sized(before, wish, **bounds)
    assert isinstance(answer, Proposal)
    assert answer.after == after


def test_a_wish_that_the_bounds_undo_is_no_change():
    """At its bound a tier stays, and the answer names the bounds."""
    answer = sized(100, 500, most=100)
    assert isinstance(answer, NoChange)
    assert "bounds none to 100 B" in answer.reason


@given(
    before=st.integers(0, 10**12),
    wish=st.integers(0, 10**12),
    least=st.none() | st.integers(0, 10**12),
    spread=st.none() | st.integers(0, 10**12),
    step=st.floats(0.01, 1.0),
)
def test_no_bounded_answer_breaks_a_rule(before, wish, least, spread, step):
    """Whatever is wished: never more than a step, never out of bounds from within, never against the wish."""
    most = None if spread is None else (least or 0) + spread
    answer = sized(before, wish, least=least, most=most, max_step=step)
    if isinstance(answer, NoChange):
        return
    low, high = least or 0, most if most is not None else 10**13
    assert abs(answer.after - before) <= step * (before or max(wish, low)) + 1
    if low <= before <= high:
        assert low <= answer.after <= high
    assert (answer.after - before) * (wish - before) > 0
