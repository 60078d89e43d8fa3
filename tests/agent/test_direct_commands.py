"""What stores were commanded past the agent has its row in the audit, once."""

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.agents import pass_windows
from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import START
from connector.stores import running, short_folder
from e2e.servers import HTTP
from tiertune_agent.changes.operators import Caller
from tiertune_agent.collector.direct_commands import AGENT, MOST, entries
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.run import utc_now

pytestmark = pytest.mark.slow

WRITE = {
    "at": START.isoformat(),
    "who": "anna",
    "source": "10.0.0.9",
    "client": "curl/8.5",
    "what": "bypass",
    "detail": {"on": True},
    "status": 200,
}
ROW = {name: WRITE[name] for name in ("at", "who", "what", "detail")} | {"from": "store host-a, 10.0.0.9"}


@pytest.fixture
def write(store):
    """The store was commanded: its status tells it from now on."""
    writes = []
    store.tells("get_status", lambda told: told | {"writes": writes})
    return lambda **fields: writes.append(WRITE | fields)


@pytest.fixture
def window(store, clock):
    """A round of an agent, in a window of its own."""
    return lambda agent: pass_windows(agent, store, clock)


def test_a_command_past_the_agent_has_its_row_once(agents, window, write):
    """Also after many rounds, and for the next agent; what comes then has its own."""
    write()
    first = agents()
    window(first)
    window(first)
    assert first.history.journal.audited() == [ROW]
    agents.end()
    second = agents()
    window(second)
    assert second.history.journal.audited() == [ROW]
    write(what="flush", detail={})
    window(second)
    assert [row["what"] for row in second.history.journal.audited()] == ["flush", "bypass"]


def test_a_store_with_another_name_has_no_second_row(agents, store, window, write):
    """It got one in its settings: what it was commanded before keeps the row that it has."""
    write()
    agent = agents()
    window(agent)
    store.name = "host-a-again"
    store.restart()
    window(agent)
    assert agent.history.journal.audited() == [ROW]
    write(what="flush", detail={})
    window(agent)
    newest, first = agent.history.journal.audited()
    assert (newest["from"], first) == ("store host-a-again, 10.0.0.9", ROW)


def test_what_the_agent_did_has_no_second_row(agents, window, write):
    """It calls itself so."""
    write(client=AGENT)
    agent = agents()
    window(agent)
    assert agent.history.journal.audited() == []


def test_the_writes_are_no_part_of_the_kept_status(agents, window, write):
    """They are kept as rows."""
    write()
    agent = agents()
    window(agent)
    assert "writes" not in agent.history.stores()[0].status


def test_a_store_that_cannot_be_booked_is_booked_later(agents, window, write, monkeypatch):
    """The database was away for a round."""
    write()
    agent = agents()
    monkeypatch.setattr(agent.loop.direct, "_book", Mock(side_effect=DatabaseError("away")))
    with pytest.raises(DatabaseError):
        window(agent)
    monkeypatch.setattr(agent.loop.direct, "_book", agent.history.journal.audit_once)
    window(agent)
    assert agent.history.journal.audited() == [ROW]


def test_nonsense_costs_no_round(agents, window, write):
    """What no database takes is cut out; what is no write is left out."""
    write(who="a\0b\ud800" * 200, source="\0" + "x" * 300)
    write(at="yesterday")
    write(at="2025-03-05T12:00:00")
    write(at="0001-01-01T00:00:00+14:00")
    write(detail=None)
    agent = agents()
    window(agent)
    (row,) = agent.history.journal.audited()
    assert row["who"].startswith("ab?ab?")
    assert agent.history.stores()[0].name == "host-a"
    agents.end()
    again = agents()
    window(again)
    assert again.history.journal.audited() == [row]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*WRITE, "x"]), inner),
)


@given(JSON)
def test_whatever_a_store_tells_raises_nothing(told):
    """Entries, or none."""
    assert len(list(entries("host-a", told))) <= MOST
    assert len(list(entries("host-a", [told, WRITE]))) >= 1


def test_a_real_store_bypassed_without_an_agent(agents):
    """By hand while no agent runs: the row is there when one is back; what the agent commands leaves one, its own."""
    with short_folder() as home, running(home) as process:
        HTTP.post(process.address + "/v1/bypass", json={"on": True}).raise_for_status()

        def successor():
            agents.end()
            agent = agents(real=True, now=utc_now, stores=[{"url": process.address, "name": "host-a"}])
            agent.tick()
            return agent

        for _ in range(2):
            agent = successor()
            agent.tick()
            assert agent.history.stores()[0].tuning["bypass"] is True
            (row,) = agent.history.journal.audited()
            assert (row["who"], row["from"], row["what"]) == ("local", "store host-a, 127.0.0.1", "bypass")
        agent = successor()
        assert agent.operators.bypass(Caller("anna", "10.0.0.9"), False, None)["stores"] == {"host-a": "ok"}
        agent.operators.flush(Caller("anna", "10.0.0.9"), {})
        assert [(row["who"], row["what"]) for row in successor().history.journal.audited()] == [
            ("anna", "flush"),
            ("anna", "bypass"),
            ("local", "bypass"),
        ]
