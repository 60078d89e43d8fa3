"""One leader per database, on both backends: who takes over when, and what a former leader may write."""

import re
import threading
import time

import httpx
import pytest

from agent.conftest import POLICY
from agent.conftest import both_backends as backend  # noqa: F401
from agent.fakes import START
from connector.stores import at_best
from e2e.servers import wait_until
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


@pytest.mark.parametrize("backend", [pytest.param("postgresql", marks=pytest.mark.real)], indirect=True)
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
    text = httpx.get(f"{url}/metrics", trust_env=False).text
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
    incidents = httpx.get(f"{agents[-1][1]}/api/v1/incidents", trust_env=False).json()["incidents"]
    assert [(one["id"], one["kind"]) for one in incidents] == [(1, "store_unreachable")]
