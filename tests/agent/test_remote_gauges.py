"""The remote's gauges: once, from the agent that leads, and only what is known."""

import logging

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from agent.fakes import START
from connector.stores import PATIENCE_S
from e2e.servers import redis_server
from tiertune_agent.catalogue import METRICS, AgentMetrics
from tiertune_agent.demo.ports import free_port
from tiertune_agent.published import Published
from tiertune_agent.records import Snapshot
from tiertune_connector.catalogue import BY_NAME as OF_STORES

MB = 2**20
SERVER = {"server": "redis://a:6379/0", "run_id": "1", "policy": "allkeys-lru", "evicted_keys": 100}


def snapshot(*servers, capacity=64 * MB):
    state = {"capacity_bytes": capacity, "resident_bytes": 7 * MB, "servers": [SERVER | one for one in servers]}
    return Snapshot(
        store="fleet",
        url="redis://a:6379/0",
        boot_id="1",
        version="7.0",
        at=START,
        status={"tiers": {"remote": state}},
        tuning={},
    )


def samples(metrics):
    """Of the remote: name and labels to value."""
    families = text_string_to_metric_families(metrics.render().decode())
    found = [sample for family in families for sample in family.samples if sample.name.startswith("tiertune_tier_")]
    return {
        (one.name.removeprefix("tiertune_tier_"), *one.labels.values()): one.value
        for one in found
        if not one.name.endswith("_created")
    }


@pytest.fixture
def metrics():
    return AgentMetrics()


@pytest.fixture
def gauges(metrics):
    return Published(metrics)


@pytest.fixture
def agents(agents, policy_file):
    """Makes agents of one fleet, whose settings name a remote."""

    def make(url, *, manage):
        policy_file.write_text(f"version: 1\nremote: {{manage: {str(manage).lower()}}}\n")
        return agents(remote={"url": url, "timeout": PATIENCE_S})

    return make


def test_the_names_are_those_of_the_stores_tiers():
    """One query asks for every tier, wherever it is told."""
    for name in ("tier_capacity_bytes", "tier_resident_bytes", "tier_evictions_total"):
        (ours,) = (metric for metric in METRICS if metric.name == name)
        assert ours.kind == OF_STORES[name].kind
        assert set(ours.labels) <= set(OF_STORES[name].labels)


def test_what_is_unknown_is_absent(metrics, gauges):
    """Neither zero nor the last figure: without an answer, without a bound, when another agent leads."""
    gauges.remote(snapshot({}), 32 * MB)
    capacity = {("capacity_bytes", "effective", "remote"): 64 * MB, ("capacity_bytes", "desired", "remote"): 32 * MB}
    told = {key: value for key, value in samples(metrics).items() if key[0] != "evictions_total"}
    assert told == {**capacity, ("resident_bytes", "remote"): 7 * MB}
    gauges.remote(snapshot({}, capacity=None))
    assert not any(key[0] == "capacity_bytes" for key in samples(metrics))
    for silent in (lambda: gauges.remote(None, 32 * MB), gauges.forget):
        gauges.remote(snapshot({}), 32 * MB)
        silent()
        assert {key[0] for key in samples(metrics)} == {"evictions_total"}


def test_evictions_are_counted_from_when_they_were_first_seen(metrics, gauges):
    """By each server's own count, also when it starts anew, somebody resets it, or Sentinels fail over and back."""

    def told(*servers):
        gauges.remote(snapshot(*servers))
        return samples(metrics)["evictions_total", "allkeys-lru", "room", "remote"]

    assert told({}) == 0
    assert told({"evicted_keys": 130}) == 30
    assert told({"evicted_keys": 130}, {"server": "redis://b:6379/0", "evicted_keys": 500}) == 30
    assert told({"evicted_keys": 5, "run_id": "2"}) == 35
    assert told({"evicted_keys": 2, "run_id": "2"}) == 37
    assert told({"evicted_keys": 131}) == 38


@pytest.mark.real
@pytest.mark.parametrize("manage", [False, True])
def test_an_agent_that_leads_tells_them_and_another_does_not(agents, manage, clock):
    """Where its settings name the remote, managed or not; real figures; never where it stands by, or knows none."""
    with redis_server(maxmemory="48mb") as server:
        leader, second = (agents(server.url, manage=manage) for _ in range(2))
        with redis.Redis.from_url(server.url) as raw:
            for agent in (leader, second):
                agent.tick()
            for number in range(80):
                raw.set(f"key-{number}", b"x" * MB)
            clock.advance(15)
            leader.tick()
            told = samples(leader.metrics)
            assert told["capacity_bytes", "effective", "remote"] == 48 * MB
            assert (("capacity_bytes", "desired", "remote") in told) is manage
            assert told["resident_bytes", "remote"] > 20 * MB
            assert told["evictions_total", "allkeys-lru", "room", "remote"] == raw.info("stats")["evicted_keys"] > 0
        assert samples(second.metrics) == {}
        leader.leader.resign()
        second.tick()
        leader.stand()
        assert ("resident_bytes", "remote") in samples(second.metrics)
        assert {key[0] for key in samples(leader.metrics)} == {"evictions_total"}
    clock.advance(15)
    second.tick()
    assert ("resident_bytes", "remote") not in samples(second.metrics)


def test_a_remote_that_is_away_and_not_managed_is_no_incident(agents):
    """The gauges are missing, and that is all: nobody asked the agent to look after it."""
    agent = agents(f"redis://127.0.0.1:{free_port()}/0", manage=False)
    agent.tick()
    assert samples(agent.metrics) == {}
    assert not [one for one in agent.history.journal.incidents() if one["kind"] == "remote_unmanaged"]


@pytest.mark.real
def test_why_gauges_are_absent_is_logged_once_until_they_are_back(agents, clock, caplog):
    """Of a Redis that refuses, whose password is right later; a managed one is an incident, and logged as such."""
    with redis_server(maxmemory="48mb") as server, redis.Redis.from_url(server.url) as raw:
        raw.config_set("requirepass", "secret")
        agent = agents(server.url, manage=False)
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                agent.tick()
                clock.advance(15)
            raw.config_set("requirepass", "")
            for _ in range(2):
                agent.tick()
                clock.advance(15)
    told = [record.message for record in caplog.records if "the remote" in record.message]
    assert [message.partition(":")[0] for message in told] == [
        "the remote does not answer, so its gauges and its rent are left out",
        "the remote answers",
    ]
    assert server.url in told[0]
    assert samples(agent.metrics)["resident_bytes", "remote"] > 0
