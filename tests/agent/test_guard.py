"""The guard: what it refuses, and how it bounds."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.answers import no_change, proposal
from agent.fakes import START, after
from tiertune_agent.policy.guard import LONGEST_S, Recent, Rules, forbidden, guard
from tiertune_agent.records import Made
from tiertune_agent.tuners.base import REMNANT, NoChange, Proposal

FIELD = "tiers.dram.capacity_bytes"
AUTO = Rules(mode="auto", min_requests=100, changes_per_hour=2, spacing=650.0, hold_off=600.0)
WISH = Proposal("tiers.remote.write", "on", "off", "it costs", requests=100)
PROTECTS = replace(WISH, field="tiers.remote.fetch")
NOW = Recent(now=START)


def test_no_change_passes_through():
    """An answer of no change is not the guard's business."""
    answer = NoChange("all is well")
    assert guard(answer, AUTO, Recent(START, frozen="by me")) is answer


@pytest.mark.parametrize(
    ("recent", "said"),
    [
        (Recent(START, frozen="by ops: release"), "frozen: by ops: release"),
        (Recent(START, last=Made("f", 1, 2, START - timedelta(seconds=400))), "held off for another 3m 20s"),
        (
            Recent(START, last=Made("f", 1, 2, START - timedelta(seconds=600))),
            "changes once in a period: not for 50 s",
        ),
        (Recent(START, soaking="decision 7"), "waits for the soak of decision 7"),
        (Recent(START, changes_last_hour=2), "the budget of 2 changes per hour is spent"),
    ],
)
def test_auto_is_refused_and_what_was_wished_is_told(recent, said):
    """Freeze, hold-off and budget turn a wish into no change that names the rule and the wish."""
    answer = no_change(guard(WISH, AUTO, recent))
    assert answer.reason.startswith(said)
    assert "wished on to off: it costs" in answer.reason


@pytest.mark.parametrize(
    ("recent", "said"),
    [
        (Recent(START, frozen="by ops: release", changes_last_hour=2), "frozen: by ops: release"),
        (Recent(START, changes_last_hour=2), "the budget of 2 changes per hour is spent"),
        (Recent(START, soaking="decision 7", last=Made("f", 1, 2, START), changes_last_hour=1), ""),
    ],
)
def test_a_part_of_a_split_waits_for_freeze_and_budget_alone(recent, said):
    """Its soak and its distance are those of the split."""
    assert forbidden(AUTO, recent) == said


def test_sizes_that_were_wished_are_told_as_people_read_them():
    """As everywhere else, not in bytes."""
    wish = Proposal(FIELD, 2**30, 3 * 2**30, "it pays", requests=100)
    assert "wished 1.0 GiB to 3.0 GiB: it pays" in no_change(guard(wish, AUTO, Recent(START, frozen="by me"))).reason


def test_what_was_refused_keeps_its_evidence():
    """Whoever asks why nothing happened sees the same figures."""
    wish = replace(WISH, evidence={"gain": 0.5})
    assert guard(wish, AUTO, Recent(START, frozen="by me")).evidence == {"gain": 0.5}


@pytest.mark.parametrize(("rest", "passes"), [(0.0, True), (0.5, False), (-0.5, True)])
def test_a_hold_off_ends_to_the_second(rest, passes):
    """A change, or its undoing, that is so long ago holds nothing up; half a second less, it does."""
    last = Made(WISH.field, "off", "on", START - timedelta(seconds=650.0 - rest))
    assert isinstance(guard(WISH, AUTO, Recent(START, last=last)), Proposal) == passes
    undone = [Made(WISH.field, "on", "off", START - timedelta(seconds=1200.0 - rest))]
    assert isinstance(guard(WISH, AUTO, Recent(START, undone=undone)), Proposal) == passes


def test_a_hold_off_alone_ends_to_the_second():
    """Where changes of a target may follow each other at once."""
    rules = replace(AUTO, spacing=0.0)
    for seconds_ago, passes in ((599.5, False), (600.0, True)):
        recent = Recent(START, last=Made(WISH.field, "off", "on", START - timedelta(seconds=seconds_ago)))
        assert isinstance(guard(WISH, rules, recent), Proposal) is passes


def test_what_protects_requests_does_not_wait_for_the_budget():
    """Fetching that loses is switched off although the hour's changes are spent, and says so; it goes on by budget."""
    spent = Recent(START, changes_last_hour=2)
    off = proposal(guard(PROTECTS, AUTO, spent))
    assert off.reason.startswith("it costs; the budget of 2 changes per hour is spent, and holds up nothing that prot")
    for wish in (replace(PROTECTS, before="off", after="on"), WISH):
        no_change(guard(wish, AUTO, spent))
    assert guard(PROTECTS, AUTO, NOW) is PROTECTS


def test_a_budget_of_nothing_is_no_change_at_all():
    """Whoever allows none gets none, whatever it protects."""
    answer = no_change(guard(PROTECTS, replace(AUTO, changes_per_hour=0), NOW))
    assert answer.reason.startswith("the budget of 0 changes per hour is spent")


@pytest.mark.parametrize("mode", ["observe", "recommend"])
def test_a_mere_recommendation_is_not_held_back(mode):
    """Freeze, hold-off and budget are about changes; a recommendation makes none."""
    recent = Recent(START, frozen="by me", soaking="it", last=Made("f", 1, 2, START), changes_last_hour=99)
    assert guard(WISH, Rules(mode=mode, min_requests=0, changes_per_hour=0, hold_off=600.0), recent) is WISH


@pytest.mark.parametrize("mode", ["observe", "recommend", "auto"])
def test_few_requests_are_no_evidence_in_any_mode(mode):
    """A wish that rests on too few requests is refused; one that does not rest on requests is not."""
    rules = Rules(mode=mode, min_requests=101, changes_per_hour=9)
    no_change(guard(WISH, rules, NOW), "100 requests, the guard asks for 101")
    proposal(guard(Proposal("f", "off", "on", "probes say so"), rules, NOW))


def sized(before, after, recent=NOW, **rules):
    rules = Rules(**{"mode": "recommend", "min_requests": 0, "changes_per_hour": 9, "max_step": 0.5, **rules})
    return guard(Proposal(FIELD, before, after, "because"), rules, recent)


@pytest.mark.parametrize(
    ("before", "wish", "bounds", "after"),
    [
        (100, 120, {}, 120),
        (100, 101, {}, 101),
        (100, 500, {}, 350),
        (10, 500, {}, 260),
        (100, 0, {}, 50),
        (100, 500, {"most": 130}, 130),
        (100, 10, {"least": 80}, 80),
        (0, 100, {}, 50),
        (80, 0, {"most": 1000}, 0),
        (120, 0, {"most": 1000}, 60),
        (100, 0, {"most": 1000}, 50),
        (1000, 800, {"most": 100}, 500),
    ],
    ids=[
        "free",
        "one byte",
        "step up",
        "up by the larger end",
        "step down",
        "most",
        "least",
        "from nothing",
        "a remnant goes",
        "no remnant yet",
        "just no remnant",
        "towards the bounds by steps",
    ],
)
def test_capacities_are_bounded(before, wish, bounds, after):
    """One bounded step at a time, within the bounds."""
    assert proposal(sized(before, wish, **bounds)).after == after


def test_a_wish_that_the_bounds_undo_is_no_change():
    """At its bound a tier stays, and the answer names the bounds."""
    no_change(sized(100, 500, most=100), "bounds none to 100 B")
    assert "bounds 100 B to none" in sized(100, 50, least=100).reason


def test_a_bounded_wish_tells_its_bound():
    """After its reason; one that needs none tells nothing of it."""
    assert sized(100, 500, most=120).reason == "because; bounded to 120 B"
    assert sized(100, 110).reason == "because"


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
    low, high = least or 0, 10**13 if most is None else most
    goal = min(max(wish, low), high)
    remnant = REMNANT * most if most is not None else 0
    assert answer.after - before <= step * max(before, goal) + 1
    assert before - answer.after <= step * before + remnant + 1
    if low <= before <= high:
        assert low <= answer.after <= high
    assert (answer.after - before) * (wish - before) > 0


def last(before, after, goal, seconds_ago=300):
    return Recent(START, soaking="it", last=Made(FIELD, before, after, START - timedelta(seconds=seconds_ago), goal))


@pytest.mark.parametrize(
    ("before", "wish", "recent", "passes"),
    [
        (350, 500, last(100, 350, 500), True),
        (350, 900, last(100, 350, 500), True),
        (350, 200, last(100, 350, 500), False),
        (500, 900, last(350, 500, None), False),
        (400, 500, last(100, 350, 500), False),
        (400, 500, last(800, 400, 100), False),
    ],
    ids=["further", "further still", "reversal", "arrived", "moved by hand", "reversal from shrinking"],
)
def test_only_a_step_further_waits_for_nothing(before, wish, recent, passes):
    """Hold-off and soaks stand before reversals; the next step on a way that was cut short needs the period alone."""
    answer = sized(before, wish, recent, mode="auto", hold_off=900.0)
    assert isinstance(answer, Proposal) is passes


@pytest.mark.parametrize(("seconds_ago", "passes"), [(261, False), (262, False), (263, True)])
def test_a_step_further_waits_for_the_period(seconds_ago, passes):
    """However often sizes are looked at, they move a step in a period; rounds may be half a look early."""
    recent = last(100, 350, 500, seconds_ago)
    answer = sized(350, 500, recent, mode="auto", period=300.0, spacing=262.5, hold_off=900.0)
    assert isinstance(answer, Proposal) is passes


@pytest.mark.parametrize(("into_s", "next_s"), [(0, 300), (100, 200), (149, 151), (150, 150), (200, 150), (299, 150)])
def test_a_target_changes_once_in_a_period_of_the_clock(into_s, next_s):
    """What was wrong is mended when the next period begins, but not before half of one is over."""
    assert START.timestamp() % 300 == 0
    made = Made(FIELD, 500, 350, after(seconds=into_s))
    for seconds, passes in ((next_s - 1, False), (next_s, True)):
        recent = Recent(made.at + timedelta(seconds=seconds), last=made)
        answer = sized(350, 500, recent, mode="auto", period=300.0, spacing=300.0)
        assert isinstance(answer, Proposal) is passes


@pytest.mark.parametrize(
    ("into_s", "at_s", "passes"), [(150.4, 300.2, True), (180.4, 300.2, False), (0.4, 270.2, False)]
)
def test_a_round_a_moment_early_is_in_time(into_s, at_s, passes):
    """Rounds are not punctual: the one that begins a period must not wait for the next because of that."""
    made = Made(FIELD, 500, 350, after(seconds=into_s))
    recent = Recent(after(seconds=at_s), last=made)
    answer = sized(350, 500, recent, mode="auto", period=300.0, spacing=285.0)
    assert isinstance(answer, Proposal) is passes


def test_a_step_remembers_its_goal():
    """What is cut short says where it was to go; what arrives does not."""
    assert sized(100, 500).evidence == {"goal": 500}
    assert sized(100, 500, most=400).evidence == {"goal": 400}
    assert sized(100, 130, most=120).evidence == {}


def test_one_tuner_waits_for_no_soak():
    """What protects requests is not held up by another change's soak."""
    rules = Rules(mode="auto", min_requests=0, changes_per_hour=9, waits=False)
    assert guard(WISH, rules, Recent(START, soaking="decision 7")) is WISH


def undone(times, seconds_ago):
    at = [START - timedelta(seconds=seconds_ago + 86400 * index) for index in range(times)]
    return Recent(START, undone=[Made(FIELD, 100, 200, moment) for moment in at])


@pytest.mark.parametrize(("times", "held"), [(1, 1200.0), (2, 2400.0), (3, 4800.0), (60, LONGEST_S)])
def test_what_was_rolled_back_waits_longer_each_time(times, held):
    """The same change again waits twice as long after each rollback, at most a week, in every mode; and says so."""
    rules = {"hold_off": 600.0, "soak": 60.0}
    refused = no_change(sized(120, 300, undone(times, held - 60), **rules))
    told = "once" if times == 1 else f"{times} times"
    assert f"the same change was undone or refused {told}: not tried again for another 1m" in refused.reason
    proposal(sized(120, 300, undone(times, held), **rules))


def test_only_the_same_change_is_remembered():
    """The other way, or another value, is another change."""
    rules = {"hold_off": 600.0}
    proposal(sized(120, 80, undone(1, 10), **rules))
    eviction = Recent(START, undone=[Made(WISH.field, "off", "on", START)])
    assert guard(WISH, AUTO, eviction) is WISH
