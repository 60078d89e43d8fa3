"""The agent against the real store: what the fakes pretend is so."""

import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest

from agent.agents import POLICY, client_of
from agent.fakes import Clock
from agent.test_actuator import DECISION
from connector.stores import Http, counted, eventually, running
from tiertune_agent.changes.operators import Caller
from tiertune_agent.fields import read
from tiertune_agent.run import utc_now
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.keys import Namespace, tenant_digest
from tiertune_connector.protocol.messages import Report, StepReport, TierReport

pytestmark = pytest.mark.slow


def remote(folder):
    return {"url": f"file://{folder}/remote", "probe_every": 0.2}


@pytest.fixture
def process(tmp_path):
    (tmp_path / "remote").mkdir()
    with running(tmp_path, remote=remote(tmp_path)) as store:
        yield store


@pytest.fixture
def clock():
    """Stands still from the beginning of a round to that of the next.

    Windows are so short here that a busy machine would take longer for the round: they would be too old for it.
    """
    return Clock(utc_now())


@pytest.fixture
def agent(agents, process, policy_file):
    policy_file.write_text(POLICY.replace("period: 15s", "period: 1ms"))
    made = agents(real=True, stores=[{"url": process.address, "name": "host-a"}])
    made.loop.run_once()
    return made


@pytest.fixture
def player(process, tmp_path):
    client = StoreClient(
        tmp_path / "s.sock", Namespace(model="llama"), chunk_bytes=65536, chunk_tokens=256, engine="e", stage="all"
    )
    assert client.connect()
    yield client
    client.close()


def test_reports_of_gates_switch_fetch_off_and_probes_on_again(process, agent, player, clock):
    """Real counters over real HTTP: two windows of dear fetches switch off, probes of a quick directory switch on."""

    def a_round():
        clock.at = utc_now()
        agent.loop.run_once()

    def window(number):
        report = TierReport("remote", 4, 1024, 0, "slower", 2.0, 0.5, None, "skipped")
        for _ in range(5):
            player.tell(Report([report]))
        refused = ("remote", "recompute", "slower")
        eventually(lambda: counted(process.counters, "gate_requests_total").get(refused) == 5.0 * (number + 1))
        a_round()

    window(0)
    assert process.store.tuning.tiers.remote.fetch == "on"
    window(1)
    assert process.store.tuning.tiers.remote.fetch == "off"

    def on_again():
        time.sleep(0.3)  # a probe every 0.2 s makes each window's estimate fresh
        a_round()
        return process.store.tuning.tiers.remote.fetch == "on"

    eventually(on_again)
    first, second = reversed(agent.history.decisions.find())
    assert (first.after, second.after) == ("off", "on")
    assert "by the probes" in second.reason


def test_stages_and_gpus_of_a_store_reach_sql(process, agent, player, tmp_path):
    """From a client's report, and from what NVML told, over real HTTP into rows of stage windows."""
    process.counters.gauges_from(lambda: [("gpu_power_watts", ("GPU-1", "all"), 70.0)])
    player.report_steps([StepReport("talker", "prefill", 0.5, 64), StepReport("talker", "kv_wait", 0.25, 32)])
    eventually(lambda: counted(process.counters, "stage_tokens_total").get(("talker", "kv_wait")) == 32)
    agent.loop.run_once()
    with sqlite3.connect(tmp_path / "agent.sqlite") as connection:
        what = "stage, phase, gpu, gpu_seconds, tokens, power_watts"
        rows = connection.execute(f"select {what} from stage_windows").fetchall()
    assert sorted(rows) == [
        ("all", "", "GPU-1", 0.0, 0.0, 70.0),
        ("talker", "kv_wait", "", 0.25, 32.0, None),
        ("talker", "prefill", "", 0.5, 64.0, None),
    ]


def test_metrics_of_the_agent_name_no_tenant(process, agent, player):
    """It has the quotas by their digests, and an incident of the traffic: the kind is told, and not whose it is."""
    salt = "acme-corporation"
    tenant = tenant_digest(salt, b"key of the fleet")
    with closing(Http(process.address)) as store, client_of(agent) as http:
        assert store.retune(tenants={tenant.hex(): {"quota_bytes": 1 << 20}}).status_code == 200
        for number in range(20):
            player.lookup(f"s{number}", [b"k" * 32], prompt_tokens=256, tenant=tenant).result(5)
            player.lookup(f"u{number}", [b"k" * 32], prompt_tokens=256).result(5)
        eventually(lambda: store.total("requests_total") == 40)
        agent.tick()
        assert agent.history.stores()[0].tuning["tenants"].keys() == {tenant.hex()}
        told = http.get("/metrics").text
    assert 'tiertune_agent_incidents{kind="unsalted_traffic"} 1.0' in told
    assert salt not in told
    assert tenant.hex() not in told


def test_the_stores_refusal_is_the_reason(agent):
    """422 from the real store: the decision fails with the store's own words."""
    tuning, field = agent.history.stores()[0].tuning, "tiers.dram.capacity_bytes"
    wrong = replace(DECISION, field=field, before=read(tuning, field), after=-1, expected_version=tuning["version"])
    outcome = agent.changes._actuator.apply(wrong)
    assert outcome.state == "failed"
    assert outcome.reason.startswith("the store refused: tiers.dram.capacity_bytes: ")


def test_a_change_is_applied_once_and_survives_a_restart(process, agent, tmp_path):
    """The same decision twice changes the store once; its state directory keeps it."""
    wanted = replace(DECISION, expected_version=agent.history.stores()[0].tuning["version"])
    first = agent.changes._actuator.apply(wanted)
    again = agent.changes._actuator.apply(wanted)
    assert (first.state, again.state, first.version) == ("applied", "applied", again.version)
    process.stop()
    with running(tmp_path, remote=remote(tmp_path)) as successor:
        assert successor.store.tuning.tiers.remote.fetch == "off"


def test_bypass_and_flush_are_acknowledged(process, agent):
    """The real store answers both commands as the agent expects."""
    caller = Caller("ops", "here")
    assert agent.operators.bypass(caller, on=True, store=None)["stores"] == {"host-a": "ok"}
    assert process.store.tuning.bypass is True
    agent.operators.bypass(caller, on=False, store="host-a")
    flushed = agent.operators.flush(caller, {})
    assert flushed["complete"] is True
    assert set(flushed["stores"]["host-a"]["dropped"]) == {"dram", "remote"}
