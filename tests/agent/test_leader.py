"""One leader per database, on both backends: who takes over when, and what a former leader may write."""

import re
import threading
import time

import pytest

from agent.agents import POLICY
from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import START, fetch
from connector.stores import at_best
from e2e.servers import HTTP, wait_until
from tiertune_agent.changes.operators import Caller
from tiertune_agent.demo.ports import free_port
from tiertune_agent.history.database import connect
from tiertune_agent.history.leader import NotLeadingError, leader_of
from tiertune_agent.history.store import History

TAKEOVER_S = 5.0


@pytest.fixture
def leaders(database):
    """Makes leaders of the one database, each with connections of its own."""
    made = []

    def make():
        made.append((leader_of(connect(database)), connect(database)))
        leader, engine = made[-1]
        return leader, History(engine, leader.fence)

    yield make
    for leader, engine in made:
        leader.resign()
        engine.dispose()


def audit(history, what="something"):
    history.journal.audit("ops", "", what, {}, START)


def test_one_leads(leaders):
    """While one leads no other does; when it resigns, the next one does."""
    (first, _), (second, _) = leaders(), leaders()
    assert first.leads()
    assert first.leads()
    assert not second.leads()
    assert (first.leading, second.leading) == (True, False)
    first.resign()
    assert second.leads()
    assert not first.leads()


def test_who_does_not_lead_writes_nothing(leaders):
    """Rows, updates and deletions alike; reading is for everybody."""
    (first, its), (second, others) = leaders(), leaders()
    first.leads()
    second.leads()
    audit(its)
    for write in (
        lambda: audit(others),
        lambda: others.journal.unfreeze(START) or others.journal.tell_incidents({("x", ""): "y"}, START),
        lambda: others.forget("host-a"),
    ):
        with pytest.raises(NotLeadingError):
            write()
    assert len(others.journal.audited()) == 1


def test_a_leader_whose_lock_broke_writes_nothing(leaders, backend, database, tmp_path, postgres_sql):  # noqa: F811
    """It does not know yet, and another one leads already: the write is refused, and then it knows."""
    (first, its), (second, others) = leaders(), leaders()
    assert first.leads()
    audit(its, "before")
    if backend == "sqlite":
        (tmp_path / "agent.sqlite.lock").unlink()
    else:
        postgres_sql(
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and objid = 1 and database = "
            f"(select oid from pg_database where datname = '{database.rpartition('/')[2]}')"
        )
    wait_until(second.leads, "the second leads")
    assert first.leading
    with pytest.raises(NotLeadingError):
        audit(its, "too late")
    assert not first.leads()
    audit(others, "after")
    assert [row["what"] for row in others.journal.audited()] == ["after", "before"]


@pytest.fixture
def postgres_sql(request):
    """Runs SQL on the server."""
    return lambda statement: request.getfixturevalue("postgres").command(statement)


on_postgres = pytest.mark.parametrize("backend", [pytest.param("postgresql", marks=pytest.mark.real)], indirect=True)


@on_postgres
def test_a_successor_waits_for_what_is_being_written(leaders, database):
    """Nothing of a former leader's is written after the successor's first look."""
    (first, _), (second, _) = leaders(), leaders()
    engine = connect(database)
    assert first.leads()
    with engine.begin() as writing:
        first.fence(writing)
        first.resign()
        thread = threading.Thread(target=second.leads)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(30)
    assert second.leading
    engine.dispose()


@on_postgres
def test_a_lead_that_was_not_taken_to_the_end_is_free(leaders, database):
    """What is being written outlasts a successor's patience: it keeps the lead from nobody meanwhile."""
    first, _ = leaders()
    writers = connect(database)
    impatient = connect(f"{database}?options=-c%20lock_timeout%3D200ms")
    second = leader_of(impatient)
    assert first.leads()
    with writers.begin() as writing:
        first.fence(writing)
        first.resign()
        assert not second.leads()
        assert "lock timeout" in second.away
    assert first.leads()
    for engine in (writers, impatient):
        engine.dispose()


@on_postgres
def test_who_is_stopped_loses_the_lead(leaders, monkeypatch):
    """Its connection is as sound as ever: it is silence that ends it. What it would do when it goes on is refused."""
    monkeypatch.setattr("tiertune_agent.history.leader.SILENT", "2s")
    (first, its), (second, _) = leaders(), leaders()
    assert first.leads()
    wait_until(second.leads, "the second leads")
    with pytest.raises(NotLeadingError):
        its.fence()
    assert not first.leads()


@on_postgres
def test_the_server_notices_that_a_host_is_gone(database, sql):
    """By itself it would keep the sessions of one that lost its power, and the lead with them, for two hours."""
    rows = sql(database, "select name, setting from pg_settings where left(name, 4) = 'tcp_' order by name")
    assert rows == [
        ("tcp_keepalives_count", "3"),
        ("tcp_keepalives_idle", "5"),
        ("tcp_keepalives_interval", "2"),
        ("tcp_user_timeout", "10000"),
    ]


@pytest.fixture
def outrun(agent, agents, store):
    """Another agent leads from when the first one has read its store's tuning the next time, before it changes it."""
    read, others = store.get_tuning, []

    def told(request):
        if not others:
            agents.end()
            others.append(agents())
        return read(request)

    def stop():
        store.get_tuning = told
        return others

    return stop


def test_a_change_that_was_overtaken_is_not_sent(agent, outrun, proposed, store):
    """The successor finds out about it, and makes it, once."""
    others = outrun()
    with pytest.raises(NotLeadingError):
        agent.changes.approve(1, "anna")
    assert store.puts == []
    others[0].loop.run_once()
    assert (fetch(store), len(store.puts)) == ("off", 1)


def test_nor_is_a_rollback(agent, outrun, proposed, store):
    """Nor is anything set back by who leads no more: the successor does."""
    agent.changes.approve(1, "anna")
    others = outrun()
    with pytest.raises(NotLeadingError):
        agent.changes.rollback(1, "anna")
    assert (fetch(store), len(store.puts)) == ("off", 1)
    others[0].loop.run_once()
    assert (fetch(store), len(store.puts)) == ("on", 2)


def test_nor_is_a_bypass(agent, agents, store):
    """It was commanded, and switched off again by the successor, while who led first was stopped."""
    agent.tick()
    caller, wishes, others = Caller("anna", "10.0.0.9"), agent.history.wishes, []

    def outrun(urls):
        agents.end()
        others.append(agents())
        others[0].operators.bypass(caller, False, None)
        return wishes(urls)

    agent.history.wishes = outrun
    with pytest.raises(NotLeadingError):
        agent.operators.bypass(caller, True, None)
    assert not store.bypass
    assert others[0].history.stores()[0].pending_bypass is None


CONFIG = """
http: {{port: 0}}
database: '{database}'
stores: [{{url: 'http://127.0.0.1:{store}'}}]
policy: policy.yaml
window: {window}
"""


@pytest.fixture
def processes(tmp_path, database, agent_process):
    """Starts agents on the one database; each as a process, and where it serves."""

    def write(store, window):
        text = CONFIG.format(database=database, store=store, window=window)
        (tmp_path / "agent.yaml").write_text(text)
        (tmp_path / "policy.yaml").write_text(POLICY.replace("period: 15s", "period: 500ms"))
        return agent_process

    return write


def rounds(url):
    """How many rounds an agent has made, and whether it leads."""
    text = HTTP.get(f"{url}/metrics").text
    counted = re.search(r"^tiertune_agent_loop_seconds_count (\S+)$", text, re.MULTILINE)
    leads = re.search(r"^tiertune_agent_leader (\S+)$", text, re.MULTILINE)
    return float(counted[1]) if counted else 0.0, bool(leads and float(leads[1]))


@pytest.mark.slow
@pytest.mark.real
def test_the_other_takes_over_within_five_seconds_of_a_kill(processes):
    """kill -9 of the leader: the one that stood by leads, and its first round is made, long before a window is over."""
    start = processes(free_port(), "15s")
    agents = [start()]
    wait_until(lambda: rounds(agents[0][1]) == (1.0, True), "the first agent leads")

    def taken_over():
        leader, _ = agents[-1]
        agents.append(start())
        _, second = agents[-1]
        assert rounds(second) == (0.0, False)
        began = time.monotonic()
        leader.kill()
        wait_until(lambda: rounds(second) == (1.0, True), "the second agent leads and has made a round")
        return time.monotonic() - began

    assert at_best(taken_over, TAKEOVER_S, attempts=3)
    incidents = HTTP.get(f"{agents[-1][1]}/api/v1/incidents").json()["incidents"]
    assert [(one["id"], one["kind"]) for one in incidents] == [(1, "store_unreachable")]
