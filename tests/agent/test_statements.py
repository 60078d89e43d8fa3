"""How many SQL statements a round takes: what a fleet has in common is asked once, not once for every store."""

from contextlib import contextmanager
from shutil import copy

import pytest
from sqlalchemy import event

from agent.agents import make_agent, pass_windows
from agent.fakes import SLOW, FakeStore
from tiertune_agent.records import State, Target
from tiertune_agent.tuners.base import Proposal

pytestmark = pytest.mark.slow

FEW, MANY = 2, 8
RECOMMEND = "version: 1\nguard: {min_requests: 1}\ntuners: {remote_fetch: {period: 15s, disable_after: 2}}\n"


@pytest.fixture
def statements(tmp_path, clock, policy_file, database):
    """Counts: the statements of a later round over so many stores, and the agent that made it."""
    made = []

    def count(number, change=lambda _stores: None, rounds=6):
        stores = [FakeStore(clock, f"host-{index}") for index in range(number)]
        file = tmp_path / f"{number}.sqlite"
        copy(tmp_path / "agent.sqlite", file)
        agent = make_agent(f"sqlite:///{file}", policy_file, clock.now, stores)
        made.append(agent)
        change(stores)
        pass_windows(agent, stores, clock, rounds - 1, tick=True)
        heard = []
        with listening(agent, heard):
            pass_windows(agent, stores, clock, tick=True)
        assert "job_errors_total{" not in agent.metrics.render().decode()
        return heard, agent

    yield count
    for agent in made:
        agent.close()


@contextmanager
def listening(agent, heard):
    engine = agent.history._engine
    event.listen(engine, "before_cursor_execute", listener := lambda *call: heard.append(call[2]))
    yield
    event.remove(engine, "before_cursor_execute", listener)


def test_a_round_takes_as_many_statements_for_many_stores_as_for_few(statements):
    """Collected, booked, watched and asked about by every tuner that is due: not one statement more for each store."""
    few, _ = statements(FEW)
    many, agent = statements(MANY)
    assert {answer["store"] for answer in agent.history.answers.newest() if answer["tuner"] == "remote_fetch"} == {
        f"host-{index}" for index in range(MANY)
    }
    assert len(many) == len(few), set(many) - set(few)


def test_stores_that_are_away_take_none_of_their_own(statements):
    """An incident each, in one statement or two."""

    def away(stores):
        for store in stores:
            store.up = False

    few, _ = statements(FEW, away)
    many, agent = statements(MANY, away)
    assert agent.history.journal.open_incidents()["store_unreachable"] == MANY
    assert len(many) == len(few)


def test_a_wish_takes_what_its_own_record_takes(statements, policy_file):
    """A proposal is looked up and renewed; what the guard weighs it by is read once for all."""
    policy_file.write_text(RECOMMEND)

    def slow(stores):
        for store in stores:
            store.bandwidth = SLOW

    few, _ = statements(FEW, slow)
    many, agent = statements(MANY, slow)
    assert len(agent.history.decisions.find(states=[State.PROPOSED])) >= MANY
    assert len(many) - len(few) <= 4 * (MANY - FEW)
    reads = [sum(told.startswith("SELECT") for told in each) for each in (few, many)]
    assert reads[1] - reads[0] <= 2 * (MANY - FEW)


def test_a_soak_that_begins_reads_no_windows(statements):
    """How soon its tier fills follows from the hour that incidents are watched by, already read: fleets are large."""
    _, agent = statements(FEW)
    heard, stores = [], [row.name for row in agent.history.stores()]
    told = Proposal("tiers.dram.capacity_bytes", 1 << 30, 1 << 31, "because", {"shape": "1/0/0"})
    for store in stores:
        agent.changes.take("tier_size", Target(store, "dram"), told, mode="auto", version=1, policy=1)
    with listening(agent, heard):
        agent.tick()
    assert {one.state for one in agent.history.decisions.find()} == {State.SOAKING}
    assert not [one for one in heard if one.startswith("SELECT windows.")]
