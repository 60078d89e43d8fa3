"""A real Prometheus scrapes an agent that only observes: the dashboards show what is told, and leave the rest empty."""

import time

import httpx
import pytest

from agent.sources import LMCACHE_MP, VLLM, FakeSource, scaled
from e2e.promql import DASHBOARDS, choices, concrete, panel_queries, scrape_config
from e2e.servers import app_served, prometheus
from tiertune_agent.run import Agent
from tiertune_agent.settings import AgentSettings

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROUNDS, STEP_S = 8, 1.0
FED = {
    "fleet: Fleet hit ratio: A",
    "fleet: Prompt tokens by tier: A",
    "fleet: Prompt tokens by tier: B",
    "fleet: Hit ratios: A",
    "fleet: Seconds per request, by phase: A",
    "fleet: Failures and drops: A",
    "tiers: Resident against capacity: A",
    "tiers: Resident against capacity: B",
    "tiers: Share of the capacity in use: A",
    "tiers: Hit ratio of each tier: A",
    "tiers: Tokens found, by who computed them: A",
    "tiers: Bytes moved: A",
}
"""Queries that observed sources feed."""
UNKNOWN = {
    "fleet: Net seconds saved: A",
    "fleet: Net money per hour: A",
    "fleet: Cross-replica hit ratio: A",
    "fleet: Fetches that won: A",
    "fleet: Hit ratios: B",
    "fleet: Computed again: A",
    "fleet: Failures and drops: B",
    "tiers: Evictions: A",
    "tiers: Evicted without any use: A",
    "tiers: Idle before eviction: A",
    "tiers: Not written behind: A",
    "tiers: Operations, 99th percentile: A",
    "stages: Seconds of work per request: A",
    "stages: KV wait against work: A",
    "stages: Share of a request: A",
}
"""Queries about what they do not measure."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """Prometheus, and the answer to each panel's query, by its name."""
    sources = {"vllm": FakeSource("engine-a", "vllm", VLLM), "mp": FakeSource("cache-a", "lmcache_mp", LMCACHE_MP)}
    by_host = {source.name: source for source in sources.values()}
    database = tmp_path_factory.mktemp("observed") / "agent.sqlite"
    settings = AgentSettings(database=f"sqlite:///{database}", observe=[one.settings for one in sources.values()])
    agent = Agent(settings, transport=httpx.MockTransport(lambda request: by_host[request.url.host].handle(request)))
    try:
        assert agent.stand()
        agent.loop.run_once()
        with app_served(agent.served) as address, prometheus(scrape_config(address)) as server:
            server.wait_targets_up()
            for step in range(1, ROUNDS + 1):
                sources["vllm"].text = scaled(VLLM, 1 + step)
                sources["mp"].text = scaled(LMCACHE_MP, 1 + step).replace("ratio{", "ratio_of_no_use{")
                sources["mp"].set("lmcache_mp_l1_usage_ratio", 0.25, backend="dram", l1_tag="_default")
                agent.loop.run_once()
                time.sleep(STEP_S)  # Prometheus scrapes in real time
            every, ended = [query for path in DASHBOARDS for query in panel_queries(path)], time.time()
            yield server, {str(query): server.query(concrete(query.expr, "8s"), time=ended) for query in every}
    finally:
        agent.close()


@pytest.mark.parametrize("query", sorted(FED))
def test_what_is_told_is_shown(scraped, query):
    """The panel has series of an observed source."""
    assert scraped[1][query]


@pytest.mark.parametrize("query", sorted(UNKNOWN))
def test_what_nobody_tells_is_left_empty(scraped, query):
    """No zero is drawn where nothing was measured."""
    assert scraped[1][query] == []


def test_the_figures_are_the_sources(scraped):
    """The share of prompts found is that of what they told: 14336 of 24704 tokens, and 10240 of 18432."""
    ((_, value),) = [row["value"] for row in scraped[1]["fleet: Fleet hit ratio: A"]]
    assert float(value) == pytest.approx((14336 + 10240) / (24704 + 18432), rel=0.02)
    held = {
        (row["metric"]["store"], row["metric"]["tier"]) for row in scraped[1]["tiers: Resident against capacity: A"]
    }
    assert held == {("cache-a", "dram"), ("cache-a", "disk")}


def test_sources_can_be_chosen(scraped):
    """The variable of the dashboards names them beside the stores."""
    server, _ = scraped
    _, selector, label = next(choice for choice in choices(DASHBOARDS[0]) if choice[0] == "store")
    assert server.get(f"label/{label}/values", **{"match[]": concrete(selector)}) == ["cache-a", "engine-a"]
