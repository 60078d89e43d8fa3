"""The agent as a process: serves, and ends cleanly."""

import signal
import socket
from datetime import UTC, datetime, timedelta

import pytest
import uvicorn
from apscheduler.schedulers.background import BackgroundScheduler

from connector.stores import eventually
from e2e.servers import HTTP
from tiertune_agent.run import run
from tiertune_agent.settings import load
from tiertune_connector.documents import DocumentError

pytestmark = pytest.mark.slow

CONFIG = "http: {port: 0}\nstores: [{url: 'http://127.0.0.1:9'}]\nwindow: 1s\n"


@pytest.fixture
def start(tmp_path, agent_process):
    """Starts an agent without a store."""
    (tmp_path / "agent.yaml").write_text(CONFIG)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    yield agent_process
    signal.signal(signal.SIGHUP, before)


def incidents(url):
    return HTTP.get(f"{url}/api/v1/incidents").json()["incidents"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_serves_and_ends_when_told(start, tmp_path, number):
    """An empty folder is enough to start; a signal, also a closed terminal's, leaves status 0 and its history alone."""
    process, url = start()
    eventually(lambda: incidents(url))
    assert incidents(url)[0]["kind"] == "store_unreachable"
    process.send_signal(number)
    assert process.wait(20) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.yaml", "tiertune.sqlite", "tiertune.sqlite.lock"]


def test_a_caller_who_never_ends_his_call_holds_up_no_end(start):
    """It has time for its answer, and then the agent ends without it."""
    process, url = start()
    eventually(lambda: incidents(url))
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(
            b"POST /api/v1/freeze HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        incidents(url)  # and by now the other call has been heard
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    "wrong",
    ["policy: p", "stores_file: f", "stores_token_file: t", "stores_ca_file: c", "http: {port: 0, tokens_file: t}"],
)
def test_a_start_that_is_refused_makes_no_database(tmp_path, wrong):
    """A mistake in the settings is mended first; on PostgreSQL a database would have been filled meanwhile."""
    lines = [line for line in CONFIG.splitlines() if line.partition(":")[0] != wrong.partition(":")[0]]
    (tmp_path / "agent.yaml").write_text("\n".join([*lines, wrong]))
    with pytest.raises(DocumentError, match="No such file"):
        run(load(tmp_path / "agent.yaml"))
    assert [path.name for path in tmp_path.iterdir()] == ["agent.yaml"]


def test_it_ends_with_its_server(tmp_path, monkeypatch):
    """An agent that answers nobody any more does not go on in secret, and does not seem to have ended well."""
    (tmp_path / "agent.yaml").write_text(CONFIG)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="the HTTP server ended by itself"):
        run(load(tmp_path / "agent.yaml"))
    assert (tmp_path / "tiertune.sqlite").exists()


def test_it_prunes_soon_after_its_start(tmp_path, monkeypatch):
    """Also one that is started anew every half hour; but not amid its first rounds, which take longest."""
    (tmp_path / "agent.yaml").write_text(CONFIG)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    planned, start = {}, BackgroundScheduler.start

    def started(scheduler):
        start(scheduler)
        planned.update({job.id: job.next_run_time - datetime.now(UTC) for job in scheduler.get_jobs()})

    monkeypatch.setattr(BackgroundScheduler, "start", started)
    with pytest.raises(RuntimeError):
        run(load(tmp_path / "agent.yaml"))
    assert timedelta(minutes=5) < planned["pruning"] < timedelta(minutes=15)


def test_a_round_that_outlasts_the_window_is_told(start, tmp_path):
    """By a source that takes connections and never answers: in words of ours, not of the scheduler's."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        observe = f"observe: [{{name: silent, kind: vllm, url: '{url}'}}]\n"
        (tmp_path / "agent.yaml").write_text(CONFIG.replace("1s", "500ms") + observe)
        process, _ = start()
        told = next(line for line in process.stderr if "running instances" in line or "left out" in line)
    assert "a round is left out: the one before has not ended; if it happens often, set a longer window" in told


def test_a_taken_port_is_told(tiertune, tmp_path, monkeypatch):
    """Somebody else's port: one message, exit status 2, as of a store's."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "agent.yaml").write_text(CONFIG.replace("port: 0", f"port: {port}"))
        ended = tiertune("agent", "run", "--config", "agent.yaml")
    told = f"http 127.0.0.1:{port}: Address already in use: name another port or host\n"
    assert (ended.returncode, ended.stderr) == (2, told)
