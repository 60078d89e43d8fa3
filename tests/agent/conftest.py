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


def make_agent(database, policy_file, clock, stores, **options):
    """An agent over fake stores; who made it closes it."""
    addresses = [{"url": f"http://{store.name}:7410"} for store in stores]
    settings = AgentSettings(database=database, stores=addresses, policy=policy_file)
    return Agent(settings, now=clock.now, transport=transport(*stores), **options)


def pass_windows(agent, store, clock, count, requests=10):
    """Windows with traffic, each with a round."""
    for _ in range(count):
        clock.advance(15)
        store.traffic(requests)
        agent.loop.run_once()


@pytest.fixture
def agents(database, clock, store, policy_file):
    """Makes agents on the one database, over the one store; what they hold is closed at the end."""
    made = []

    def make(*stores, **options):
        made.append(make_agent(database, policy_file, clock, stores or (store,), **options))
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
        pass_windows(by, store, clock, count, requests)

    agent.leader.leads()
    agent.loop.run_once()
    return run
