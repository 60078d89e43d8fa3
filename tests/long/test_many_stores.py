"""500 stores are read, on real sockets, in less than a window of one core; what the whole round takes is told."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from long.results import record
from tiertune_agent.run import Agent
from tiertune_agent.settings import AgentSettings

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]
STORES, WINDOW_S, ROUNDS = 500, 15.0, 4


@pytest.fixture
def ports():
    """Of 500 stores that answer."""
    command = [sys.executable, str(Path(__file__).parent / "fleet_server.py"), str(STORES)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield json.loads(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.fixture
def agent(ports, tmp_path):
    stores = [{"url": f"http://127.0.0.1:{port}"} for port in ports]
    made = Agent(AgentSettings(database=f"sqlite:///{tmp_path}/many.sqlite", stores=stores))
    yield made
    made.close()


def test_500_stores_are_read_in_less_than_a_window_of_one_core(agent):
    """CPU of all threads while it reads; no store is missed. What a whole round takes is recorded beside it."""
    collected, spent = [], []
    collect = agent.collector.collect

    def timed():
        began = time.process_time()
        answers = collect()
        collected.append(time.process_time() - began)
        return answers

    agent.collector.collect = timed
    for number in range(ROUNDS + 1):
        began, started = time.process_time(), time.perf_counter()
        agent.tick()
        if number:
            spent.append((time.process_time() - began, time.perf_counter() - started))
    assert len(agent.history.stores()) == STORES
    assert all(len(agent.history.windows(f"host-{index:03}", tier="remote")) == ROUNDS for index in (0, STORES - 1))
    assert agent.history.open_incidents().get("store_unreachable", 0) == 0
    assert 'job_errors_total{job="loop"}' not in agent.metrics.render().decode()
    cpu, wall = (statistics.median(times) for times in zip(*spent, strict=True))
    figures = {
        "stores": STORES,
        "collect_cpu_s": statistics.median(collected[1:]),
        "round_cpu_s": cpu,
        "round_wall_s": wall,
    }
    record("round_over_500_stores", "sqlite", figures)
    assert figures["collect_cpu_s"] < WINDOW_S
