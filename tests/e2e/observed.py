"""An agent without any store, that observes real sources; a test lets its windows pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from tiertune_agent.incidents.detectors import known
from tiertune_agent.run import Agent
from tiertune_agent.settings import AgentSettings


class Observed:
    def __init__(self, agent: Agent, name: str) -> None:
        self.agent = agent
        self.name = name

    def window(self) -> None:
        """Ends now."""
        self.agent.loop.run_once()

    def counted(self, metric: str, tier: str = "", **labels: str) -> float | None:
        """In all windows of the source; None: it is not told."""
        return known(self.agent.history.measured.windows(self.name, tier=tier), metric, **labels)

    def get(self, path: str) -> Any:
        return TestClient(self.agent.served, base_url="http://localhost").get(path)

    def incidents(self) -> dict[str, str]:
        """Open ones of the source."""
        found = self.agent.history.journal.incidents()
        return {one["kind"]: one["message"] for one in found if one["store"] == self.name and not one["closed_at"]}


@contextmanager
def observed(folder: Path, name: str, url: str, kind: str) -> Iterator[Observed]:
    """Its first reading is made."""
    source = {"name": name, "url": url, "kind": kind}
    agent = Agent(AgentSettings(database=f"sqlite:///{folder / 'agent.sqlite'}", observe=[source]))
    try:
        assert agent.stand()
        one = Observed(agent, name)
        one.window()
        yield one
    finally:
        agent.close()
