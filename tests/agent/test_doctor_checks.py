"""The doctor's checks: one way each in which a deployment is broken, and the same when it is healthy."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.doctor_cases import (
    CASES,
    ONE,
    OTHER,
    agent,
    client,
    dropped,
    facts,
    heard,
    labelled,
    slow_remote,
    store,
    tiers,
    two_engines,
    with_agent,
    with_engine,
    with_store,
    written,
)
from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.roster import FILE_PROBLEM, NAME_PROBLEM
from tiertune_agent.doctor.checks import NAMES, checks_of, findings, of_traffic
from tiertune_agent.doctor.checks.of_agent import ALSO_LOOKED_FOR, INCIDENTS, OF_SOURCES
from tiertune_agent.doctor.checks.of_engines import WANTED
from tiertune_agent.doctor.facts import Clock, EngineFacts, StoreFacts
from tiertune_agent.incidents.detectors import DETECTORS
from tiertune_agent.incidents.watch import TROUBLES


def of(name, told):
    return [finding for finding in findings(told) if finding.check == name]


@pytest.mark.parametrize("name", CASES)
def test_what_is_broken_is_found_with_its_mend(name):
    """One finding, which says what is wrong with its figures, and what to do; it alone is found."""
    broken, _, words = CASES[name]
    found = findings(broken)
    assert [one.check for one in found] == [name]
    text = f"{found[0].where} {found[0].wrong} {found[0].mend}"
    assert [word for word in words if word not in text] == []
    assert found[0].mend


@pytest.mark.parametrize("name", CASES)
def test_what_is_healthy_is_not_found(name):
    """The same facts but for the fault raise nothing at all."""
    assert findings(CASES[name][1]) == []


def test_every_check_has_a_case():
    """Those of incidents are the agent's, and have their own test."""
    assert CASES.keys() | INCIDENTS.keys() | ALSO_LOOKED_FOR.keys() == NAMES


@pytest.mark.parametrize("kind", [*INCIDENTS, *ALSO_LOOKED_FOR])
def test_an_open_incident_is_told_with_its_mend(kind):
    """As the agent wrote it; of a kind that is only history, or advice, nothing is said."""
    found = findings(with_agent({"kind": kind, "store": "host-a", "message": "as it was"}))
    assert [(one.check, one.where, one.wrong) for one in found] == [(kind, "host-a", "as it was")]
    assert found[0].mend
    assert findings(with_agent({"kind": "something_else", "store": "host-a", "message": "m"})) == []


@pytest.mark.parametrize("kind", OF_SOURCES)
def test_an_incident_of_an_observed_source_is_told_with_the_mend_of_a_source(kind):
    """Whether it ever answered or not: it stands under observe, has no token, and is no store to start."""
    met = heard("engine-a", observed="vllm")
    for told in ({"stores": [met]}, {"unheard": {"stores": [], "sources": ["engine-a"]}}):
        incident = {"kind": kind, "store": "engine-a", "message": "as it was"}
        (found,) = findings(facts(agent=agent(incident, **told)))
        assert found.mend == OF_SOURCES[kind]


def test_every_kind_of_incident_is_told():
    """What the agent opens of stores and policy is named here with its mend."""
    kinds = {*TROUBLES, *DETECTORS, "tier_dead", "tuning_drift", "policy_invalid", FILE_PROBLEM, NAME_PROBLEM}
    assert kinds <= NAMES


def test_a_check_that_another_module_imports_is_made_once():
    """Else what it finds would be told twice."""
    borrower = SimpleNamespace(corrupt_chunks=of_traffic.corrupt_chunks)
    assert checks_of(of_traffic, borrower) == checks_of(of_traffic)


def test_the_page_lists_every_check():
    """Nobody reads of a check that there is not, or misses one that there is."""
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    table = page.partition("## What it finds")[2].partition("## Measure")[0]
    rows = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", table)) >= NAMES
    assert set(rows) <= NAMES


def test_what_a_dead_tier_or_a_flush_dropped_is_no_slow_tier():
    """A remote that was away for a night, and a flush, drop all that waits: no faster one would have taken it."""
    drops = [dropped(reason, 5000.0) for reason in ("dead", "flushed", "closing")]
    assert findings(with_store(*drops, written(900.0))) == []
    found = of("write_behind_drops", with_store(*drops, dropped("queue_full", 100.0), written(900.0)))
    assert [one.wrong for one in found] == ["100 of 1000 chunks never reached remote (queue_full)"]


def test_drops_are_told_with_the_reasons_of_their_own_tier_and_a_mend_for_them():
    """Where writes fail, a faster tier is no help; what another tier dropped is told there."""
    drops = [dropped("full", 60.0), dropped("evicted", 40.0), dropped("queue_full", 100.0, tier="disk")]
    found = of("write_behind_drops", with_store(*drops, written(900.0)))
    assert [one.wrong for one in found] == [
        "100 of 100 chunks never reached disk (queue_full)",
        "100 of 1000 chunks never reached remote (evicted, full)",
    ]
    assert ["second_access" in one.mend for one in found] == [True, False]
    assert found[1].mend.startswith("writes to remote fail")


def test_what_another_engine_is_storing_is_not_lost():
    """Engines that compute a prompt at the same time: one of them stores it."""
    chunks = labelled("tiertune_engine_stored_chunks_total", "result", stored=60, busy=40)
    assert findings(with_engine(chunks)) == []


def test_damage_in_memory_is_found():
    """Engines find it, and of DRAM no store times a read: it is counted as an error alone."""
    damaged = {"tier": "dram", "operation": "read", "reason": "corrupt"}
    found = of("corrupt_chunks", with_store(("tier_errors_total", damaged, 3.0)))
    assert [one.wrong for one in found] == ["3 chunks in dram differed from what was written, and had to be recomputed"]


def test_what_a_check_saw_the_incident_does_not_repeat():
    """A dead remote is one finding, though the agent has an incident of it; that of another store is told."""
    dead = [{"kind": "tier_dead", "store": name, "message": "remote: away"} for name in ("host-a", "host-b")]
    here = store(tiers=tiers(remote={"health": "dead", "reason": "timeout"}))
    found = findings(facts(agent=agent(*dead), stores=[here]))
    assert [(one.where, one.wrong) for one in found] == [
        ("host-a", "remote is dead: timeout"),
        ("host-b", "remote: away"),
    ]


def test_a_store_that_nobody_reached_is_one_finding():
    """The agent calls it by host and port, the doctor by its address."""
    gone = {"kind": "store_unreachable", "store": "host-a:7410", "message": "m"}
    told = facts(agent=agent(gone), stores=[StoreFacts("http://host-a:7410", problem="timed out")])
    assert len(findings(told)) == 1


def test_errors_come_first():
    """Whatever the order of the stores."""
    dead = store("host-b", tiers=tiers(disk={"health": "dead", "reason": "io"}))
    assert [one.severity for one in findings(facts(stores=[store(clients=[]), dead]))] == ["error", "warning"]


@pytest.mark.parametrize(
    ("part", "mend"),
    [
        ("weights", "same revision"),
        ("chunk_tokens", "chunk_tokens"),
        ("kv_layout", "--block-size"),
        ("dtype", "--dtype"),
    ],
)
def test_a_namespace_is_mended_by_what_differs(part, mend):
    """Each part of a namespace has its own advice."""
    (found,) = findings(two_engines(OTHER, {part: "another"}))
    assert f"differ in {part}" in found.wrong
    assert mend in found.mend


def test_namespaces_of_an_older_store_differ_in_something():
    """Where a store does not tell the parts, the finding says so and guesses nothing."""
    pool = {"model": "llama"}
    old = [
        store(name, clients=[client("e", digest)], namespaces={}, pools={digest: pool})
        for name, digest in (("host-a", ONE), ("host-b", OTHER))
    ]
    (found,) = findings(facts(stores=old))
    assert "do not tell" in found.wrong


def test_engines_of_different_models_may_differ():
    """A fleet serves several models, each in its own namespace."""
    assert findings(two_engines(OTHER, {"model": "qwen"})) == []


def test_an_unsalted_request_counts_where_tenants_have_quotas():
    """One is enough: nobody's quota pays for it."""
    told = with_store(("requests_total", {"salted": "no"}, 1.0), tuning={"tenants": {"ab": {"quota_bytes": 1}}})
    (found,) = of("unsalted_traffic", told)
    assert "1 of 1 request had no salt, while quotas are set for 1 tenant" in found.wrong


def test_a_slow_remote_that_is_off_already_is_told_apart():
    """The mend is another one; and before enough requests found something there, nothing is said."""
    (found,) = findings(slow_remote(1e9, fetch="off"))
    assert "off already" in found.mend
    assert findings(slow_remote(1e9, requests=5)) == []


def test_a_dead_server_of_several_is_named():
    """The tier itself is only slow then."""
    servers = [{"server": "r1:6379/0", "health": "dead", "reason": "timeout"}, {"server": "r2:6379/0", "health": "ok"}]
    (found,) = findings(with_store(tiers=tiers(remote={"health": "slow", "reason": "", "servers": servers})))
    assert (found.check, "r1:6379/0: timeout" in found.wrong) == ("tier_dead", True)


def test_a_dead_server_that_tells_no_more_is_named_still():
    """Neither its name nor why; a tier that does not tell its own health is none that the store has."""
    servers = [{"health": "dead"}]
    (found,) = findings(
        with_store(tiers=tiers(remote={"health": "slow", "servers": servers}, disk={"servers": servers}))
    )
    assert (found.check, found.wrong) == ("tier_dead", "remote is slow: a server: no reason told")


def test_a_full_tier_is_mended_by_room_and_not_by_a_faster_way():
    """Also where it is one server of several."""
    for reason in ("full: 8 writes in a row found no room", "1 of 3 servers: r1:6379/0 is slow: full: 8 writes"):
        (found,) = findings(with_store(tiers=tiers(remote={"health": "slow", "reason": reason})))
        assert (found.check, found.severity, found.mend[:9]) == ("tier_slow", "warning", "make room")


def test_a_tier_on_the_way_back_is_dead_still():
    """Nothing is fetched from it until it has answered more often."""
    back = {"health": "recovering", "reason": "a probe succeeded"}
    (found,) = findings(with_store(tiers=tiers(remote=back)))
    assert (found.check, found.severity) == ("tier_dead", "error")


@pytest.mark.parametrize(
    ("told", "called"), [([heard("host-a")], "host-a"), ([], "http://host-a:7410"), (None, "http://host-a:7410")]
)
def test_a_bypass_is_lifted_by_who_knows_the_store(told, called):
    """Through the agent that lists it; of one that no agent lists the command names the address, and so needs none."""
    parts = {} if told is None else {"agent": agent(stores=told)}
    (found,) = of("bypassed", facts(stores=[store(tuning={"bypass": True})], **parts))
    assert (found.where, found.mend) == ("host-a", f"tiertune bypass off --store {called}")


@pytest.mark.parametrize("reason", ["remote fetch is off by tuning", "the store is bypassed"])
def test_a_tier_that_is_passed_by_on_purpose_is_well(reason):
    """So a tuner, or an operator, decided; that a store was left bypassed is told of the store."""
    assert findings(with_store(tiers=tiers(remote={"health": "bypassed", "reason": reason}))) == []


def test_a_terabyte_that_is_still_being_provisioned_is_not_missing():
    """Ten minutes after the start of a store, whose memory grows by a GiB a second; after an hour it is short."""
    dram = {"applied": {"capacity_bytes": 1 << 40}, "effective": {"capacity_bytes": 600 << 30}}
    for uptime_s, found in ((600.0, 0), (3600.0, 1)):
        assert len(of("capacity_not_effective", with_store(pools={ONE: {"dram": dram}}, uptime_s=uptime_s))) == found


def test_pools_are_provisioned_one_after_another():
    """Two of half a terabyte take as long as one of a terabyte."""
    dram = {"applied": {"capacity_bytes": 512 << 30}, "effective": {"capacity_bytes": 400 << 30}}
    both = {namespace: {"dram": dram} for namespace in (ONE, OTHER)}
    for uptime_s, found in ((900.0, 0), (3600.0, 2)):
        assert len(of("capacity_not_effective", with_store(pools=both, uptime_s=uptime_s))) == found


def test_an_engine_that_tells_no_metrics_is_named():
    """Else nothing would seem wrong with it."""
    (found,) = findings(facts(engines=[EngineFacts("http://engine:8000", told=Exposition("", WANTED))]))
    assert (found.check, found.mend) == ("engine_unreachable", "start it without --disable-log-stats")


def test_without_an_agent_clocks_are_compared_with_this_host():
    """And a slow answer makes the comparison doubtful, not wrong."""
    (found,) = findings(with_store(clock=Clock(-30.0, 0.1)))
    assert "30 s behind this host's" in found.wrong
    assert findings(with_store(clock=Clock(-4.0, 3.0))) == []


def test_what_is_of_no_store_is_told_of_the_agent():
    """An incident of the fleet's own files has a place, too."""
    (found,) = findings(with_agent({"kind": "stores_unresolved", "store": "", "message": "stores: no such name"}))
    assert found.where == agent().url
