"""A whole round over 500 stores, on real sockets and with an hour of history, takes less than a window of one core."""

import json
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import event, insert

from long.results import record
from tiertune_agent.history.models import WindowRow
from tiertune_agent.run import Agent
from tiertune_agent.settings import AgentSettings

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(2400)]
STORES, WINDOW_S, BEFORE, FIRST, ROUNDS = 500, 15.0, 240, 4, 12
"""An hour of windows before; the first rounds read it, and are not counted."""
MOST_S = 10.0
WINDOW = timedelta(seconds=WINDOW_S)
SAMPLE = json.loads((Path(__file__).parent / "store.json").read_text())


@pytest.fixture
def ports():
    """Of 500 stores that answer."""
    command = [sys.executable, str(Path(__file__).parent / "fleet_server.py"), str(STORES)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield json.loads(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.fixture
def clock():
    """Each question lets a window pass, at the agent as at the stores."""
    return [datetime(2026, 3, 5, 12, 0, 7, tzinfo=UTC)]


@pytest.fixture
def agent(ports, tmp_path, clock):
    stores = [{"url": f"http://127.0.0.1:{port}"} for port in ports]
    made = Agent(AgentSettings(database=f"sqlite:///{tmp_path}/many.sqlite", stores=stores), wall=lambda: clock[0])
    with made.history._engine.begin() as connection:
        for number in range(STORES):
            connection.execute(insert(WindowRow), list(_before(f"host-{number:03}", clock[0])))
    yield made
    made.close()


def _before(store, now):
    """Windows of the remote, which its tuners look through."""
    (place,) = (each for each in SAMPLE["windows"] if each["tier"] == "remote" and not each["namespace"])
    known = {**{name: place[name] for name in ("namespace", "model", "tier")}, "seconds": WINDOW_S}
    for number in range(BEFORE, 0, -1):
        yield {**known, "store": store, "start": now - number * WINDOW, "counters": place["values"]}


def test_a_whole_round_over_500_stores_takes_less_than_a_window_of_one_core(agent, clock):
    """CPU of all threads from the first question to the last tuner; no store is missed, every store is asked about."""
    collected, spent, statements = [], [], [0]
    collect = agent.collector.collect

    def timed():
        began = time.process_time()
        answers = collect()
        collected.append(time.process_time() - began)
        return answers

    agent.collector.collect = timed
    agent.loop.rounds._timer = time.thread_time  # what else the machine does takes no time from the tuners
    event.listen(
        agent.history._engine, "before_cursor_execute", lambda *_: statements.__setitem__(0, statements[0] + 1)
    )
    for _ in range(ROUNDS):
        clock[0] += WINDOW
        began, started, before = time.process_time(), time.perf_counter(), statements[0]
        agent.tick()
        spent.append((time.process_time() - began, time.perf_counter() - started, statements[0] - before))
    assert len(agent.history.stores()) == STORES
    measured, ends = agent.history.measured, (0, STORES - 1)
    windows = [measured.windows(f"host-{index:03}", tier="remote")[-ROUNDS:] for index in ends]
    assert [{window.start > clock[0] - ROUNDS * WINDOW for window in each[1:]} for each in windows] == [{True}] * 2
    asked = {answer["store"] for answer in agent.history.answers.newest() if answer["tuner"] == "remote_fetch"}
    assert len(asked) == STORES
    assert agent.history.journal.open_incidents().get("store_unreachable", 0) == 0
    assert 'job_errors_total{job="loop"}' not in agent.metrics.render().decode()
    cpu, wall, sent = (list(each) for each in zip(*spent[FIRST:], strict=True))
    figures = {
        "stores": STORES,
        "collect_cpu_s": statistics.median(collected[FIRST:]),
        "round_cpu_s": statistics.median(cpu),
        "longest_round_cpu_s": max(cpu),
        "round_wall_s": statistics.median(wall),
        "statements": statistics.median(sent),
    }
    record("round_over_500_stores", "sqlite", figures)
    assert figures["round_cpu_s"] < MOST_S
    assert figures["longest_round_cpu_s"] < WINDOW_S
