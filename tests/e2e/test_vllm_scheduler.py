"""What TierTune costs the thread that schedules."""

import json
import os
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from connector.stores import short_folder
from e2e.vllm_engines import PYTHON, environment, of_engines
from e2e.vllm_fixtures import prompts
from e2e.vllm_model import write_model
from e2e.vllm_stores import MIB, Host
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.keys import Namespace
from tiertune_connector.vllm.transfers import Job, Transfers

pytestmark = of_engines(600)

OVERHEAD_S = 200e-6
CHUNK_BYTES, CHUNKS = 32 * MIB, 4
GAP_S = 2e-3
NAP_S = 2e-4
GAPS_RATIO = 0.4
"""Of the late wake-ups that copies cause which hold the GIL."""
ROUNDS, ROUND_S = 5, 0.5
RUNNER = Path(__file__).parent / "vllm_scheduler.py"


@pytest.fixture
def home():
    with short_folder() as folder, Host(folder / "a", "host-a", remote=None, dram="256MiB") as running:
        yield running


def test_a_step_costs_little_more_than_plain_offloadings(home, record_property):
    """Of 64 running and 16 deferred requests: the connector's time in a step (median) against vLLM's own."""
    with short_folder() as folder:
        command = [str(PYTHON), str(RUNNER), str(write_model(folder / "model")), str(home.socket)]
        run = subprocess.run(
            command, env=environment(processes=False), capture_output=True, text=True, timeout=300, check=False
        )
    assert run.returncode == 0, run.stderr[-4000:]
    seen = json.loads(run.stdout.splitlines()[-1])
    assert [seen[kind]["deferred"] for kind in ("plain", "ours", "undeferred")] == [16, 16, 0]
    assert min(seen[kind]["running"] for kind in seen) >= 64
    plain, ours = (median(seen[kind]["connector_s"]) for kind in ("plain", "ours"))
    for kind, times in seen.items():
        record_property(f"{kind}: microseconds a step", round(1e6 * median(times["connector_s"])))
    assert ours - plain <= OVERHEAD_S, f"{1e6 * ours:.0f} µs a step, plain offloading {1e6 * plain:.0f} µs"


def test_copies_do_not_hold_the_scheduler_up(home, record_property):
    """A thread that wakes up every 200 µs is late far less often than beside copies of the same size that hold the GIL.

    Both are counted beside a calm thread's, in turn: what else the machine does is in all of them.
    """
    namespace = Namespace(model="m", chunk_tokens=64)
    client = StoreClient(home.socket, namespace, chunk_bytes=CHUNK_BYTES, chunk_tokens=64, engine="e")
    assert client.connect(10)
    staging = np.random.default_rng(0).integers(0, 256, (CHUNKS, CHUNK_BYTES), np.uint8)
    transfers = Transfers(client, staging)
    keys = [bytes([number]) * 32 for number in range(CHUNKS)]
    copied, late = [0.0], {"calm": [], "ours": [], "holding": []}
    try:
        store(transfers, keys)
        for _ in range(ROUNDS):
            late["calm"].append(late_wake_ups(lambda _: False))
            late["ours"].append(late_wake_ups(lambda job: load(transfers, keys, job, copied)))
            with copies_that_hold_the_gil(staging):
                late["holding"].append(late_wake_ups(lambda _: False))
    finally:
        transfers.close(5)
        client.close()
    assert copied[0] >= ROUNDS * CHUNKS * CHUNK_BYTES, "too little was copied to say anything"
    record_property("late wake-ups a second", late)
    calm, ours, holding = (median(late[kind]) for kind in late)
    assert ours - calm <= GAPS_RATIO * (holding - calm), late


@contextmanager
def copies_that_hold_the_gil(staging):
    """A thread that copies chunks as plain Python does."""
    source, target = bytearray(staging[0]), bytearray(CHUNK_BYTES)
    ended = threading.Event()

    def copy():
        while not ended.is_set():
            target[:] = source

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def store(transfers, keys):
    """Put all of staging into the store."""
    transfers.store(Job(0, "r", keys, list(range(CHUNKS)), loads=False, deadline_s=30))
    (job,) = over_within(transfers, 30)
    assert job.succeeded


def load(transfers, keys, job, copied):
    """Start a load of all chunks if none is under way; whether one was started."""
    ended = transfers.take()
    for each in ended:
        assert each.succeeded
        copied[0] += CHUNKS * CHUNK_BYTES
    if job == 0 or ended:
        transfers.load(Job(job + 1, "r", keys, list(range(CHUNKS)), loads=True, deadline_s=30))
        return True
    return False


def late_wake_ups(work):
    """Wake-ups a second of this thread that come over ``GAP_S`` late while it calls ``work(jobs so far)``.

    Time in which it could have run but had no processor, as the kernel tells, is left out: that is the machine's.
    """
    count, jobs = 0, 0
    with Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").open("rb") as stat:

        def queued():
            return int(os.pread(stat.fileno(), 100, 0).split()[1]) / 1e9

        began = time.perf_counter()
        ending = False
        while not ending:
            jobs += bool(work(jobs))
            before, without = time.perf_counter(), queued()
            time.sleep(NAP_S)
            now = time.perf_counter()
            count += now - before - (queued() - without) > NAP_S + GAP_S
            ending = now - began > ROUND_S
    return count / (now - began)


def over_within(transfers, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if jobs := transfers.take():
            return jobs
        threading.Event().wait(0.01)
    raise AssertionError(f"no job ended within {seconds} s")


def test_telemetry_takes_at_most_a_hundredth_of_the_steps(fleet, engine_c, record_property):
    """The summed time of the adapter's accounting against that of the steps that it accounts for."""
    before = engine_c.ask("telemetry")
    engine_c.generate(prompts(16, seed=71, prefix=64, tail=40), max_tokens=64)
    after = engine_c.ask("telemetry")
    spent, steps = (after[name] - before[name] for name in ("overhead_s", "step_s"))
    record_property("telemetry's share of step time", spent / steps)
    assert steps > 0
    assert 0 < spent <= 0.01 * steps, f"{1e3 * spent:.2f} ms of {1e3 * steps:.0f} ms"
