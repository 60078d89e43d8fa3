"""Loads that fail, over the real socket: faults, damage, a remote that raises, clients that leave, no thread."""

import threading

import pytest

from connector.store.serving import DIGEST, Reads, put_remote, used, written
from connector.stores import (
    PATIENCE_S,
    STRIDE,
    Engine,
    chain,
    counted,
    damaged,
    eventually,
    no_more_threads,
    pinned,
    pool,
)
from tiertune_connector.slower.transit import FETCHED_AT_ONCE
from tiertune_connector.tiers.base import Outcome


@pytest.mark.parametrize(
    ("fault", "outcome"), [(Outcome.MISS, "miss"), (Outcome.ERROR, "error"), (Outcome.TIMEOUT, "error")]
)
def test_a_failing_fetch_is_an_outcome_per_chunk(remote, store, engine, fault, outcome):
    """What is in DRAM is had all the same; the slots of the rest are free again."""
    keys = chain("k", 3)
    engine.put(keys[:1])
    put_remote(remote, keys)
    remote.fault = lambda operation: fault if operation == "read" else None
    assert engine.load(keys).outcomes == ["hit", outcome, outcome]
    remote.fault = lambda _: None
    eventually(lambda: pinned(store) == 1)
    assert len(pool(store).pool) == 1


def test_what_waits_its_turn_is_called_off_only_where_its_tier_died(remote, store, engine):
    """Nobody will read it: its slots are free at once. Of a tier that is well all is waited for."""
    keys = chain("k", FETCHED_AT_ONCE + 4)
    put_remote(remote, keys)
    reads = remote.fault = Reads()
    engine.client.load(keys, deadline_s=PATIENCE_S)
    eventually(lambda: reads.count == FETCHED_AT_ONCE)
    coming, breaker = store.store.loads.arrivals._coming, store.store.lanes["remote"].breaker
    store.store.watch()
    assert len(coming) == len(keys)
    while not breaker.open:
        breaker.record(Outcome.ERROR)
    store.store.watch()
    assert len(coming) == FETCHED_AT_ONCE
    reads.free.set()


def test_a_damaged_remote_chunk_is_corrupt_and_gone(remote, store, engine):
    """It is never read, and the next load misses it."""
    keys = chain("k", 2)
    put_remote(remote, keys)
    damaged(remote, DIGEST, keys[0])
    assert engine.load(keys).outcomes[0] == "corrupt"
    assert engine.find(keys) == []


def test_damage_in_dram_is_found_by_the_reader(remote, store, engine, http):
    """The client refuses what the store did not notice; the store then drops the chunk, and fetches it anew."""
    engine.put([b"key"])
    eventually(lambda: remote.present(DIGEST, [b"key"])[1])
    pool(store).pool.get(b"key").view()[17] ^= 1
    assert engine.get([b"key"]) == 0
    eventually(lambda: http.total("tier_errors_total", tier="dram", operation="read", reason="corrupt") == 1)
    eventually(lambda: http.total("tier_pinned_bytes", tier="dram") == 0)
    assert engine.find([b"key"]) == ["remote"]
    assert engine.get([b"key"]) == 1, "the copy that was written before"


def test_who_says_damaged_of_what_is_whole_drops_nothing(store, engine, http):
    """The store sums for itself, and waits for no disk, however many loads do: the chunk is pinned until then."""
    engine.put([b"key"])
    loaded = engine.load([b"key"])
    assert http.total("tier_pinned_bytes", tier="dram") == STRIDE
    loaded.slots[0].damaged = True
    free, waiters = threading.Event(), store.server._waiters._pools["disk"]
    for _ in range(waiters._max_workers):
        waiters.submit(free.wait)
    try:
        engine.client.release(loaded)
        eventually(lambda: http.total("tier_pinned_bytes", tier="dram") == 0)
    finally:
        free.set()
    assert engine.get([b"key"]) == 1
    assert http.total("tier_errors_total") == 0


def test_a_remote_that_raises_ends_nobody(remote, store, engine, http):
    """It is counted; the load is told an error; the store goes on."""
    keys = chain("k", 2)
    put_remote(remote, keys)

    def raises(operation):
        if operation == "read":
            raise RuntimeError("a tier must not do this")

    remote.fault = raises
    assert engine.load(keys).outcomes == ["error", "error"]
    assert http.total("internal_errors_total", place="read") == 2
    remote.fault = lambda _: None
    assert engine.get(keys) == 2
    assert engine.client.connected


def test_a_remote_that_raises_when_it_is_asked_is_asked_no_more(remote, store, engine, http):
    """Lookups find nothing there, their client stays, and the tier counts as dead."""
    keys = chain("k", 2)
    put_remote(remote, keys)

    def raises(operation):
        if operation == "present":
            raise ValueError("a tier must not do this")

    remote.fault = raises
    for number in range(3):
        assert engine.find(keys, f"r{number}") == []
    assert engine.client.connected
    assert store.store.lanes["remote"].breaker.state == "dead"
    assert http.total("internal_errors_total", place="present") == 3


def test_a_client_that_leaves_during_its_load_pins_nothing(remote, store, engine):
    """The chunk comes, and can leave again."""
    keys = chain("k", 3)
    put_remote(remote, keys)
    reads = remote.fault = Reads()
    leaving = Engine(store, name="leaving")
    future = leaving.client.load(keys, deadline_s=10)
    eventually(lambda: reads.count == 3)
    leaving.client.close()
    assert future.result(5).outcomes == ["error"] * 3
    eventually(lambda: len(store.server.sessions()) == 1)
    reads.free.set()
    eventually(lambda: engine.find(keys) == ["dram"] * 3)
    eventually(lambda: pinned(store) == 0)


def test_a_store_that_ends_amid_a_load_tells_no_failure(home, remote, caplog):
    """It was told to end: that a load waits for a remote meanwhile is no error in its log."""
    keys = chain("k", 2)
    with used(home, remote) as (store, engine, _):
        engine.put(keys[:1])
        put_remote(remote, keys[1:])
        written(store)
        reads = remote.fault = Reads()
        future = engine.client.load(keys, deadline_s=PATIENCE_S)
        eventually(lambda: reads.count == 1)
        waiting = [thread for thread in threading.enumerate() if thread.name.startswith("wait-remote")]
    assert future.result(5).outcomes == ["error"] * 2
    reads.free.set()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert counted(store.counters, "internal_errors_total") == {}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_where_no_more_threads_can_be_had_a_load_is_brought_by_those_there(remote, store, engine, http, monkeypatch):
    """One chunk after another; it holds nothing afterwards."""
    here, there = chain("h", 2), chain("t", 2)
    engine.put(here)
    put_remote(remote, there)
    reads = remote.fault = Reads()
    reads.free.set()
    no_more_threads(monkeypatch, named="remote-read")
    loaded = engine.load(here + there)
    assert loaded.outcomes == ["hit"] * 4
    assert (engine.read(loaded), reads.count) == (4, 2)
    engine.client.release(loaded)
    pool = store.store.dram.pools[DIGEST].pool
    eventually(lambda: pool.pinned == 0)
    assert http.total("internal_errors_total") == 0
