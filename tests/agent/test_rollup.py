"""Windows in hours: what they add up to, and that no question reads days of windows."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import event

from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import DIGEST, START, after, histogram, ledger_rows, pruned
from agent.fakes import remember as remembered
from agent.fakes import window as told_of
from tiertune_agent.history import measured
from tiertune_agent.history.retention import FORTNIGHT, YEAR
from tiertune_agent.history.rollup import DAY
from tiertune_agent.records import CHANGED, StageWindow

HIT = "tier_lookup_tokens_total{result=hit}"
AGE, TOOK = "fetch_estimate_age_seconds", "gate_actual_seconds"
WEEK = timedelta(days=7)


def window(at, tokens=1.0, *, age=2.0, seconds=15.0, tier="remote", namespace=""):
    return told_of(tier, {HIT: tokens, AGE: age, TOOK: histogram(1, 2)}, at, seconds, namespace=namespace)


def every(minutes, until):
    """Starts of windows."""
    return [after(minutes=each) for each in range(0, int((until - START) / timedelta(minutes=1)), minutes)]


def remember(history, *windows, at=None):
    """As told when the last of them was over."""
    remembered(history, *windows, at=at or max(each.start for each in windows) + timedelta(seconds=15))


def fill(history, minutes, until):
    """A window every so many minutes, since the store was first seen."""
    remembered(history)
    remember(history, *(window(at) for at in every(minutes, until)))


def told(history, since=START):
    """Of the remote."""
    return history.measured.windows_since("host-a", since, tier="remote")


def test_an_hour_adds_up_to_its_windows(history):
    """Counters and histograms add up, gauges are means; each tier and pool for itself."""
    times = every(10, after(hours=2))
    remember(history, *(window(at, index, age=index) for index, at in enumerate(times)))
    for pool in (DIGEST, "cd" * 16):
        remember(history, *(window(at, 100.0, tier="dram", namespace=pool) for at in times))
    assert history.retention.sum_up(after(hours=3)) == 2
    assert history.retention.sum_up(after(hours=3)) == 0
    later = after(days=2)
    remember(history, window(later, 7.0, seconds=30.0))
    assert history.retention.sum_up(later + timedelta(hours=2)) == 1
    first, second, last = told(history)
    assert [each.start for each in (first, second, last)] == [START, after(hours=1), later]
    assert (first.total("tier_lookup_tokens_total", result="hit"), second.values[HIT], last.values[HIT]) == (15, 51, 7)
    assert (first.seconds, last.seconds) == (90.0, 30.0)
    assert (first.gauge(AGE), second.gauge(AGE)) == (2.5, 8.5)
    assert first.values[TOOK] == histogram(6, 12)
    dram = history.measured.windows_since("host-a", START, tier="dram", namespace=DIGEST)
    assert [each.values[HIT] for each in dram] == [600.0, 600.0]


def test_an_hour_waits_for_its_last_window(history):
    """It is summed up once, when its last window has been told."""
    remember(history, window(START), window(after(minutes=59)))
    for minutes in (30, 60, 64):
        assert history.retention.sum_up(after(minutes=minutes)) == 0
    assert history.retention.sum_up(after(minutes=65)) == 1


def test_less_than_a_day_is_told_in_detail(history):
    """A soak is weighed window by window, summed up or not."""
    times = every(30, after(hours=20))
    remember(history, *map(window, times))
    history.retention.sum_up(after(hours=30))
    assert [each.start for each in told(history)] == times


def test_what_less_than_a_day_has_lost_is_told_in_hours(history):
    """A tuner of two hours looks back for twenty, and windows are kept for six."""
    times, now = every(30, after(hours=20)), after(hours=20, minutes=20)
    remember(history, *map(window, times))
    assert history.retention.sum_up(now) == 20
    assert pruned(history, now, timedelta(hours=6)) == 29
    seen = told(history)
    assert [each.start for each in seen] == [*every(60, after(hours=14)), *times[29:]]
    assert [each.values[HIT] for each in seen] == [2.0] * 14 + [1.0] * 11
    assert pruned(history, now, timedelta()) == 11
    assert [each.start for each in told(history, after(hours=5))] == every(60, after(hours=20))[5:]


def test_hours_that_are_not_summed_up_yet_are_told_in_hours(history):
    """The hour that runs, and what was never summed up before, weigh what other hours weigh."""
    until = after(days=2, minutes=45)
    fill(history, 15, until)
    history.retention.sum_up(until)
    assert [each.values[HIT] for each in told(history)] == [4.0] * 48 + [3.0]


def test_a_week_is_read_in_hours(history, monkeypatch):
    """168 hours, of however many windows; before they are summed up, the latest windows alone."""
    monkeypatch.setattr(measured, "MOST_WINDOWS", 200)
    times = every(30, START + WEEK)
    remember(history, *map(window, times))
    lately = told(history)
    assert [each.start for each in lately] == times[-200:]
    now = START + WEEK
    assert history.retention.sum_up(now + timedelta(minutes=5)) == 168
    hours = told(history, now - WEEK)
    assert len(hours) == 168
    assert sum(each.values[HIT] for each in hours) == len(times)


def test_a_window_that_comes_while_its_hour_is_summed_up_is_in_it(history):
    """A round and the summing up begin at the same moment, and the store was away: one of them has it."""
    remember(history, window(START))
    late = window(after(minutes=30), 5.0, seconds=2400.0)
    coming = threading.Thread(target=remember, args=(history, late), kwargs={"at": after(minutes=70)})

    def meanwhile(_connection, _cursor, statement, *_rest):
        if statement.startswith("INSERT INTO hours") and coming.ident is None:
            coming.start()
            coming.join(0.5)  # it may have to wait

    event.listen(history._engine, "before_cursor_execute", meanwhile)
    assert history.retention.sum_up(after(hours=2)) == 1
    coming.join()
    later = after(days=2)
    remember(history, window(later))
    history.retention.sum_up(later + timedelta(hours=2))
    assert told(history)[0].values[HIT] == 6.0


def test_a_window_that_comes_late_is_added_to_its_hour(history):
    """Of a store that was away: hours that are summed up already take it in, also those that had none of its tier."""
    now = after(hours=3)
    remember(history, window(START), window(after(hours=2)))
    assert history.retention.sum_up(now + timedelta(hours=1)) == 2
    late = after(minutes=30)
    remember(history, window(late, 5.0, seconds=7200.0), window(late, 6.0, tier="dram"), at=now)
    assert history.retention.sum_up(now + timedelta(hours=1)) == 0
    later = after(days=2)
    remember(history, window(later))
    assert history.retention.sum_up(later + timedelta(hours=2)) == 1
    first, *_ = hours = told(history)
    assert [(each.start, each.values[HIT], each.seconds) for each in hours] == [
        *((START, 6.0, 7215.0), (after(hours=2), 1.0, 15.0), (later, 1.0, 15.0))
    ]
    assert first.values[TOOK] == histogram(2, 4)
    assert [each.values[HIT] for each in history.measured.windows_since("host-a", START, tier="dram")] == [6.0]


def test_gauges_are_means_over_the_seconds(history):
    """A late window weighs what it covers, and not as much as all before it; so does an hour in its day."""
    remember(history, *(window(after(minutes=each), age=2.0, seconds=60.0) for each in range(54)))
    remember(history, window(after(hours=1), age=10.0, seconds=60.0))
    assert history.retention.sum_up(after(hours=3)) == 2
    remember(history, window(after(minutes=54), age=12.0, seconds=360.0))
    now = START + FORTNIGHT + timedelta(days=2)
    first, second = told(history, START - DAY)
    assert (first.seconds, first.gauge(AGE), second.gauge(AGE)) == (3600.0, 3.0, 10.0)
    assert history.retention.fold(now) == 1
    (day,) = told(history, START - DAY)
    assert day.gauge(AGE) == pytest.approx((3600 * 3.0 + 60 * 10.0) / 3660)


def test_a_gauge_that_stays_the_same_is_its_mean_to_the_bit(history):
    """Bytes stay whole, however uneven the windows are."""
    capacity = "tier_capacity_bytes{state=effective}"
    odd = (told_of("dram", {capacity: float(3 << 40)}, after(minutes=n), 15.0 + n / 7) for n in range(40))
    remember(history, *odd)
    assert history.retention.sum_up(after(days=2)) == 1
    (hour,) = history.measured.windows_since("host-a", START - DAY, tier="dram")
    assert hour.values[capacity] == 3 << 40


def test_windows_are_pruned_and_hours_stay(history):
    """What windows add up to is kept for a year."""
    fill(history, 30, after(days=3))
    now = after(days=4)
    history.retention.sum_up(now)
    assert pruned(history, now, timedelta(days=2)) == 96
    assert len(told(history)) == 72
    assert pruned(history, now + YEAR, timedelta(days=2)) == 48 + 72


def asked_of(history):
    """Statements and their values, as they are executed."""
    asked = []
    event.listen(history._engine, "before_cursor_execute", lambda *given: asked.append(given[2:4]))
    return asked


def explained(connection, asked):
    """Rows of the database's plans for these."""
    explain = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN"
    return [row for query, values in asked for row in connection.exec_driver_sql(f"{explain} {query}", values)]


def test_pruning_reads_no_table_whole(history):
    """Each store's rows go by themselves: those of a large fleet, kept for weeks, would take longer than any may."""
    remembered(history, window(START), stages=(StageWindow("host-a", "all", "prefill", "", START, 15.0, 3.5, 700.0),))
    history.retention.sum_up(after(hours=2))
    asked, engine, gone = asked_of(history), history._engine, []
    event.listen(engine, "after_cursor_execute", lambda *told: gone.append(told[1].rowcount))
    history.retention.prune(after(days=4) + YEAR, DAY)
    assert sum(count for count, (query, _) in zip(gone, asked, strict=True) if query.startswith("DELETE")) == 3
    assert len([each for each in asked if each[0].startswith("DELETE") and "answers" not in each[0]]) == 4
    if engine.dialect.name == "sqlite":
        asked = [each for each in asked if "answers" not in each[0]]
        with engine.connect() as connection:
            plans = " ".join(row[3] for row in explained(connection, asked))
        assert "SCAN stores" in plans
        assert not any(f"SCAN {table}" in plans for table in ("windows", "stage_windows", "hours", "prospects"))


def test_no_statement_prunes_weeks(history):
    """After `keep` was lowered: it would take longer than any may, fail, and be tried again for ever."""
    remember(history, *(window(at) for at in every(60, after(days=30))))
    history.retention.sum_up(after(days=31))
    gone, cursors = [], "after_cursor_execute"
    event.listen(history._engine, cursors, lambda *told: gone.append(told[1].rowcount * told[2].startswith("DELETE")))
    assert pruned(history, after(days=31), timedelta(hours=6)) == sum(gone)
    assert max(gone) <= 24


def test_ageing_asks_as_often_for_many_stores_as_for_one(history):
    """Of the names that an autoscaled fleet had within a fortnight most have nothing to sum up, to fold or to drop."""

    def asked(*stores):
        for store in stores:
            kept = [told_of("remote", {HIT: 1.0}, START + index * DAY, store=store) for index in range(2)]
            remembered(history, *kept, at=after(days=2), store=store, url=f"http://{store}:7410")
        history.retention.sum_up(after(days=3))
        statements, now = asked_of(history), after(days=10)
        done = history.retention.sum_up(now), history.retention.fold(now), pruned(history, now, 30 * DAY)
        assert done == (0, 0, 0)
        return len(statements)

    assert asked("pod-0") == asked(*(f"pod-{index}" for index in range(1, 30)))


def test_a_window_that_is_in_no_hour_yet_is_not_pruned(history):
    """The agent was away, or its summing up failed: what was measured is in the hours before it goes."""
    fill(history, 30, after(days=1))
    now = after(days=4)
    assert pruned(history, now, DAY) == 0
    history.retention.sum_up(now)
    assert pruned(history, now, DAY) == 48
    hours = told(history, START - DAY)
    assert sum(each.values[HIT] for each in hours) == 48


def test_old_hours_are_days(history):
    """Days hold what their hours held, of windows and of the ledger; younger hours stay hours."""
    fill(history, 30, after(days=3))
    now = after(days=4)
    history.retention.sum_up(now)
    before = told(history), history.ledger.account(START)
    booked = ledger_rows(history, START)
    assert history.retention.fold(now) == 0
    assert history.retention.fold(START + FORTNIGHT + timedelta(days=2)) == 2
    assert history.retention.fold(START + FORTNIGHT + timedelta(days=2)) == 0
    days, hours = told(history, START - DAY), before[0]
    midnight = START.replace(hour=0)
    assert [each.start for each in days[:3]] == [midnight, midnight + DAY, midnight + 2 * DAY]
    assert [each.values[HIT] for each in days[:3]] == [24.0, 48.0, 2.0]
    assert days[2:] == [each for each in hours if each.start >= midnight + 2 * DAY]
    for figure in (lambda each: each.seconds, lambda each: each.values[HIT], lambda each: each.values[TOOK].count):
        assert sum(map(figure, days)) == sum(map(figure, hours))
    rows = ledger_rows(history, START - DAY)
    assert [row["hour"] for row in rows[:2]] == [midnight.isoformat(), (midnight + DAY).isoformat()]
    assert len(rows) == 2 + sum(row["hour"] >= (midnight + 2 * DAY).isoformat() for row in booked)
    assert sum(row["seconds"] for row in rows) == sum(row["seconds"] for row in booked)
    assert history.ledger.account(START - DAY) == before[1]


def test_a_ledgers_rows_of_an_hour_come_in_order(history):
    """By tier and pool, whatever was booked first."""
    remembered(history)
    pools = ["cd" * 16, "ab" * 16]
    for pool in pools:
        for tier in ("remote", "dram"):
            remember(history, window(START, tier=tier, namespace=pool))
    rows = [(row["namespace"], row["tier"]) for row in ledger_rows(history, START)]
    assert rows == [(pool, tier) for pool in sorted(pools) for tier in ("dram", "remote")]


def test_a_store_that_came_while_the_clock_was_ahead_is_folded_all_the_same(history):
    remembered(history, at=START + YEAR)
    remember(history, window(START))
    history.retention.sum_up(after(days=4))
    assert history.retention.fold(START + FORTNIGHT + timedelta(days=2)) == 1


@pytest.mark.parametrize(
    ("ask", "index"),
    [
        (told, "windows_by_tier"),
        (lambda history: history.measured.fleet_windows(["host-a"], START), "windows_by_store"),
        (lambda history: history.measured.prospects("", START), "prospects_by_time"),
        (lambda history: history.measured.prospects(DIGEST, START), "prospects_by_time"),
        (lambda history: history.changed.standing(START, ["host-a"], []), "ix_verdicts_decision"),
        (lambda history: history.decisions.find(states=CHANGED, since=START), "decisions_by_update"),
        (lambda history: history.journal.tell_incidents({("thrash", "host-a"): ""}, START), "(kind=? AND store=?"),
        (lambda history: history.retention.sum_up(after(hours=2)), "windows_by_store"),
        (lambda history: history.decisions.undoing(), "decisions_to_undo"),
    ],
    ids=[
        *("place", "store", "prospects", "prospects of one", "standing"),
        *("moved lately", "incidents", "sum up", "undoing"),
    ],
)
def test_what_a_round_asks_has_an_index(history, ask, index):
    """No question of a round, of a judge or of a review reads a whole table."""
    remember(history, window(START))
    asked = asked_of(history)
    ask(history)
    queries = [each for each in asked if each[0].startswith("SELECT")]
    sqlite = history._engine.dialect.name == "sqlite"
    with history._engine.connect() as connection:
        if not sqlite:
            connection.exec_driver_sql("SET enable_seqscan = off")  # tables of one row are read whole
        plans = [row[3 if sqlite else 0] for row in explained(connection, queries)]
    assert not sqlite or any(index in plan for plan in plans), plans  # PostgreSQL chooses by what a table holds
    whole = [plan for plan in plans if plan.strip().startswith("SCAN" if sqlite else ("Seq Scan", "->  Seq Scan"))]
    assert not any("stores" not in plan for plan in whole), plans


def test_commands_and_open_incidents_are_read_newest_first_from_an_index(history):
    """All that there ever were are neither read nor sorted for a few of them."""
    asked = asked_of(history)
    history.journal.audited()
    history.journal.incidents()
    if history._engine.dialect.name == "sqlite":
        with history._engine.connect() as connection:
            plans = [row[3] for row in explained(connection, [one for one in asked if one[0].startswith("SELECT")])]
        assert plans[:2] == ["SCAN audit USING INDEX audit_by_time", "SCAN incidents USING INDEX incidents_still"]
        assert not any("TEMP B-TREE" in plan for plan in plans)
