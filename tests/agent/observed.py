"""An agent over sources, and the world that they stand in."""

import httpx
from fastapi.testclient import TestClient

from tiertune_agent.run import Agent
from tiertune_agent.settings import AgentSettings


class World:
    """One agent, its clock, and all that it may ask."""

    def __init__(self, database, policy, clock, sources, stores=()):
        self.clock, self.sources, self.stores, self.sent = clock, sources, stores, []
        settings = AgentSettings(
            database=database,
            stores=[{"url": f"http://{store.name}:7410"} for store in stores],
            observe=[source.settings for source in sources],
            policy=policy,
        )
        self.agent = Agent(settings, now=clock.now, transport=httpx.MockTransport(self.answer))
        assert self.agent.stand()

    def answer(self, request):
        self.sent.append((request.method, request.url.host))
        return next(one for one in (*self.sources, *self.stores) if one.name == request.url.host).handle(request)

    def pass_windows(self, count=1, each=lambda: None, seconds=15):
        for _ in range(count):
            self.clock.advance(seconds)
            each()
            self.agent.loop.run_once()

    def get(self, path):
        return TestClient(self.agent.app, base_url="http://localhost").get(path)

    def open(self):
        return {
            (one["kind"], one["store"]): one["message"]
            for one in self.agent.history.journal.incidents()
            if one["closed_at"] is None
        }
