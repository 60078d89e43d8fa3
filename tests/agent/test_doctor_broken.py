"""Deployments that are really broken: real stores, engines that report to them; the doctor names what it is."""

import errno
import time
from datetime import timedelta

import httpx
import pytest

from agent.agents import client_of
from agent.fakes import propose
from agent.sources import VLLM
from connector.memory_tier import MemoryTier
from connector.stores import CHUNK_TOKENS, STRIDE, Engine, Http, chain, eventually, running, short_folder
from e2e.servers import exporter
from tiertune_agent.credentials import Access
from tiertune_agent.demo.throttle import ThrottledTier
from tiertune_agent.doctor.checks import findings
from tiertune_agent.doctor.command import Endpoints, examine
from tiertune_agent.doctor.gathered import Reader
from tiertune_agent.records import Target
from tiertune_agent.run import utc_now
from tiertune_agent.tuners.base import Proposal
from tiertune_connector.protocol.messages import PrefillLine, Report, TierReport
from tiertune_connector.serve import http as store_http
from tiertune_connector.serve import main
from tiertune_connector.tiers.segment import Segment

pytestmark = pytest.mark.slow

LINK = 1e6
"""Bytes per second: a chunk takes 20 ms."""
LINE = PrefillLine(0.0, 1e-15, 8e9, 32, 4096, 0)
"""Computing one takes 0.3 ms."""


@pytest.fixture
def home():
    with short_folder() as folder:
        yield folder


def found(**asked):
    """What is wrong, by the name of the check."""
    told = findings(examine(Endpoints(**asked), reader=Reader()))
    return {one.check: one for one in told}


def test_unsalted_traffic(home):
    """A tenant has a quota, and an engine of the same store serves requests without a salt."""
    with running(home) as process, Engine(process.server.path) as engine, Http(process.address) as http:
        at = {process.address: "host-a"}
        assert http.retune(tenants={"ab" * 16: {"quota_bytes": 1 << 20}}).status_code == 200
        engine.client.lookup("s", chain("k", 2), prompt_tokens=32, tenant=b"\xab" * 16).result(5)
        eventually(lambda: http.total("requests_total", salted="yes") == 1)
        assert found(stores=at) == {}
        engine.find(chain("k", 2))
        told = eventually(lambda: found(stores=at))
        assert told.keys() == {"unsalted_traffic"}
        assert told["unsalted_traffic"].wrong == "1 of 2 requests had no salt, while quotas are set for 1 tenant"


def test_staging_too_small():
    """An engine, by HTTP, of whose chunks many found no room in staging; before, it was well."""
    told = {"failures": 0}

    def metrics():
        settings = '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{enable_prefix_caching="True"} 1\n'
        failed = f'vllm:kv_offload_allocation_failure_total{{engine="0"}} {told["failures"]}\n'
        kind = "# TYPE vllm:kv_offload_allocation_failure_total counter\n"
        return (settings + VLLM.replace(kind, kind + failed)).encode()

    with exporter(metrics) as address:
        engines = [f"http://{address}"]
        assert found(engines=engines) == {}
        told["failures"] = 40
        wrong = found(engines=engines)
        assert wrong.keys() == {"staging_small"}
        assert "no room 40 times in 24 requests" in wrong["staging_small"].wrong


def test_slow_storage(home):
    """A remote behind a link of 1 MB/s: probes measure it, an engine told what computing costs and what it found."""
    tier = ThrottledTier(MemoryTier(), lambda: LINK, clock=time.monotonic, sleep=time.sleep)
    remote = {"url": "redis://127.0.0.1:1", "probe_every": "0.1s"}
    with running(home, wrap_remote=lambda _: tier, remote=remote) as process, Engine(process.server.path) as engine:
        engine.client.prefill = lambda: LINE
        keys, at = chain("k", 4), {process.address: "host-a"}
        engine.find(keys)
        engine.put(keys)
        report = TierReport("remote", 4, 4 * CHUNK_TOKENS, 0, "slower", 2.0, 0.5, None, "skipped")
        for _ in range(20):
            engine.client.tell(Report([report]))
        told = eventually(lambda: found(stores=at))
        assert told.keys() == {"remote_slow"}
        assert "the 64 tokens that a request finds in remote on average take 2000 ms" in told["remote_slow"].wrong


def test_a_knob_without_effect(home, agents, monkeypatch):
    """A store is given more DRAM than its host has memory: it takes the change, and stays as small as it was."""
    late = [timedelta()]

    def later(server, control, clock, **more) -> store_http.Http:
        return store_http.Http(server, control, lambda: clock() + late[0].total_seconds(), **more)

    monkeypatch.setattr(main, "Http", later)
    with running(home, dram=16 * STRIDE) as process, Engine(process.server.path):
        pools = process.store.dram.pools
        eventually(lambda: sum(pool.provisioned for pool in pools.values()) == 16)
        monkeypatch.setattr(Segment, "create", no_memory)
        agent = agents(real=True, now=lambda: utc_now() + late[0], stores=[{"url": process.address}])
        agent.tick()
        wish = Proposal("tiers.dram.capacity_bytes", 16 * STRIDE, 64 * STRIDE, "more would pay")
        decision = propose(agent.history, "tier_size", Target("host-a", "dram"), wish, at=utc_now())
        assert agent.changes.approve(decision.id, "ops").state == "applied"
        assert "knob_without_effect" not in told_of(agent)
        late[0] = timedelta(minutes=3)
        wrong = told_of(agent)["knob_without_effect"]
        assert (wrong.where, wrong.wrong.partition(", ")[2]) == ("host-a", "effective are 320.0 KiB")


def no_memory(*_):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def told_of(agent):
    """What the doctor finds by the agent's API after another round, and at its stores."""
    agent.tick()
    api, store = client_of(agent), httpx.Client(trust_env=False)

    def handle(request):
        if request.url.host != "agent":
            request.headers.pop("host")
            return store.send(httpx.Request(request.method, request.url))
        answer = api.request(request.method, request.url.path)
        return httpx.Response(answer.status_code, content=answer.content)

    with store:
        reader = Reader(Access(transport=httpx.MockTransport(handle)))
        return {one.check: one for one in findings(examine(Endpoints(agent="http://agent:7420"), reader=reader))}
