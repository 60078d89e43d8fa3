"""Stores in this process, in short-lived folders."""

import os
import time

import pytest
import redis

from connector.local_disk import opened
from connector.memory_tier import MemoryTier
from connector.small_store import Served
from connector.stores import (
    PATIENCE_S,
    Clock,
    Engine,
    Http,
    running,
    short_folder,
)
from e2e.servers import redis_server
from tiertune_connector.counters import Counters
from tiertune_connector.slower.lane import Lane


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def home():
    """A folder for one store; its path is short enough for a socket."""
    with short_folder() as folder:
        yield folder


@pytest.fixture
def umask():
    """Sets what is usual where nobody says otherwise, until the test has ended."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def remote():
    """The remote of a store: memory, whose faults a test sets."""
    return MemoryTier()


@pytest.fixture
def store(home):
    """With DRAM alone, unless the module has its own."""
    with running(home) as process:
        yield process


@pytest.fixture
def engine(store):
    """Of the store, whichever that is."""
    with Engine(store) as engine:
        yield engine


@pytest.fixture
def http(store):
    """Of the module's own store."""
    with Http(store.address) as http:
        yield http


@pytest.fixture
def patient(monkeypatch):
    """The thread that sends has the time for it, also on a busy machine."""
    monkeypatch.setattr("tiertune_connector.tracing.otlp.EXPORT_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr("tiertune_connector.tracing.tracer.CLOSE_S", PATIENCE_S)


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def tier(tmp_path):
    """A disk's, of 16 chunks, unless the module has its own."""
    tier = opened(tmp_path)
    yield tier
    tier.close()


@pytest.fixture(scope="module")
def server():
    """A Redis of the module's own, of 64 MiB."""
    with redis_server() as started:
        yield started


@pytest.fixture
def raw(server):
    """A client of it; it is empty."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def lane(tier, counters):
    lane = Lane(tier, counters, time.monotonic, patience_s=PATIENCE_S)
    yield lane
    lane.close()


@pytest.fixture
def served(clock, tmp_path):
    served = Served(clock, tmp_path)
    yield served
    served.close()
