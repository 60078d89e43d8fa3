"""A process without chunks tells a real store what its stages take, and can do nothing else there."""

import time

import numpy as np
import pytest

from connector.stores import eventually
from tiertune_connector import profile
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.profile.stages import Profiler
from tiertune_connector.serve.main import StoreProcess
from tiertune_connector.settings import StoreSettings


@pytest.fixture
def process(home):
    dram = {"capacity": "8MiB", "segment": "1MiB"}
    made = StoreProcess(StoreSettings(socket=home / "s", state_dir=home / "state", http={"port": 0}, dram=dram))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def client(process, home):
    made = StoreClient(home / "s", None, engine="e", stage="talker", gpus=["GPU-1"])
    assert made.connect()
    yield made
    made.close()


def counted(process, name):
    return process.counters.snapshot()[1].get(name, {"rows": []})["rows"]


def test_stages_of_a_plain_process_are_counted(process, client):
    """Seconds and tokens arrive by stage and phase; no pool is made for a client that has no chunks."""
    profiler = Profiler()
    with profiler.stage("code2wav", phase="decode").span(tokens=5):
        time.sleep(0.001)
    profiler.report_to(client, every_s=3600)
    profiler.close()
    eventually(lambda: counted(process, "stage_tokens_total"))
    assert counted(process, "stage_tokens_total") == [["code2wav", "decode", 5.0]]
    assert counted(process, "stage_gpu_seconds_total")[0][2] >= 0.001
    assert process.store.dram.pools == {}


@pytest.mark.parametrize("count", [np.int64(5), np.float32(5), 5.0], ids=["int64", "float32", "float"])
def test_tokens_may_be_any_kind_of_number(process, client, count):
    """As a module's own code counts them; one that no message can hold would take all other stages with it."""
    profiler = Profiler()
    with profiler.stage("talker").span(tokens=count):
        pass
    profiler.report_to(client, every_s=3600)
    profiler.close()
    eventually(lambda: counted(process, "stage_tokens_total") == [["talker", "mixed", 5.0]])


def test_its_gpus_are_joined_to_its_label(process, client):
    """As it greeted with them, and as it learned later which they are."""
    assert process._stages() == {"GPU-1": "talker"}
    client.gpus = ["GPU-2"]
    client.report_steps([])
    eventually(lambda: process._stages() == {"GPU-2": "talker"})


def test_it_can_ask_for_nothing(process, client):
    """The store ends the connection of one that does, and serves on."""
    assert client.lookup("r", [b"key"], prompt_tokens=16).result(10).reason == "unreachable"
    eventually(lambda: client.connected)


def test_what_is_measured_before_there_is_a_store_is_told_when_there_is_one(home):
    """The process may come first."""
    client = profile.connect(home / "s")
    with profile.stage("early").span(tokens=7):
        pass
    dram = {"capacity": "8MiB", "segment": "1MiB"}
    process = StoreProcess(StoreSettings(socket=home / "s", state_dir=home / "state", http={"port": 0}, dram=dram))
    process.start()
    try:
        eventually(lambda: ["early", "mixed", 7.0] in counted(process, "stage_tokens_total"))
    finally:
        profile.stage.__self__.close()  # else it goes on telling a client that is gone
        client.close()
        process.stop()
