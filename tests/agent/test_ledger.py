"""The ledger: whatever happens in whichever hour, its rows add up to the stores' counters."""

from dataclasses import replace
from datetime import timedelta
from functools import reduce

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from agent.agents import POLICY, client_of, pass_windows
from agent.fakes import DIGEST, START, FakeStore, ledger_rows, window
from agent.test_published import samples
from tiertune_agent.collector.counters import parse, windows
from tiertune_agent.history.ledger import add_up
from tiertune_agent.records import Rates
from tiertune_agent.remote.server import RedisServer, ServerMemory
from tiertune_agent.verdicts.holdout import GROUPS, added, measured, sums
from tiertune_agent.verdicts.ledger import entry

pytestmark = pytest.mark.slow

RATES = Rates(gpu_hour=3.6, gib_hour={"dram": 0.25, "remote": 0.5}, network_gib=0.125)
GIB = 2.0**30
AMOUNTS = st.integers(0, 10**6).map(float)
STEPS = st.lists(
    st.tuples(st.integers(1, 4000), st.booleans(), AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS), min_size=1, max_size=12
)


ONE, OTHER = "redis://a:6379/0", "redis://b:6379/0"
"""Servers of a remote."""


@pytest.fixture
def holds(monkeypatch):
    """Bytes in each server of the remote, by its address; one that is not there does not answer."""
    used = {}

    def held(server):
        if server.name not in used:
            raise redis.ConnectionError("refused")
        told = {"maxmemory": 0, "policy": "allkeys-lru", "evicted_keys": 0, "run_id": "1", "version": "7.0.0"}
        return ServerMemory(server=server.name, used_bytes=used[server.name], **told)

    monkeypatch.setattr(RedisServer, "held", held)
    return used


@pytest.fixture
def fleet(agents, clock, holds):
    """Makes agents over two stores that share a remote of two servers; ``pass_by`` lets windows pass for one."""
    stores = [FakeStore(clock, name) for name in ("host-a", "host-b")]

    def make(*, named=True):
        return agents(*stores, remote={"url": [ONE, OTHER]} if named else None)

    make.stores = stores
    make.pass_by = lambda agent, windows: pass_windows(agent, stores, clock, windows, tick=True)
    return make


def of_remote(agent):
    """The ledger's rows of the remote as a whole, by store."""
    rows = ledger_rows(agent.history, START)
    return {row["store"]: row for row in rows if (row["tier"], row["namespace"]) == ("remote", "")}


def money(agent):
    """Of the remote by the counters, by store: what remains."""
    signs, found = {"saved": 1, "lost": -1, "rent": -1, "network": -1}, {}
    for labels, value in samples(agent.metrics, "tiertune_agent_money_total"):
        if labels["tier"] == "remote":
            found[labels["store"]] = found.get(labels["store"], 0.0) + signs[labels["kind"]] * value
    return found


def book(rows, one):
    add_up(rows, [(one, entry(one, RATES))], {})


def reading(at_s, boot, counters):
    metrics = {
        "saved_seconds_total": {"labels": ["tier"], "rows": [["remote", counters[0]]]},
        "lost_seconds_total": {"labels": ["tier"], "rows": [["remote", counters[1]]]},
        "tier_transfer_bytes_total": {"labels": ["tier", "operation"], "rows": [["remote", "read", counters[2]]]},
        "tier_resident_bytes": {
            "labels": ["tier", "namespace", "model"],
            "rows": [["dram", DIGEST, "m", counters[3]], ["remote", "", "", 2 * counters[3]]],
        },
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
        rent += amounts[3] / GIB * (0.25 + 2 * 0.5) * seconds / 3600
        after = reading(at.timestamp(), f"boot-{boot}", totals)
        for one in windows(before, after, at)[0]:
            book(rows, one)
        before = after
    rows = list(rows.values())
    assert sum(row.saved or 0.0 for row in rows) == pytest.approx(counted[0])
    assert sum(row.lost or 0.0 for row in rows) == pytest.approx(counted[1])
    assert sum(row.transferred or 0 for row in rows) == counted[2]
    money = (counted[0] - counted[1]) / 3600 * 3.6 - rent - counted[2] / GIB * 0.125
    assert sum(row.money for row in rows) == pytest.approx(money)
    assert {(row.namespace, row.tier) for row in rows} <= {("", "remote"), (DIGEST, "dram")}
    assert all(row.hour.minute == 0 for row in rows)


def held(index, requests, each_s, *, slower=2.0, fetched=None):
    """A window with ``requests`` in both groups; those held out take ``slower`` times ``each_s`` per 1000 tokens."""
    values = {}
    for group, seconds, count in (("fetched", each_s, fetched or requests), ("held", slower * each_s, requests)):
        figures = {"requests": 1, "seconds": seconds, "tokens": 1000, "seconds2": seconds**2}
        figures |= {"tokens2": 1e6, "seconds_tokens": 1000 * seconds}
        for name, value in figures.items():
            values[f"holdout_sums_total{{group={group},sum={name}}}"] = count * value
    return window("remote", values, index)


def test_what_a_holdout_measured_is_that_of_the_whole_hour():
    """Windows that are too small each make an interval together; it is told beside the modelled seconds."""
    rows, parts = {}, [held(index, 10, 1.0 + index / 10) for index in range(4)]
    for index, part in enumerate(parts, 1):
        book(rows, part)
        (row,) = rows.values()
        assert (row.measured is None) is (index < 3)
    told = measured([reduce(added, ({group: vars(sums(part, group)) for group in GROUPS} for part in parts))])
    assert (row.measured, row.measured_low, row.measured_high) == (told.saved, told.low, told.high)
    assert row.measured == pytest.approx(46.0)
    assert row.measured_low < 46.0 < row.measured_high
    assert row.saved == 0.0


def test_the_policys_holdout_reaches_the_stores_and_the_ledger(agent, store, rounds, policy_file):
    """A share in the policy is set in the tuning; what the groups count stands in the ledger, apart from the model."""
    hold_out(store, rounds, policy_file, 0.1)
    count_held(store, rounds, held(0, 40, 1.0))
    row = of_remote(agent)["host-a"]
    assert [row[name] for name in ("measured_low", "measured", "measured_high")] == pytest.approx([40.0] * 3)
    assert row["saved"] == pytest.approx(12.0)
    policy_file.write_text(POLICY)
    rounds(2)
    assert store.tuning["tiers"]["remote"]["holdout"] == 0.0


@pytest.mark.parametrize("apart_s", [0, 3600], ids=["an hour", "a folded day"])
def test_a_share_that_changed_measures_no_saving_by_itself(agent, store, rounds, policy_file, apart_s):
    """Dear requests came while few were held out, cheap ones while many were; fetching saved nothing of either."""
    hold_out(store, rounds, policy_file, 0.1)
    count_held(store, rounds, held(0, 40, 3.0, slower=1.0, fetched=360))
    store.clock.advance(apart_s)
    hold_out(store, rounds, policy_file, 0.5)
    count_held(store, rounds, held(0, 200, 1.0, slower=1.0))
    if apart_s:
        agent.history.retention.fold(store.clock.now() + timedelta(days=30))
    rows = ledger_rows(agent.history, START - timedelta(days=1))
    (row,) = [row for row in rows if (row["tier"], row["namespace"]) == ("remote", "")]
    assert [row[name] for name in ("measured_low", "measured", "measured_high")] == pytest.approx([0.0] * 3)


def hold_out(store, rounds, policy_file, share):
    """By the policy, until the store does."""
    policy_file.write_text(POLICY.replace("min_requests: 1", f"min_requests: 1, holdout: {share}"))
    rounds(2)
    assert store.tuning["tiers"]["remote"]["holdout"] == share


def count_held(store, rounds, told):
    """In the store, for a round."""
    for name, value in told.values.items():
        labels = dict(part.split("=") for part in name.partition("{")[2].rstrip("}").split(","))
        store.count("holdout_sums_total", value, tier="remote", **labels)
    rounds(1)


@pytest.mark.parametrize(
    ("told", "rates", "rent", "remains"),
    [
        ({}, RATES, None, None),
        ({"tier_resident_bytes": 4 * GIB}, RATES, 2.0, 1.6),
        ({"tier_resident_bytes": 0.0}, RATES, 0.0, 3.6),
        ({}, replace(RATES, remote_apart=True), 0.0, 3.6),
        ({"tier_resident_bytes": 4 * GIB}, replace(RATES, remote_apart=True), 2.0, 1.6),
        ({}, replace(RATES, gib_hour={}), 0.0, 3.6),
    ],
    ids=["nobody tells it", "a directory", "an empty one", "the fleet's", "a directory beside it", "free"],
)
def test_rent_that_nobody_tells_is_unknown_and_not_nothing(told, rates, rent, remains):
    """What a remote holds is told by a store that bounds its part, or once for the fleet; else no money is known."""
    booked = entry(window("remote", {"saved_seconds_total": 3600.0, **told}, seconds=3600.0), rates)
    assert (booked.amounts["rent"], booked.money) == (rent, remains)


def test_the_network_is_paid_for_what_went_over_it():
    """Bytes that the store's codec spared it are neither moved nor paid; more than moved were never spared."""
    told = {"tier_transfer_bytes_total{operation=write}": 3 * GIB, "tier_transfer_bytes_total{operation=read}": 1 * GIB}
    told["tier_spared_bytes_total{operation=write}"] = 2 * GIB
    booked = entry(window("remote", told, seconds=3600.0), RATES)
    assert (booked.transferred, booked.amounts["network"]) == (2 * GIB, 0.25)
    alone = entry(window("remote", {"tier_spared_bytes_total{operation=read}": 1.0}), RATES)
    assert (alone.transferred, alone.amounts["network"]) == (0, 0.0)


@pytest.mark.parametrize(
    ("tier", "namespace", "told", "known"),
    [
        ("dram", DIGEST, {"tier_resident_bytes": 4 * GIB}, (None, None, 4 * GIB, None, -1.0)),
        ("dram", "", {"saved_seconds_total": 3600.0}, (3600.0, 0.0, None, None, 3.6)),
        ("disk", "", {"saved_seconds_total": 3600.0}, (3600.0, 0.0, None, 0.0, 3.6)),
        ("disk", DIGEST, {"tier_lookup_tokens_total": 5.0}, (None, None, 0.0, None, 0.0)),
        ("remote", DIGEST, {"tier_lookup_tokens_total": 5.0}, (None, None, None, None, None)),
        ("gpu", DIGEST, {"tier_lookup_tokens_total": 5.0}, (None, None, None, None, 0.0)),
    ],
    ids=["of a pool", "of its tier", "of the disk", "of an empty pool", "of a pool's part of the remote", "of engines"],
)
def test_what_is_booked_in_another_row_is_not_nothing_here(tier, namespace, told, known):
    """Seconds and traffic are the tier's, bytes held the pool's: where they are not told they are null, not zero.

    So is what nobody counts: traffic of DRAM, bytes that engines hold.
    """
    rates = replace(RATES, remote_apart=True)
    booked = entry(window(tier, told, seconds=3600.0, namespace=namespace), rates)
    assert (booked.saved, booked.lost, booked.bytes, booked.transferred, booked.money) == known


def test_what_the_fleets_redis_holds_is_paid_once_however_many_stores_share_it(fleet, holds):
    """All its servers together, in one row; rows, sums and counters tell the same."""
    holds |= {ONE: 1 << 40, OTHER: 3 << 40}
    agent = fleet()
    fleet.pass_by(agent, 5)
    rows = of_remote(agent)
    rent = 4096 * 4 / 730 * 60 / 3600
    assert {name: row["seconds"] for name, row in rows.items()} == {"fleet": 60.0, "host-a": 60.0, "host-b": 60.0}
    assert (rows["fleet"]["bytes"], rows["fleet"]["money"]) == (4 << 40, pytest.approx(-rent))
    assert rows["host-a"]["money"] == pytest.approx(rows["host-a"]["saved"] * 2.5 / 3600)
    assert rows["host-a"]["bytes"] is None
    assert [rows["fleet"][name] for name in ("saved", "lost", "transferred")] == [None] * 3, "stores tell it"
    summed = agent.history.ledger.account(START)["remote"]["money"]
    assert summed == pytest.approx(sum(row["money"] for row in rows.values()))
    assert money(agent) == pytest.approx({name: row["money"] for name, row in rows.items()})
    assert [store.name for store in agent.history.stores()] == ["host-a", "host-b"]


def test_no_second_is_paid_twice_whoever_leads(fleet, holds):
    """A new leader, one that leads again, and one after a restart begin with what they read first."""
    holds |= {ONE: 1 << 40, OTHER: 0}
    first, second = fleet(), fleet()
    seconds = []
    for leader, other in ((first, second), (second, first), (first, second), (fleet(), first)):
        other.leader.resign()
        fleet.pass_by(leader, 3)
        other.stand()
        seconds.append(of_remote(leader)["fleet"]["seconds"])
    assert seconds == [30.0, 60.0, 90.0, 120.0]


def test_while_the_redis_is_away_nobody_knows_what_it_costs(fleet, holds, clock):
    """Seconds are booked and no money, and the page names the tier; when it is back, so is its rent, from then on."""
    agent = fleet()
    fleet.pass_by(agent, 3)
    assert all(row["money"] is None and row["saved"] > 0 for row in of_remote(agent).values())
    assert agent.history.ledger.account(START)["remote"]["money"] is None
    assert money(agent) == {}
    with client_of(agent) as http:
        assert "without remote: nobody tells what is held there" in http.get("/").text
    holds |= {ONE: 1 << 40, OTHER: 0}
    fleet.pass_by(agent, 1)
    assert of_remote(agent)["fleet"]["seconds"] == 15.0
    assert set(money(agent)) == {"fleet", "host-a", "host-b"}
    with client_of(agent) as http:
        assert "without remote" not in http.get("/").text


def test_a_redis_that_the_agent_was_not_told_of_has_no_known_rent(fleet):
    """Stores that share a directory tell their parts of it; that one says nothing is no zero."""
    fleet.stores[1].count("tier_resident_bytes", 4 * GIB, tier="remote", namespace="", model="")
    agent = fleet(named=False)
    fleet.pass_by(agent, 3)
    rows = of_remote(agent)
    worth, rent = rows["host-b"]["saved"] * 2.5 / 3600, 4 * 4 / 730 * 30 / 3600
    assert (rows["host-a"]["money"], rows["host-b"]["money"]) == (None, pytest.approx(worth - rent))
    assert set(rows) == set(money(agent)) | {"host-a"}
