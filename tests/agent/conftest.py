"""An agent on a real SQLite file, with fake stores and a clock that the test moves."""

import shutil

import pytest

from agent.fakes import Clock, FakeStore, transport
from tiertune_agent.history.database import open_current
from tiertune_agent.history.store import History
from tiertune_agent.run import Agent
from tiertune_agent.settings import AgentSettings

POLICY = """
version: 1
guard: {changes_per_hour: 100, min_requests: 1, soak: 1m}
tuners: {remote_fetch: {mode: auto, period: 15s, disable_after: 2, enable_after: 2}}
"""


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A migrated SQLite file, to be copied: migrating takes a while."""
    path = tmp_path_factory.mktemp("database") / "empty.sqlite"
    open_current(f"sqlite:///{path}").dispose()
    return path


@pytest.fixture
def database(tmp_path, empty_database):
    """The address of a migrated database of this test's own."""
    shutil.copy(empty_database, tmp_path / "agent.sqlite")
    return f"sqlite:///{tmp_path / 'agent.sqlite'}"


@pytest.fixture
def history(database):
    history = History(open_current(database))
    yield history
    history.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    return FakeStore(clock)


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def agents(database, clock, store, policy_file):
    """Makes agents on the one database, over the one store; what they hold is closed at the end."""
    made = []

    def make(*stores, **options):
        fleet = stores or (store,)
        settings = AgentSettings(
            database=database, stores=[{"url": f"http://{each.name}:7410"} for each in fleet], policy=policy_file
        )
        made.append(Agent(settings, now=clock.now, transport=transport(*fleet), **options))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(agents):
    return agents()


@pytest.fixture
def rounds(agent, store, clock):
    """Lets windows pass, each with traffic; a round that raised fails the test."""

    def run(count, requests=10, by=agent):
        for _ in range(count):
            clock.advance(15)
            store.traffic(requests)
            by.loop.run_once()

    agent.leader.leads()
    agent.loop.run_once()
    return run
