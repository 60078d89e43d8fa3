"""remote_fetch: off when fetching costs more, on again when it pays, never faster than N windows."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.answers import no_change, proposal
from agent.fakes import START, by_length, remote_window
from tiertune_agent.records import Made, Target
from tiertune_agent.tuners.base import MOST_OF_TIER, Current, Proposal, TypicalCandidate
from tiertune_agent.tuners.lengths import losing_lengths
from tiertune_agent.tuners.remote_fetch import RemoteFetch, RemoteFetchSettings, asked, candidates, typical_candidate
from tiertune_connector.cost import Reason

TUNER = RemoteFetch(RemoteFetchSettings(disable_after=3, enable_after=3))
TYPICAL = TypicalCandidate(requests=10, nbytes=100e6, recompute_s=0.5)


def current(fetch, changed_at=None, typical=TYPICAL):
    last = changed_at and Made("tiers.remote.fetch", None, fetch, changed_at)
    return Current(Target("host-a", "remote"), {"tiers": {"remote": {"fetch": fetch}}}, {}, last, typical=typical)


def slow(index, requests=10):
    return remote_window(index, requests=requests, fetch=8.0, recompute=2.0)


def fast(index, requests=10):
    return remote_window(index, requests=requests, fetch=0.5, recompute=2.0, saved=1.5)


def probed(index, bandwidth, age=1.0):
    return remote_window(index, bandwidth=bandwidth, age=age, t0=0.001)


PAYS, COSTS = 1e9, 1e8


def test_a_kind_of_cost_that_a_later_store_tells_is_left_out():
    """What is known of its window counts."""
    window = slow(0)
    window = replace(window, values={**window.values, "gate_candidate_seconds_total{kind=later}": 9.0})
    assert asked(window) == asked(slow(0))


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ([], "too few candidates: no request found chunks to fetch in remote in any window yet"),
        ([remote_window(0)], "no request found chunks to fetch in remote in 1 window"),
        ([remote_window(0), remote_window(1)], "no request found chunks to fetch in remote in 2 windows"),
        ([slow(0), slow(1), fast(2)], "stays on, fetching pays: 10 requests, "),
        ([fast(0, requests=1)], "stays on, fetching pays: 1 request, "),
        ([fast(0), slow(1), slow(2)], "fetching cost more in 2 of the 3 windows in a row that it takes"),
        ([slow(0), fast(1), slow(2)], "fetching cost more in 1 of the 3"),
        # the gate picks those that pay: outcomes tell more than the sum over all candidates
        ([remote_window(i, requests=9, fetch=8, recompute=2, saved=1, lost=0.1) for i in range(4)], "stays on"),
        # requests at an unknown cost tell nothing
        ([remote_window(i, requests=9) for i in range(4)], "too few candidates"),
    ],
)
def test_it_stays_on_and_says_why(windows, said):
    """While on, anything but N windows of loss in a row changes nothing, and the sentence says what was seen."""
    no_change(TUNER.evaluate(windows, current("on")), said)


@pytest.mark.parametrize(
    "windows",
    [
        [slow(0), slow(1), slow(2)],
        [fast(0), slow(1), slow(2), slow(3)],
        [slow(0), remote_window(1), slow(2), remote_window(3), slow(4)],
        [remote_window(i, requests=5, fetch=1, recompute=2, saved=0.1, lost=3) for i in range(3)],
    ],
    ids=["predicted", "after good times", "idle windows between", "outcomes against the prediction"],
)
def test_it_goes_off_after_n_windows_of_loss(windows):
    """N windows in a row in which fetching cost more propose off, with the figures and the requests they rest on."""
    answer = proposal(TUNER.evaluate(windows, current("on")))
    assert (answer.field, answer.before, answer.after) == ("tiers.remote.fetch", "on", "off")
    assert answer.requests == sum(w["requests"] for w in answer.evidence["windows"]) > 0
    assert "in 3 windows in a row fetching cost more than recomputing" in answer.reason


def test_a_prediction_that_outcomes_belie_is_told_as_one():
    """Fetches that lost although they were to pay: the sentence does not seem to contradict itself."""
    wrong = [remote_window(i, requests=5, fetch=1, recompute=2, saved=0.1, lost=3) for i in range(3)]
    told = "those fetched saved 0.3 s and lost 9 s; {} 3 s to fetch against 6 s to recompute"
    assert told.format("though predicted were") in TUNER.evaluate(wrong, current("on")).reason
    right = [remote_window(i, requests=5, fetch=3, recompute=2, saved=0.1, lost=3) for i in range(3)]
    assert "lost 9 s; predicted 9 s to fetch against 6 s" in TUNER.evaluate(right, current("on")).reason


def test_the_streak_may_be_longer_than_n():
    """Evidence is gathered over the whole streak, so that few requests per window are enough in the end."""
    assert proposal(TUNER.evaluate([slow(i, requests=1) for i in range(7)], current("on"))).requests == 7


@pytest.mark.parametrize(
    ("windows", "typical", "said"),
    [
        ([], TYPICAL, "no window has passed since it was switched off"),
        ([probed(0, PAYS)], None, "no request has found chunks in remote yet"),
        ([probed(0, PAYS, age=100), probed(1, PAYS, age=115)], TYPICAL, "the newest measurement is 1m 55s old"),
        ([remote_window(0)], TYPICAL, "nothing was measured"),
        ([probed(i, COSTS) for i in range(5)], TYPICAL, "would take 1 s to fetch by the probes against 0.5 s"),
        ([probed(0, COSTS), probed(1, PAYS), probed(2, PAYS)], TYPICAL, "would pay in 2 of the 3 windows"),
        # every other window has a probe at its end, which is where the next one begins
        ([probed(i, PAYS, age=15.0 * (i % 2)) for i in range(4)], TYPICAL, "would pay in 2 of the 3 windows"),
        (
            [probed(i, COSTS) for i in range(5)],
            replace(TYPICAL, requests=0),
            "a mean prompt (95.4 MiB; none was found there of late) would take 1 s to fetch by the probes",
        ),
        # it pays, but not with the margin: 0.48 s against 0.5 s
        ([probed(i, 100e6 / 0.48) for i in range(5)], TYPICAL, "would not pay with margin 1.1"),
    ],
)
def test_it_stays_off_and_says_why(windows, typical, said):
    """While off, only fresh estimates against a known candidate count, and they must pay with the margin."""
    no_change(TUNER.evaluate(windows, current("off", typical=typical)), said)


def test_it_goes_on_again_by_the_probes():
    """N windows with fresh probes that pay propose on; windows without a fresh probe neither help nor hurt."""
    windows = [probed(0, COSTS), probed(1, PAYS), probed(2, PAYS, age=20), probed(3, PAYS), probed(4, PAYS)]
    answer = proposal(TUNER.evaluate(windows, current("off")))
    assert (answer.before, answer.after, answer.requests) == ("off", "on", None)


def test_probes_that_are_rare_are_enough_if_all_of_an_hour_say_so():
    """Every 20 minutes: a tuner sees the last 240 windows, an hour, of which three at most have a probe."""
    tuner = RemoteFetch(RemoteFetchSettings())
    hour = [probed(i, PAYS, age=15.0 * (i % 80)) for i in range(MOST_OF_TIER)]
    answer = proposal(tuner.evaluate(hour, current("off")))
    assert (answer.after, len(answer.evidence["windows"])) == ("on", 3)
    no_change(tuner.evaluate(hour[1:], current("off")), "would pay in 2 of the 4 windows in a row")
    once_slow = [*hour[:80], probed(80, COSTS), *hour[81:]]
    no_change(tuner.evaluate(once_slow, current("off")), "would pay in 1 of the 3 windows in a row")
    failed = [replace(each, values={**each.values, "probes_total{outcome=timeout}": 1.0}) for each in hour]
    no_change(tuner.evaluate(failed, current("off")), "would pay in 3 of the 4 windows in a row")


def test_only_windows_since_the_last_change_count():
    """What was seen before the last change is no evidence against the new state."""
    changed = START + timedelta(seconds=15 * 3)
    windows = [slow(index) for index in range(5)]
    proposal(TUNER.evaluate(windows, current("on")))
    no_change(TUNER.evaluate(windows, current("on", changed)))


@given(
    states=st.lists(st.tuples(st.floats(1e6, 1e11), st.booleans(), st.integers(0, 20)), min_size=1, max_size=80),
    needed=st.integers(1, 5),
)
def test_it_never_flaps_faster_than_n_windows(states, needed):
    """Whatever the bandwidth does, N windows lie between two changes."""
    tuner = RemoteFetch(RemoteFetchSettings(disable_after=needed, enable_after=needed))
    now, history, changes = current("on", START), [], []
    for index, (bandwidth, fresh, requests) in enumerate(states):
        on = now.tuning["tiers"]["remote"]["fetch"] == "on"
        asked = requests if on else 0
        figures = {"requests": asked, "fetch": asked * 100e6 / bandwidth, "recompute": asked * 0.5} if asked else {}
        history.append(remote_window(index, bandwidth=bandwidth, age=1.0 if fresh else 99.0, t0=0.001, **figures))
        answer = tuner.evaluate(history, now)
        if isinstance(answer, Proposal):
            changes.append(index)
            now = current(answer.after, history[-1].start + timedelta(seconds=15))
    assert all(later - earlier >= needed for earlier, later in zip([-1, *changes], changes, strict=False))


@given(bandwidth=st.floats(1e6, 1e11))
def test_a_steady_link_changes_at_most_once(bandwidth):
    """There is no bandwidth at which on and off both ask for the other."""
    figures = {"requests": 10, "fetch": 10 * (0.001 + 100e6 / bandwidth), "recompute": 5.0}
    on = TUNER.evaluate([remote_window(i, **figures) for i in range(5)], current("on"))
    off = TUNER.evaluate([probed(i, bandwidth) for i in range(5)], current("off"))
    assert not (isinstance(on, Proposal) and isinstance(off, Proposal))


def test_the_typical_candidate_is_a_mean_over_requests():
    """Bytes and seconds are means over requests, not over windows; windows without a known cost are left out."""
    windows = [
        remote_window(0, requests=1, recompute=1.0, fetch=1, nbytes=100),
        remote_window(1, requests=3, recompute=1.0, fetch=1, nbytes=300),
        remote_window(2, requests=5, nbytes=999),
    ]
    first = candidates([], windows[:1])
    assert typical_candidate(first) == TypicalCandidate(1, 100.0, 1.0)
    assert typical_candidate(candidates(first, windows[1:])) == TypicalCandidate(4, 100.0, 0.5)
    assert typical_candidate([]) is None


def test_who_could_not_tell_what_recomputing_takes_makes_it_no_cheaper():
    """Engines that were new in the last windows with candidates: while fetching is off no others come."""
    window = remote_window(0, requests=10, fetch=0.2, recompute=2.0, nbytes=1e9)
    unknown = {f"gate_requests_total{{decision=recompute,reason={Reason.UNKNOWN_COST}}}": 6.0}
    found = typical_candidate(candidates([], [replace(window, values={**window.values, **unknown})]))
    assert found == TypicalCandidate(10, 1e8, 0.5)


def lengths(index, **gained):
    """A window in which ten fetches of each class gained (or lost) so many seconds; ``t1024=-3.0``."""
    total = sum(gained.values())
    figures = {"requests": 10 * len(gained), "saved" if total > 0 else "lost": abs(total)}
    a_little_more = {name: seconds * (1 + 0.01 * index) for name, seconds in gained.items()}
    return by_length(remote_window(index, fetch=1.0, recompute=1.0, **figures), 10.0, **a_little_more)


def test_where_only_short_fetches_lose_a_floor_is_enough():
    """Fetching loses in sum, but long fetches pay: it is not switched off, and the floor that does it is told."""
    windows = [lengths(i, t0=-9.0, t1024=-3.0, t4096=5.0, t16384=1.0) for i in range(4)]
    answer = no_change(TUNER.evaluate(windows, current("on")))
    assert "stays on, a floor is enough: 80 fetches under 4096 tokens lost" in answer.reason
    every = [lengths(i, t0=-9.0, t1024=-3.0, t4096=-5.0, t16384=-1.0) for i in range(4)]
    proposal(TUNER.evaluate(every, current("on")))


def test_prompts_under_the_floor_do_not_switch_it_off_for_long_ones():
    """They would lose, and none is fetched; a long prompt comes every tenth window, and saves 5 s."""
    windows = []
    for index in range(40):
        long = index % 10 == 0
        seen = {"requests": 100 + long, "fetch": 3.0 + long, "recompute": 2.0 + 6 * long, "saved": 5.0 * long}
        short = {f"gate_requests_total{{decision=recompute,reason={Reason.TOO_SHORT}}}": 100.0}
        one = remote_window(index, **seen)
        windows.append(replace(one, values={**one.values, **short}))
        no_change(TUNER.evaluate(windows, current("on")), "stays on, fetching pays: 101 requests")
    no_change(TUNER.evaluate(windows[1:9], current("on")), "no request found chunks to fetch in remote in 8 windows")


def test_a_floor_is_not_enough_where_long_fetches_lose_by_now():
    """Short ones lost before it was in force, long ones paid for an hour; then the link got slow."""
    before = [lengths(i, t0=-9.0, t4096=5.0) for i in range(60)]
    assert "a floor is enough" in no_change(TUNER.evaluate(before, current("on"))).reason
    for short in ({}, {"t0": -1.0}):
        lately = [lengths(i, **short, t4096=-5.0) for i in range(60, 64)]
        assert "in 64 windows in a row" in proposal(TUNER.evaluate(before + lately, current("on"))).reason


@pytest.mark.parametrize(
    "windows",
    [
        [lengths(i, t0=-1.0, t1024=5.0) for i in range(2)],
        [lengths(i, t0=-1.0 if i % 3 else 0.5, t1024=5.0) for i in range(9)],
        [lengths(i, t0=1.0, t1024=-5.0) for i in range(4)],
        [lengths(i, t0=-1.0) for i in range(4)],
        [lengths(i, t0=-1.0, t1024=5.0 if i % 2 else -5.5) for i in range(4)],
    ],
    ids=["too few", "not in a row", "long ones lose", "one class", "long ones may lose"],
)
def test_no_floor_without_clear_evidence(windows):
    """Short fetches must lose in N windows in a row, long ones must clearly pay."""
    assert losing_lengths(windows, 3) is None


def test_a_streak_that_may_be_chance_changes_nothing():
    """N windows of loss of which one makes up nearly all: not two standard errors."""
    windows = [
        remote_window(i, requests=10, fetch=8.0, recompute=8.0, lost=lost) for i, lost in enumerate((9, 0.1, 0.1))
    ]
    no_change(TUNER.evaluate(windows, current("on")), "is not more than two standard errors")


@given(states=st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=3, max_size=8))
def test_a_floor_is_never_set_under_fetches_that_pay(states):
    """What a floor keeps from being fetched has lost in sum, what it lets through has gained."""
    windows = [lengths(i, t0=short, t4096=long) for i, (short, long) in enumerate(states) if short and long]
    found = losing_lengths(windows, 3)
    if found is not None:
        assert found.tokens == 4096
        assert sum(w.total("gate_length_seconds_total", tokens="0", result="lost") for w in windows) > sum(
            w.total("gate_length_seconds_total", tokens="0", result="saved") for w in windows
        )
