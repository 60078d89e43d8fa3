"""The ledger: whatever happens in whichever hour, its rows add up to the stores' counters."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.conftest import POLICY
from agent.fakes import DIGEST, START
from tiertune_agent.collector.counters import parse, windows
from tiertune_agent.history.booking import add_up
from tiertune_agent.holdout import measured, sums
from tiertune_agent.ledger import entry
from tiertune_agent.records import Rates, Window

RATES = Rates(gpu_hour=3.6, gib_hour={"dram": 0.25, "remote": 0.5}, network_gib=0.125)
GIB = 2.0**30
AMOUNTS = st.integers(0, 10**6).map(float)
STEPS = st.lists(
    st.tuples(st.integers(1, 4000), st.booleans(), AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS), min_size=1, max_size=12
)


def book(rows, window):
    add_up(rows, [(window, entry(window, RATES))])


def reading(at_s, boot, counters):
    metrics = {
        "saved_seconds_total": {"labels": ["tier"], "rows": [["remote", counters[0]]]},
        "lost_seconds_total": {"labels": ["tier"], "rows": [["remote", counters[1]]]},
        "tier_transfer_bytes_total": {"labels": ["tier", "operation"], "rows": [["remote", "read", counters[2]]]},
        "tier_resident_bytes": {"labels": ["tier", "namespace", "model"], "rows": [["dram", DIGEST, "m", counters[3]]]},
    }
    return parse({"store": "host-a", "boot_id": boot, "time_s": at_s, "metrics": metrics})


@given(STEPS)
def test_the_hours_add_up_to_the_counters(steps):
    """Over restarts and uneven windows: seconds, bytes and money are those counted, each in its hour and pool."""
    rows, at, boot = {}, START, 0
    totals, counted = [0.0] * 4, [0.0] * 3
    before, rent = reading(at.timestamp(), "boot-0", totals), 0.0
    for seconds, restarts, *amounts in steps:
        at += timedelta(seconds=seconds)
        if restarts:
            boot, totals = boot + 1, [0.0] * 4
        totals = [total + amount for total, amount in zip(totals[:3], amounts[:3], strict=True)] + [amounts[3]]
        counted = [total + amount for total, amount in zip(counted, amounts[:3], strict=True)]
        rent += amounts[3] / GIB * 0.25 * seconds / 3600
        after = reading(at.timestamp(), f"boot-{boot}", totals)
        for window in windows(before, after, at)[0]:
            book(rows, window)
        before = after
    rows = list(rows.values())
    assert sum(row.saved for row in rows) == pytest.approx(counted[0])
    assert sum(row.lost for row in rows) == pytest.approx(counted[1])
    assert sum(row.transferred for row in rows) == counted[2]
    money = (counted[0] - counted[1]) / 3600 * 3.6 - rent - counted[2] / GIB * 0.125
    assert sum(row.money for row in rows) == pytest.approx(money)
    assert {(row.namespace, row.tier) for row in rows} <= {("", "remote"), (DIGEST, "dram")}
    assert all(row.hour.minute == 0 for row in rows)


def held(index, requests, each_s):
    """A window with ``requests`` in both groups; those held out take twice ``each_s`` per 1000 tokens."""
    values = {}
    for group, seconds in (("fetched", each_s), ("held", 2 * each_s)):
        figures = {"requests": 1, "seconds": seconds, "tokens": 1000, "seconds2": seconds**2}
        figures |= {"tokens2": 1e6, "seconds_tokens": 1000 * seconds}
        for name, value in figures.items():
            values[f"holdout_sums_total{{group={group},sum={name}}}"] = requests * value
    return Window("host-a", "", "", "remote", START + timedelta(seconds=15 * index), 15.0, values)


def test_what_a_holdout_measured_is_that_of_the_whole_hour():
    """Windows that are too small each make an interval together; it is told beside the modelled seconds."""
    rows, parts = {}, [held(index, 10, 1.0 + index / 10) for index in range(4)]
    for index, part in enumerate(parts, 1):
        book(rows, part)
        (row,) = rows.values()
        assert (row.measured is None) is (index < 3)
    groups = {group: sum((sums(part, group) for part in parts[1:]), sums(parts[0], group)) for group in row.holdout}
    told = measured(groups["held"], groups["fetched"])
    assert (row.measured, row.measured_low, row.measured_high) == (told.saved, told.low, told.high)
    assert row.measured == pytest.approx(46.0)
    assert row.measured_low < 46.0 < row.measured_high
    assert row.saved == 0.0


def test_the_policys_holdout_reaches_the_stores_and_the_ledger(agent, store, rounds, policy_file):
    """A share in the policy is set in the tuning; what the groups count stands in the ledger, apart from the model."""
    policy_file.write_text(POLICY.replace("min_requests: 1", "min_requests: 1, holdout: 0.1"))
    rounds(2)
    assert store.tuning["tiers"]["remote"]["holdout"] == 0.1
    for name, value in held(0, 40, 1.0).values.items():
        labels = dict(part.split("=") for part in name.partition("{")[2].rstrip("}").split(","))
        store.count("holdout_sums_total", {"tier": "remote", **labels}, value)
    rounds(1)
    (row,) = [row for row in agent.history.ledger(START) if (row["tier"], row["namespace"]) == ("remote", "")]
    assert [row[name] for name in ("measured_low", "measured", "measured_high")] == pytest.approx([40.0] * 3)
    assert row["saved"] == pytest.approx(12.0)
    policy_file.write_text(POLICY)
    rounds(2)
    assert store.tuning["tiers"]["remote"]["holdout"] == 0.0
