"""A process without chunks tells a real store what its stages take, and can do nothing else there."""

import time

import numpy as np
import pytest

from connector.modules import FakeModule
from connector.stores import counted, eventually, running
from tiertune_connector import profile
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.profile.stages import Profiler

pytestmark = pytest.mark.slow


@pytest.fixture
def client(store):
    made = StoreClient(store.server.path, None, engine="e", stage="talker", gpus=["GPU-1"])
    assert made.connect()
    yield made
    made.close()


def tokens(store):
    return counted(store.counters, "stage_tokens_total")


@pytest.mark.parametrize("count", [5, np.int64(5), np.float32(5), 5.0], ids=["int", "int64", "float32", "float"])
def test_stages_of_a_plain_process_are_counted(store, client, count):
    """Seconds and tokens arrive by stage; no pool is made for a client that has no chunks.

    Tokens may be any kind of number: one that no message can hold would take all other stages with it.
    """
    profiler = Profiler()
    profiler.stage("code2wav").attach(
        module := FakeModule(lambda: time.sleep(0.001) or "audio"), tokens=lambda *_: count
    )
    module()
    profiler.report_to(client)
    profiler.close()
    eventually(lambda: tokens(store) == {("code2wav", "mixed"): 5.0})
    assert counted(store.counters, "stage_gpu_seconds_total")["code2wav", "mixed"] >= 0.001
    assert store.store.dram.pools == {}


def test_its_gpus_are_joined_to_its_label(store, client):
    """As it greeted with them, and as it learned later which they are."""
    assert store.gpus.stages() == {"GPU-1": "talker"}
    client.gpus = ["GPU-2"]
    client.report_steps([])
    eventually(lambda: store.gpus.stages() == {"GPU-2": "talker"})


def test_it_can_ask_for_nothing(store, client):
    """The store ends the connection of one that does, and serves on."""
    assert client.lookup("r", [b"key"], prompt_tokens=16).result(10).reason == "unreachable"
    eventually(lambda: client.connected)


def test_what_is_measured_before_there_is_a_store_is_told_when_there_is_one(home):
    """The process may come first."""
    client = profile.connect(home / "s.sock")
    profile.stage("early").attach(module := FakeModule(lambda: "output"), tokens=lambda *_: 7)
    module()
    with running(home) as store:
        try:
            eventually(lambda: tokens(store).get(("early", "mixed")) == 7.0)
        finally:
            profile.stage.__self__.close()  # else it goes on telling a client that is gone
            client.close()


@pytest.mark.parametrize("label", ["", "x" * 65])
def test_a_label_that_no_store_takes_is_refused(home, label):
    """Else no store would welcome the process, and each would take it for one of another version."""
    with pytest.raises(ValueError, match="1 to 64 characters"):
        profile.connect(home / "s.sock", label=label)
