"""Verdicts: two standard errors, or inconclusive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.answers import trial_of
from tiertune_agent.tuners.evidence import Summand
from tiertune_agent.verdicts.verdict import Spells, weigh

OLD = (1.0, 1.2, 0.9, 1.1)
COSTS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=3, max_size=30)


def than_old(*by):
    return trial_of([(old, old + each) for old, each in zip(OLD, by, strict=True)])


@pytest.mark.parametrize(
    ("trial", "state"),
    [
        (than_old(-0.1, -0.11, -0.09, -0.1), "kept"),
        (than_old(0.1, 0.11, 0.09, 0.1), "rolled_back"),
        (than_old(0.01, 0.01, 0.01, 0.01), "inconclusive"),
        (than_old(0.5, -0.4, 0.6, -0.3), "inconclusive"),
        (than_old(0.9, -0.4, 0.9, -0.3), "inconclusive"),
        (than_old(0, 0, 0, 0), "inconclusive"),
        (trial_of([(1.0, 0.5)] * 2), "inconclusive"),
        (trial_of([]), "inconclusive"),
        (trial_of([(0.0, 0.5), (0.0, 0.6), (0.0, 0.5)]), "rolled_back"),
    ],
    ids=["better", "worse", "hardly worse", "noise", "worse in noise", "equal", "few", "none", "from nothing"],
)
def test_only_a_clear_difference_counts(trial, state):
    """Better by two standard errors keeps, worse by two and by more than the policy allows rolls back."""
    verdict = weigh(trial, worse_by=0.02)
    assert verdict.state == state
    assert verdict.reason


@pytest.mark.parametrize(("spent", "state"), [(5.0, "rolled_back"), (4.3, "inconclusive")])
def test_spells_may_be_as_much_worse_as_the_policy_says(spent, state):
    """A tenth of what the old setting costs, here 4 and so 0.4, and not a tenth by itself."""
    before, after = ((Summand(each, 1.0),) * 4 for each in (4.0, spent))
    verdict = weigh(Spells(before, after, "cost"), worse_by=0.1)
    assert verdict.state == state
    assert verdict.evidence == {"windows": 4, "of": "cost", "before": 4.0, "after": spent, "standard_error": 0.0}


def test_pairs_see_through_a_changing_load():
    """A steady gain of 5 % counts although the windows themselves differ tenfold."""
    old = (1.0, 10.0, 3.0, 0.9, 7.0, 2.0)
    assert weigh(trial_of([(cost, 0.95 * cost) for cost in old]), worse_by=0.02).state == "kept"


def test_a_verdict_tells_its_figures():
    """The sentence holds both means, the change, its error and how many windows; more is called more."""
    verdict = weigh(trial_of([(1.0, 3.0), (1.0, 3.4), (1.0, 3.2)], "seconds per request"), worse_by=0.02)
    assert verdict.reason == (
        "seconds per request: 3.2 against 1 with the old setting, 220.0% more (standard error 11.5%), 3 windows"
    )
    assert verdict.evidence["before"] == 1.0
    less = weigh(trial_of([(2.0, 1.0)] * 3), worse_by=0.02)
    assert less.reason == "cost: 1 against 2 with the old setting, 50.0% less (standard error 0.0%), 3 windows"


def test_windows_count_by_their_weights():
    """A thousand requests outvote ten; alike, weights change nothing; and a few busy windows are not many."""
    costs = [(1.0, 0.9), (1.0, 0.91), (1.0, 1.6), (1.0, 1.5)]
    busy = weigh(trial_of(costs, weights=(1000.0, 1000.0, 10.0, 10.0)), worse_by=0.02)
    assert busy.evidence["after"] == pytest.approx(0.911, abs=0.001)
    assert (busy.state, busy.evidence["standard_error"]) == ("inconclusive", pytest.approx(0.063, abs=0.001))
    alike = [weigh(trial_of(costs, weights=weights), worse_by=0.02).evidence for weights in ((), (7.0,) * 4)]
    assert alike[0] == pytest.approx(alike[1])
    one = weigh(trial_of([(1.0, 0.9), (1.0, 1.2), (1.0, 1.3)], weights=(1000.0, 1.0, 1.0)), worse_by=0.02)
    assert one.state == "inconclusive"


@pytest.mark.parametrize("little", [1e-9, 1e-30])
def test_a_window_beside_which_all_others_are_nothing_decides_nothing(little):
    """It is one window, however much it weighs, and has no error of its own."""
    trial = trial_of([(1.0, 0.9), (1.0, 1.2), (1.0, 1.3)], weights=(1e15, little, little))
    assert weigh(trial, worse_by=0.02).state == "inconclusive"


@given(COSTS, st.floats(0, 0.5))
def test_a_change_and_its_undoing_are_never_both_kept(pairs, worse_by):
    """What is kept would not be kept the other way round; what is rolled back would be kept the other way round."""
    there, back = (weigh(trial_of(way), worse_by=worse_by) for way in (pairs, [pair[::-1] for pair in pairs]))
    if there.state == "rolled_back":
        assert back.state == "kept"
    assert {there.state, back.state} != {"kept"}
