"""What fetching is judged by while requests are held out: some of them, drawn by lot, in each window."""

from dataclasses import replace

import numpy as np
import pytest

from agent.fakes import window
from agent.test_trials import TYPICAL, probes
from tiertune_agent.verdicts.trials import coarse, fetch_trial
from tiertune_agent.verdicts.verdict import student, weigh


def drawn(index, slower, held=1, each_s=0.03):
    """A window with a short, a middle and a long request, of which in turns one or two are held out."""
    values = {}
    for which, tokens in enumerate((100, 1000, 10000)):
        group = "held" if (which - index) % 3 < held else "fetched"
        seconds = (each_s + 4e-5 * tokens) * (1.0 if group == "held" else slower)
        for name, value in (("seconds", seconds), ("tokens", tokens)):
            values[of] = values.get(of := f"holdout_sums_total{{group={group},sum={name}}}", 0.0) + value
    return window("remote", values, index)


@pytest.mark.parametrize(("slower", "state"), [(0.7, "kept"), (1.0, "inconclusive"), (1.3, "rolled_back")])
def test_a_holdout_of_few_requests_measures_no_saving_by_itself(slower, state):
    """A short find costs most per token, so a mean of such ratios is higher in the group of fewer requests."""
    trial = fetch_trial("on", [drawn(index, slower) for index in range(60)], None)
    verdict = weigh(trial, worse_by=0.02)
    assert (verdict.state, verdict.evidence["after"]) == (state, pytest.approx(slower * verdict.evidence["before"]))
    assert weigh(coarse(trial, 20), worse_by=0.02).state == state


def test_three_windows_are_believed_as_much_as_three_can_be():
    """Where fetching is worth nothing, one verdict in twenty may say otherwise, as by many windows, and not one in six.

    A real saving of two fifths is seen nearly always.
    """
    rng = np.random.default_rng(1)

    def judged(slower):
        values = {
            f"holdout_sums_total{{group={group},sum={name}}}": value
            for group, factor in (("held", 1.0), ("fetched", slower))
            for name, value in (("seconds", factor * rng.normal(20, 1)), ("tokens", 20000.0))
        }
        return window("remote", values, 0)

    def clear(slower):
        trials = (fetch_trial("on", [judged(slower) for _ in range(3)], None) for _ in range(1000))
        return sum(weigh(trial, worse_by=0.0).state != "inconclusive" for trial in trials)

    assert clear(1.0) < 70
    assert clear(0.6) > 950
    assert [2 * student(of) for of in (2, 3, 5, 10, 30)] == pytest.approx([4.53, 3.31, 2.65, 2.28, 2.09], rel=0.04)


def test_requests_that_turn_cheap_as_more_are_held_out_are_no_saving():
    """One in three was held out of dear requests, two are of cheap ones; each window is compared with itself."""
    windows = [drawn(index, 1.0, *((1, 1.0) if index < 30 else (2, 0.03))) for index in range(60)]
    verdict = weigh(fetch_trial("on", windows, None), worse_by=0.02)
    assert (verdict.state, verdict.evidence["after"]) == ("inconclusive", pytest.approx(verdict.evidence["before"]))


def test_a_holdout_tells_nothing_while_fetching_is_off():
    """Nobody fetches then, held out or not: a switch-off is judged by probes."""
    soak = probes(1e8, 1.1e8, 0.9e8, 1e8)
    both = [replace(one, values={**one.values, **drawn(at, 0.5).values}) for at, one in enumerate(soak)]
    assert fetch_trial("off", both, TYPICAL) == fetch_trial("off", soak, TYPICAL)
