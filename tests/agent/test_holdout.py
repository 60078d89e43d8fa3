"""What a holdout measures: a saving with an interval that holds the truth."""

import random

import pytest

from agent.fakes import remote_window
from tiertune_agent.verdicts.holdout import ENOUGH_REQUESTS, GROUPS, GroupSums, added, measured, sums

pytestmark = pytest.mark.slow


def drawn(rng, requests, per_token):
    group = {}
    for _ in range(requests):
        tokens = rng.choice((500, 1000, 4000))
        seconds = tokens * per_token * rng.uniform(0.5, 1.5)
        group = added(group, vars(GroupSums(1, seconds, tokens, seconds**2, tokens**2, seconds * tokens)))
    return group


def test_the_interval_holds_the_truth():
    """Over many draws, about 95 % of the intervals hold the saving that was put in."""
    rng, within = random.Random(4), 0
    for _ in range(200):
        held, fetched = drawn(rng, 60, 0.003), drawn(rng, 600, 0.001)
        told = measured([{"held": held, "fetched": fetched}])
        assert told.low < told.saved < told.high
        within += told.low <= 0.002 * fetched["tokens"] <= told.high
    assert 0.91 <= within / 200 <= 0.985


@pytest.mark.parametrize("small", GROUPS)
def test_few_requests_measure_nothing(small):
    """Under the least number in either group, or where one found no token, there is no interval."""
    groups = {name: drawn(random.Random(1), 100, 0.001) for name in GROUPS}
    for group in (drawn(random.Random(2), ENOUGH_REQUESTS - 1, 0.001), {"requests": 100.0, "seconds": 1.0}):
        assert measured([{**groups, small: group}]) is None


def test_a_share_that_changes_with_the_traffic_saves_nothing_by_itself():
    """Over many draws, where fetching saves nothing: dear requests under one share, cheap ones under another."""
    rng, within = random.Random(5), 0
    for _ in range(200):
        dear = {"held": drawn(rng, 60, 0.003), "fetched": drawn(rng, 600, 0.003)}
        cheap = {"held": drawn(rng, 300, 0.001), "fetched": drawn(rng, 300, 0.001)}
        told = measured(added({"0.1": dear}, {"0.5": cheap}).values())
        within += told.low <= 0 <= told.high
    assert 0.91 <= within / 200 <= 0.985


def test_under_a_share_of_few_requests_nothing_is_measured():
    """What the others measured is told without it."""
    rng = random.Random(6)
    enough, few = ({"held": drawn(rng, n, 0.003), "fetched": drawn(rng, 600, 0.001)} for n in (60, 29))
    assert measured([enough, few]) == measured([enough])


def test_sums_add_up_and_come_back():
    """Windows' sums add up, each share's by itself; what is kept as a document is read back."""
    window = remote_window(0)
    window.values.update({"holdout_sums_total{group=held,sum=seconds}": 2.0})
    window.values.update({"holdout_sums_total{group=held,sum=requests}": 1.0})
    group = sums(window, "held")
    assert group == GroupSums(requests=1.0, seconds=2.0)
    assert sums(window, "fetched") == GroupSums()
    groups = {"held": vars(group), "fetched": vars(GroupSums())}
    strata = added(added({"0.1": groups}, {"0.2": groups}), {"0.1": groups})
    twice = {"held": vars(GroupSums(requests=2.0, seconds=4.0)), "fetched": vars(GroupSums())}
    assert strata == {"0.1": twice, "0.2": groups}
