"""What a demo does not feed: the exporters of store and agent, and vLLM's text, scraped by a real Prometheus.

With ``test_dashboards_demo`` every query of every panel, and every annotation, is proved to return data.
"""

import contextlib
import itertools

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from agent.sources import VLLM, scaled
from connector.stores import Clock
from connector.test_profile_gpu import FakeNvml
from e2e.promql import DASHBOARDS, MAYBE_UNFED, UNFED, annotation_queries, concrete, panel_queries
from e2e.servers import exporter, prometheus, wait_until
from tiertune_agent.catalogue import AgentMetrics
from tiertune_connector.counters import Counters, PrometheusCollector
from tiertune_connector.profile.gpu import GpuSampler

pytestmark = [pytest.mark.real, pytest.mark.slow]

QUERIES = {str(query): query for path in DASHBOARDS for query in panel_queries(path)}
ROLLED_BACK = [query for path in DASHBOARDS for query in annotation_queries(path) if "rolled_back" in query.expr]
ROLLED_BACK_AT = 1_700_000_000.5
POSITIVE = None
"""A rate: as quick as Prometheus happens to scrape."""
SHOWN = {
    "fleet: Time to first token: A": [0.25],
    "fleet: Time to first token: B": [0.495],
    "stages: Utilisation: A": [0.75, 0.75],
    "stages: Memory: A": [30 << 30, 30 << 30, 50 << 30, 50 << 30],
    "stages: Power: A": [350.5, 350.5],
    "stages: Energy per 1000 tokens: A": [7.0],
    "tiers: Failed operations: A": POSITIVE,
    "decisions: Rounds that failed: A": POSITIVE,
    "tiers: Not written behind: B": POSITIVE,
    "whatif: Decisions on sizes, eviction and admission: A": [1, 3],
    "fleet: Open incidents: A": [2],
    "decisions: Open incidents: A": [2],
    "decisions: Verdicts by tuner: A": [1, 3],
    "decisions: Share kept: A": [0.75],
}
"""Of each query that a demo may leave without data: what it gives for the figures below."""


def store():
    """Two GPUs, one of which computes 500 tokens for 3.5 J from scrape to scrape, and a remote that fails."""
    nvml, counters, registry = FakeNvml("GPU-1", "GPU-2"), Counters(), CollectorRegistry()
    sampler = GpuSampler(lambda: {"GPU-1": "prefill"}, counters, clock=Clock(), nvml=nvml)
    registry.register(PrometheusCollector(counters, "host-a"))
    sampler.sample()

    def scrape():
        nvml.energy_mj["GPU-1"] += 3_500
        sampler.sample()
        counters.add("stage_tokens_total", ("prefill", "prefill"), 500.0)
        counters.add("tier_errors_total", ("remote", "read", "timeout"))
        counters.add("write_behind_dropped_total", ("remote", "queue_full"))
        return generate_latest(registry)

    return scrape


def agent():
    """Of four changes of a size three were kept and one was rolled back; two tiers are dead, and each round fails."""
    metrics = AgentMetrics()
    metrics.count("agent_decisions_total", "tier_size", "kept", amount=3)
    metrics.count("agent_decisions_total", "tier_size", "rolled_back")
    change = ("tier_size", "host-a", "dram", "capacity_bytes", "up", "rolled_back")
    metrics.set("agent_change_timestamp_seconds", ROLLED_BACK_AT, *change)
    metrics.set("agent_incidents", 2, "tier_dead")

    def scrape():
        metrics.count("agent_job_errors_total", "loop")
        return metrics.render()

    return scrape


def engine():
    """One of vLLM, whose requests all have their first token within 0.5 s."""
    times = itertools.count(1)
    return lambda: scaled(VLLM, next(times)).encode()


@pytest.fixture(scope="module")
def fed():
    with contextlib.ExitStack() as stack:
        jobs = {"tiertune-store": store(), "tiertune-agent": agent(), "vllm": engine()}
        targets = {job: stack.enter_context(exporter(scrape)) for job, scrape in jobs.items()}
        scraped = [{"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()]
        server = stack.enter_context(prometheus({"global": {"scrape_interval": "1s"}, "scrape_configs": scraped}))
        server.wait_targets_up()
        yield server


def values(fed, query):
    """The latest of each series, as the panel asks it."""
    expression = concrete(query.expr, "8s")
    rows = []
    wait_until(lambda: bool(rows.extend(fed.query(expression)) or rows), f"{query} has data")
    return sorted(float(row["value"][1]) for row in rows)


def test_all_that_a_demo_may_not_feed_is_fed_here():
    """No query is left without data in both."""
    assert SHOWN.keys() == {*UNFED, *MAYBE_UNFED}


@pytest.mark.parametrize("name", SHOWN)
def test_a_query_that_a_demo_may_not_feed_returns_data(fed, name):
    """The figures that the exporters tell, in the panel's unit."""
    found = values(fed, QUERIES[name])
    if SHOWN[name] is POSITIVE:
        assert min(found) > 0
    else:
        assert found == pytest.approx(SHOWN[name])


@pytest.mark.parametrize("mark", ROLLED_BACK, ids=str)
def test_a_roll_back_is_an_annotation_at_its_time(fed, mark):
    """In milliseconds, as Grafana wants it."""
    assert values(fed, mark) == [1000 * ROLLED_BACK_AT]
