"""Windows in hours: what they add up to, and that no question reads days of windows."""

from datetime import timedelta

import pytest
from sqlalchemy import event

from agent.fakes import DIGEST, START, histogram
from agent.test_history import snapshot
from tiertune_agent.history import store
from tiertune_agent.records import Rates, Window, series

FREE = Rates(0.0, {}, 0.0)
HIT = series("tier_lookup_tokens_total", (("result", "hit"),))
AGE, TOOK = "fetch_estimate_age_seconds", "gate_actual_seconds"
WEEK = timedelta(days=7)


def window(at, tokens=1.0, *, age=2.0, seconds=15.0, tier="remote", namespace=""):
    values = {HIT: tokens, AGE: age, TOOK: histogram(1, 2)}
    return Window("host-a", namespace, "", tier, at, seconds, values)


def every(minutes, until, start=START):
    """Starts of windows."""
    return [start + timedelta(minutes=each) for each in range(0, int((until - start) / timedelta(minutes=1)), minutes)]


def remember(history, windows, at=START):
    history.remember(snapshot(*windows, at=at), FREE)


def test_an_hour_adds_up_to_its_windows(history):
    """Counters and histograms add up, gauges are means; each tier and pool for itself."""
    times = every(10, START + timedelta(hours=2))
    remember(history, [window(at, index, age=index) for index, at in enumerate(times)])
    remember(history, [window(at, 100.0, tier="dram", namespace=DIGEST) for at in times])
    assert history.sum_up(START + timedelta(hours=3)) == 2
    assert history.sum_up(START + timedelta(hours=3)) == 0
    later = START + timedelta(days=2)
    remember(history, [window(later, 7.0, seconds=30.0)])
    assert history.sum_up(later + timedelta(hours=2)) == 1
    first, second, last = history.windows_since("host-a", START, tier="remote")
    assert [each.start for each in (first, second, last)] == [START, START + timedelta(hours=1), later]
    assert (first.total("tier_lookup_tokens_total", result="hit"), second.values[HIT], last.values[HIT]) == (15, 51, 7)
    assert (first.seconds, last.seconds) == (90.0, 30.0)
    assert (first.gauge(AGE), second.gauge(AGE)) == (2.5, 8.5)
    assert first.values[TOOK] == histogram(6, 12)
    dram = history.windows_since("host-a", START, tier="dram", namespace=DIGEST)
    assert [each.values[HIT] for each in dram] == [600.0, 600.0]


def test_an_hour_waits_for_its_last_window(history):
    """It is summed up once, when its last window has been told."""
    remember(history, [window(START + timedelta(minutes=each)) for each in (0, 59)])
    for minutes in (30, 60, 64):
        assert history.sum_up(START + timedelta(minutes=minutes)) == 0
    assert history.sum_up(START + timedelta(minutes=65)) == 1


def test_less_than_a_day_is_told_in_detail(history):
    """A soak is weighed window by window, summed up or not."""
    times = every(30, START + timedelta(hours=20))
    remember(history, [window(at) for at in times])
    history.sum_up(START + timedelta(hours=30))
    assert [each.start for each in history.windows_since("host-a", START, tier="remote")] == times


def test_hours_that_are_not_summed_up_yet_are_told_in_hours(history):
    """The hour that runs, and what was never summed up before, weigh what other hours weigh."""
    until = START + timedelta(days=2, minutes=45)
    remember(history, [window(at) for at in every(15, until)])
    history.sum_up(until)
    told = history.windows_since("host-a", START, tier="remote")
    assert [each.values[HIT] for each in told] == [4.0] * 48 + [3.0]


def test_a_week_is_read_in_hours(history, monkeypatch):
    """168 hours, of however many windows; before they are summed up, the latest windows alone."""
    monkeypatch.setattr(store, "MOST_WINDOWS", 200)
    times = every(30, START + WEEK)
    remember(history, [window(at) for at in times])
    lately = history.windows_since("host-a", START, tier="remote")
    assert [each.start for each in lately] == times[-200:]
    now = START + WEEK
    assert history.sum_up(now + timedelta(minutes=5)) == 168
    hours = history.windows_since("host-a", now - WEEK, tier="remote")
    assert len(hours) == 168
    assert sum(each.values[HIT] for each in hours) == len(times)


def test_old_hours_are_pruned(history):
    """With the windows of their time."""
    remember(history, [window(at) for at in every(30, START + timedelta(days=3))])
    history.sum_up(START + timedelta(days=4))
    history.prune(START + timedelta(days=2))
    told = history.windows_since("host-a", START, tier="remote")
    assert (len(told), told[0].start) == (24, START + timedelta(days=2))


@pytest.mark.parametrize(
    ("ask", "index"),
    [
        (lambda history: history.windows_since("host-a", START, tier="remote"), "windows_by_tier"),
        (lambda history: history.store_windows("host-a", START), "windows_by_store"),
        (lambda history: history.candidate_windows("host-a", "remote"), "windows_with_candidates"),
        (lambda history: history.prospects("", START), "prospects_by_time"),
        (lambda history: history.prospects(DIGEST, START), "prospects_by_time"),
        (lambda history: history.decisions.standing(START), "reviews_by_decision"),
        (lambda history: history.sum_up(START), "windows_by_store"),
    ],
    ids=["place", "store", "candidates", "prospects", "prospects of one", "standing", "sum up"],
)
def test_what_a_round_asks_has_an_index(history, ask, index):
    """No question of a round, of a judge or of a review reads a whole table."""
    remember(history, [window(START)])
    asked = []
    event.listen(history._engine, "before_cursor_execute", lambda *given: asked.append(given[2:4]))
    ask(history)
    queries = [each for each in asked if each[0].startswith("SELECT")]
    with history._engine.connect() as connection:
        told = [connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values) for query, values in queries]
        plans = [row[3] for rows in told for row in rows]
    assert any(index in plan for plan in plans), plans
    assert not any(plan.startswith("SCAN") and "stores" not in plan for plan in plans), plans
