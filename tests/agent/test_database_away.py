"""The database is away for ten minutes: nothing is changed without it, nothing made is lost, windows are a gap."""

import itertools
import logging
import signal
from datetime import timedelta

import pytest

from agent.agents import client_of, make_agent, pass_windows, told
from agent.conftest import BACKENDS
from agent.fakes import SLOW, START, fetch, ledger_rows
from e2e.postgres import PASSWORD, postgres_server
from tiertune_agent.history.database import open_current

pytestmark = pytest.mark.slow
WINDOW_S, OUTAGE_S = 15, 600


class File:
    """An SQLite file, moved away and back."""

    def __init__(self, folder):
        self._path = folder / "agent.sqlite"
        self.url = f"sqlite:///{self._path}"

    def leave(self):
        self._path.rename(self._path.with_suffix(".away"))

    def come_back(self):
        self._path.with_suffix(".away").rename(self._path)


class Server:
    """A PostgreSQL, stopped as a crash would and started again."""

    def __init__(self, server, name):
        self._server = server
        server.command(f"create database {name}")
        self.url = server.url(name)

    def leave(self):
        self._server.stop(signal.SIGQUIT)

    def come_back(self):
        self._server.start()


@pytest.fixture(scope="module")
def own_postgres():
    """A server that tests of this module stop."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=BACKENDS)
def place(request, tmp_path):
    """A database of the test's own, that can be away."""
    if request.param == "sqlite":
        made = File(tmp_path)
    else:
        made = Server(request.getfixturevalue("own_postgres"), f"d{abs(hash(request.node.name))}")
    open_current(made.url).dispose()
    return made


@pytest.fixture
def run(place, policy_file, clock, store):
    """An agent, and windows with traffic, each with what the scheduler would start."""
    agent = make_agent(place.url, policy_file, clock.now, [store])

    yield agent, lambda count: pass_windows(agent, store, clock, count, seconds=WINDOW_S, tick=True)
    agent.close()


def errors(agent):
    text = agent.metrics.render().decode()
    counted = [line for line in text.splitlines() if line.startswith("tiertune_agent_job_errors_total{")]
    return sum(float(line.split()[-1]) for line in counted)


def lengths(agent):
    return {window.seconds for window in agent.history.measured.windows("host-a", tier="remote")}


def test_a_change_that_was_made_when_it_went_is_recorded_when_it_is_back(run, place, store, caplog):
    """The store has it, the answer could not be written: found out about, made once, and judged as ever."""
    agent, windows = run
    windows(3)
    store.bandwidth = SLOW
    windows(1)
    store.before_put = place.leave
    windows(1)
    store.before_put = lambda: None
    assert fetch(store) == "off"
    with caplog.at_level(logging.INFO):
        windows(OUTAGE_S // WINDOW_S)
    assert PASSWORD not in caplog.text
    assert "Traceback" not in caplog.text
    assert errors(agent) >= 1
    place.come_back()
    windows(3)
    (decision,) = (one for one in agent.history.decisions.find() if one.applied_at)
    assert decision.state in ("applied", "soaking")
    windows(8)
    assert told(agent) == [("remote_fetch", "on", "off", "kept")]
    assert (store.tuning["version"], len(store.keys)) == (2, 1)


def test_while_it_is_away_the_agent_says_so(run, place, caplog):
    """Each window counts an error, the log and `/healthz` name the database, and no other agent is blamed."""
    agent, windows = run
    windows(2)
    place.leave()
    windows(1)
    before = errors(agent)
    with caplog.at_level(logging.INFO):
        windows(3)
    assert errors(agent) == before + 3
    assert "database" in caplog.text
    assert "fails since" in agent.unwell()[0] or agent.unwell() == ["stands by: the database is away: see the log"]
    place.come_back()
    windows(2)
    assert agent.unwell() == []
    assert errors(agent) == before + 3


def test_nothing_is_changed_without_it_and_windows_are_a_gap(run, place, store, clock):
    """A decision is written before it is made. No window is longer than ever, and none is counted twice."""
    agent, windows = run
    windows(3)
    place.leave()
    store.bandwidth = SLOW
    windows(OUTAGE_S // WINDOW_S)
    assert store.puts == []
    place.come_back()
    windows(6)
    assert lengths(agent) == {float(WINDOW_S)}
    starts = [window.start for window in agent.history.measured.windows("host-a", tier="remote")]
    steps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    gaps = [step for step in steps if step != timedelta(seconds=WINDOW_S)]
    assert len(gaps) == 1
    assert timedelta(seconds=OUTAGE_S) <= gaps[0] <= timedelta(seconds=OUTAGE_S + 2 * WINDOW_S)
    assert starts[-1] == clock.now() - timedelta(seconds=WINDOW_S)
    rows = [row for row in ledger_rows(agent.history, START) if row["tier"] == "remote" and not row["namespace"]]
    windows = agent.history.measured.windows("host-a", tier="remote")
    assert sum(row["seconds"] for row in rows) == sum(one.seconds for one in windows)
    assert [one[:3] for one in told(agent)] == [("remote_fetch", "on", "off")]
    assert len(store.keys) == 1


def test_who_asks_meanwhile_is_told(run, place):
    """503 and why, for reading and for commands; health does not depend on it."""
    agent, windows = run
    windows(1)
    place.leave()
    with client_of(agent) as http:
        answers = [http.get("/api/v1/incidents"), http.get("/"), http.post("/api/v1/freeze", json={"reason": "x"})]
        assert http.get("/healthz").status_code == 200
        assert [answer.status_code for answer in answers] == [503, 503, 503]
        assert all(answer.json()["detail"].startswith("database: ") for answer in answers)
        assert all(PASSWORD not in answer.text for answer in answers)
        place.come_back()
        windows(1)
        assert http.get("/api/v1/incidents").status_code == 200
