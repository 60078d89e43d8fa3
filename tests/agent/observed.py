"""An agent over sources, and the world that they stand in."""

import httpx
import pytest
from fastapi.testclient import TestClient

from agent.fakes import open_incidents
from agent.sources import LMCACHE_MP, VLLM, FakeSource


class World:
    """One agent, its clock, and all that it may ask."""

    def __init__(self, agents, clock, sources, stores=()):
        self.clock, self.sources, self.stores, self.sent = clock, sources, stores, []
        self.agent = agents(
            stores=[{"url": f"http://{store.name}:7410"} for store in stores],
            observe=[source.settings for source in sources],
            network=httpx.MockTransport(self.answer),
        )
        assert self.agent.leader.leading

    def answer(self, request):
        self.sent.append((request.method, request.url.host))
        return next(one for one in (*self.sources, *self.stores) if one.name == request.url.host).handle(request)

    def pass_windows(self, count=1, each=lambda: None, seconds=15):
        for _ in range(count):
            self.clock.advance(seconds)
            each()
            self.agent.loop.run_once()

    @property
    def http(self):
        return TestClient(self.agent.served, base_url="http://localhost")

    def get(self, path):
        return self.http.get(path)

    def open(self):
        return open_incidents(self.agent)


POLICY = """
version: 1
mode: auto
guard: {changes_per_hour: 100, min_requests: 1, soak: 1m}
prices: {gpu_hour: 3.6, dram_gib_month: 730, remote_gib_month: 73, network_gib: 1}
tuners: {advice: {period: 1m}}
"""


@pytest.fixture
def observing(agents, policy_file, clock):
    """Makes one, over sources (and stores)."""
    policy_file.write_text(POLICY)

    def make(*sources, stores=()):
        made = World(agents, clock, sources, stores)
        made.agent.loop.run_once()
        return made

    return make


@pytest.fixture
def vllm():
    return FakeSource("engine-a", "vllm", VLLM)


@pytest.fixture
def lmcache():
    return FakeSource("cache-a", "lmcache_mp", LMCACHE_MP)


def grow(told, name, by, /, **labels):
    """A counter goes on."""
    for line in told.text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.startswith(name) and all(f'{label}="{text}"' in head for label, text in labels.items()):
            told.text = told.text.replace(line, f"{head} {float(value) + by!r}")
