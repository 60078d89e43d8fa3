"""gate_settings, and what tuners read windows with."""

from datetime import timedelta
from math import sqrt

import pytest

from agent.answers import proposal
from agent.fakes import START, after, by_length, histogram, remote_window, window
from tiertune_agent.changes.survey import unbroken
from tiertune_agent.incidents.detectors import median
from tiertune_agent.records import Made, Target
from tiertune_agent.tuners.admission import AdmissionSettings, AdmissionTuner
from tiertune_agent.tuners.base import (
    Current,
    NoChange,
    models,
    pool_targets,
    present,
)
from tiertune_agent.tuners.evidence import Summand, ratio
from tiertune_agent.tuners.gate_settings import GateTuner
from tiertune_agent.tuners.remote_fetch import RemoteFetchSettings
from tiertune_connector.catalogue import BY_NAME


def test_gate_settings_follow_the_policy():
    """The policy's margin and floor are proposed where a store has others; a store that has them is left alone."""
    tuner = GateTuner(RemoteFetchSettings(margin=1.3, min_fetch_tokens=512))
    target = Target("host-a", "remote")
    for remote, field, wanted in (
        ({"margin": 1.1, "min_fetch_tokens": 0}, "tiers.remote.margin", 1.3),
        ({"margin": 1.3, "min_fetch_tokens": 0}, "tiers.remote.min_fetch_tokens", 512),
    ):
        answer = proposal(tuner.evaluate([], Current(target, {"tiers": {"remote": remote}}, {})))
        assert (answer.field, answer.after) == (field, wanted)
    same = Current(target, {"tiers": {"remote": {"margin": 1.3, "min_fetch_tokens": 512}}}, {})
    assert isinstance(tuner.evaluate([], same), NoChange)


def test_a_new_margin_does_not_unlearn_a_floor():
    """The floor that short fetches taught stays its day, though the gate's last change was the margin's."""
    remote, target = {"margin": 1.1, "min_fetch_tokens": 4096}, Target("host-a", "remote")
    tuner = GateTuner(RemoteFetchSettings(margin=1.3))
    for learned in (False, True):
        last = Made("tiers.remote.margin", 2.0, 1.1, START, learned=learned)
        answer = proposal(tuner.evaluate([], Current(target, {"tiers": {"remote": remote}}, {}, last)))
        assert (answer.field, "requests" in answer.evidence) == ("tiers.remote.margin", learned)


def test_what_only_a_disk_remembers_is_not_served():
    """Nothing is tuned for engines that have not come since the store was started."""
    served, left = {"model": "llama", "dram": {}, "disk": {}}, {"model": "qwen", "disk": {}}
    status = {"pools": {"a": served, "b": left, "c": {"model": "mistral"}}}
    assert [target.namespace for target in pool_targets("host-a", "dram", status)] == ["a", "c"]
    assert models(status) == ("llama", "mistral")


@pytest.mark.parametrize("told", [{}, {"tiers": None}, {"tiers": {"disk": 5}}, {"tiers": {"disk": {}}}])
def test_a_tier_of_which_nothing_is_told_is_none(told):
    """Whatever a store tells instead of it: nothing is tuned there, and no tuner stops."""
    assert not present(told, "disk")
    assert AdmissionTuner(AdmissionSettings()).targets("host-a", told) == []
    assert [present({"tiers": {"disk": {"health": health}}}, "disk") for health in ("dead", "absent")] == [True, False]


def lengths(index, short, long):
    """A window with fetches of two classes of lengths that gained so many seconds."""
    return by_length(remote_window(index), 300.0, t0=short, t4096=long)


def floor(windows, now=0, policy=0, changed_at=None, *, learned=True):
    tuning = {"tiers": {"remote": {"margin": 1.1, "min_fetch_tokens": now}}}
    last = changed_at and Made("tiers.remote.min_fetch_tokens", 0, now, changed_at, learned=learned)
    current = Current(Target("host-a", "remote"), tuning, {}, last)
    return GateTuner(RemoteFetchSettings(min_fetch_tokens=policy)).evaluate(windows, current)


def test_the_floor_rises_where_short_fetches_lose():
    """Clearly, and in as many windows in a row as it takes to switch off; never under what stands."""
    losing = [lengths(i, -5.0 - i, 20.0 + i) for i in range(4)]
    told = proposal(floor(losing))
    assert (told.field, told.before, told.after) == ("tiers.remote.min_fetch_tokens", 0, 4096)
    assert told.requests == told.evidence["requests"] == 1200
    assert "1200 fetches under 4096 tokens lost 0.022 s each" in told.reason
    assert isinstance(floor(losing[:3]), NoChange)
    assert isinstance(floor(losing, now=4096, policy=4096), NoChange)
    assert isinstance(floor([lengths(i, 5.0 + i, 20.0) for i in range(4)]), NoChange)


def test_a_floor_above_the_policys_is_tried_again_after_a_day():
    """Nobody sees whether what is not fetched would pay by now; a floor set by hand is none of the policy's."""
    quiet = [remote_window(i) for i in range(4)]
    assert "the floor stays at 4096 tokens" in floor(quiet, now=4096, changed_at=START - timedelta(hours=1)).reason
    assert "the floor stays at 4096 tokens" in floor([], now=4096, changed_at=START).reason
    for changed_at in (None, START - timedelta(days=2)):
        assert proposal(floor(quiet, now=4096, changed_at=changed_at)).after == 0


def test_a_floor_that_the_policy_asked_for_follows_it_down_at_once():
    """No fetch lost below it; a new margin is the policy's wish, too."""
    for windows in ([], [remote_window(i) for i in range(4)]):
        told = proposal(floor(windows, now=8192, policy=512, changed_at=START, learned=False))
        assert (told.before, told.after) == (8192, 512)


@pytest.mark.parametrize(
    ("starts", "until", "left"),
    [
        ([0, 15, 30], 45, [0, 15, 30]),
        ([0, 15, 30], 59, [0, 15, 30]),
        ([0, 15, 30], 60, []),
        ([0, 15, 60, 75], 90, [60, 75]),
        ([], 0, []),
    ],
    ids=["whole", "almost a window ago", "too long ago", "a gap", "none"],
)
def test_windows_in_a_row_have_no_gap(starts, until, left):
    """What came before a gap, or too long ago, is no evidence about now."""
    windows = [window("dram", {}, after(seconds=start)) for start in starts]
    run = unbroken(windows, after(seconds=until))
    assert [(each.start - START).total_seconds() for each in run] == left


def test_the_median_of_a_histogram_is_its_middle_bucket():
    """Over several windows, the bucket that holds the middle observation; none without observations."""
    name = "tier_evicted_idle_seconds"
    windows = [window("dram", {name: histogram(*counts)}) for counts in ((3, 0, 0), (0, 1, 9))]
    assert median(windows, name) == BY_NAME[name].buckets[2]
    assert median(windows[:1], name) == BY_NAME[name].buckets[0]
    assert median([], name) is None


@pytest.mark.parametrize(
    ("off", "squares"),
    [((1, 1, 1, 1, -1, -1, -1, -1), 16), ((1, -1, 1, -1, 1, -1, 1, -1), 8)],
    ids=["like their neighbours", "unlike them"],
)
def test_windows_that_are_like_their_neighbours_are_fewer_than_they_seem(off, squares):
    """Newey and West with two lags: 8 + 2 (2/3 of 5, and 1/3 of 2) squares. Unlike neighbours make nothing surer."""
    found = ratio([Summand(10.0 + each, 1.0) for each in off])
    assert (found.value, found.windows) == (10.0, 8)
    assert found.error == pytest.approx(sqrt(squares) / 8 * sqrt(8 / 7))
