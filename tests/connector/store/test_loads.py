"""Loads from slower tiers, over the real socket: in time, once, whole, and measured."""

import threading
import time

import pytest

from connector.store.serving import DIGEST, Reads, evict_all, joined, put_remote, serving, used, written
from connector.stores import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    PATIENCE_S,
    STRIDE,
    Clock,
    Engine,
    at_best,
    chain,
    counted,
    eventually,
    short_folder,
)
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.keys import Namespace
from tiertune_connector.tiers.base import Outcome


def test_remote_chunks_come_into_dram(remote, store, engine, http):
    """Found, fetched, read; afterwards they are in DRAM, and whose they are is known."""
    keys = chain("k", 12)
    put_remote(remote, keys)
    assert engine.find(keys) == ["remote"] * 12
    loaded = engine.load(keys)
    assert loaded.outcomes == ["hit"] * 12
    assert engine.read(loaded) == 12
    assert list(loaded.seconds) == ["remote"]
    engine.client.release(loaded)
    assert engine.find(keys) == ["dram"] * 12
    hit = {"tier": "dram", "result": "hit", "origin": "other_host"}
    eventually(lambda: http.total("tier_lookup_tokens_total", **hit) == 12 * 16)  # counted behind the answer


@pytest.mark.parametrize("slower", ["disk", "remote"])
def test_what_comes_back_from_slower_tiers_is_still_its_engine_s(tmp_path, remote, slower):
    """What sharing brings is what another engine computed; the engine's own is not, wherever it lay meanwhile."""
    disk = {"disk": {"path": tmp_path / "disk", "capacity": "4MiB"}} if slower == "disk" else {}

    def hits(http, tier, chunks):
        told = {"tier": tier, "result": "hit"}
        eventually(lambda: http.total("tier_lookup_tokens_total", **told) == sum(chunks.values()) * 16)
        return {origin: http.total("tier_lookup_tokens_total", **told, origin=origin) / 16 for origin in chunks}

    with (
        short_folder() as home,
        used(home, remote, **disk) as (store, engine, http),
        joined(store, name="engine-1") as other,
    ):
        mine, theirs, foreign = chain("mine", 4), chain("theirs", 3), chain("foreign", 2)
        asked, expected = [mine, theirs], {"self": 4, "same_host": 3}
        if slower == "disk":
            http.retune(tiers__disk__write="commit")
        else:
            put_remote(remote, foreign)
            asked, expected = [*asked, foreign], {**expected, "other_host": 2}
        engine.put(mine)
        other.put(theirs)
        written(store)
        evict_all(http)
        assert [set(engine.find(keys)) for keys in asked] == [{slower}] * len(asked)
        assert hits(http, slower, expected) == expected
        assert [engine.get(keys) for keys in asked] == list(map(len, asked))
        assert [set(engine.find(keys)) for keys in asked] == [{"dram"}] * len(asked)
        assert hits(http, "dram", expected) == expected, "and when it is in DRAM again"


def test_an_engine_without_a_name_finds_each_chunk_once(store, http):
    """What nobody named computed is told by no other sign than what came from a slower tier."""
    keys, hit = chain("k", 4), {"tier": "dram", "result": "hit"}
    with joined(store, name="") as engine:
        engine.put(keys)
        assert engine.find(keys) == ["dram"] * 4
        engine.heard()
    assert http.total("tier_lookup_tokens_total", **hit, origin="self") == 4 * 16
    assert http.total("tier_lookup_tokens_total", **hit) == 4 * 16


def test_tiers_are_joined_to_one_run(remote, store, engine, http):
    """DRAM, remote, DRAM: the run goes on over both; a gap in all of them ends it."""
    keys = chain("k", 9)
    engine.put(keys[:3] + keys[5:7] + keys[8:])
    put_remote(remote, keys[3:5])
    tiers = ["dram"] * 3 + ["remote"] * 2 + ["dram"] * 2
    assert engine.find(keys) == tiers
    loaded = engine.load(keys)
    assert (loaded.outcomes[:8], len(loaded.slots)) == (["hit"] * 7 + ["miss"], 7)
    counted = {("dram", "hit"): 5, ("dram", "miss"): 4, ("remote", "hit"): 2, ("remote", "miss"): 2}
    for (tier, result), chunks in counted.items():  # behind the answer
        told = {"tier": tier, "result": result}
        eventually(lambda told=told, chunks=chunks: http.total("tier_lookup_tokens_total", **told) == chunks * 16)


def test_a_late_chunk_is_told_late_and_is_there_afterwards(remote, store, engine):
    """The deadline ends the wait, not the transfer."""
    keys = chain("k", 3)
    put_remote(remote, keys)
    engine.put(keys[:1])
    reads = remote.fault = Reads()

    def late() -> float:
        started = time.monotonic()
        loaded = engine.load(keys, deadline_s=0.1)
        took = time.monotonic() - started
        assert took >= 0.1
        assert loaded.outcomes == ["hit", "late", "late"]
        assert engine.read(loaded) == 1
        return took

    assert at_best(late, 1.0)
    reads.free.set()
    assert eventually(lambda: engine.find(keys) == ["dram"] * 3)
    assert engine.get(keys) == 3
    eventually(lambda: store.store.dram.pools[DIGEST].pool.pinned == 1)  # what a late load was given


def test_a_chunk_on_its_way_is_fetched_once(remote, store, engine):
    """However many loads wait for it, each gets it, and each holds it."""
    keys = chain("k", 4)
    put_remote(remote, keys)
    reads = remote.fault = Reads()
    with Engine(store.server.path, name="engine-1") as other:
        futures = [e.client.load(keys, deadline_s=10) for e in (engine, other, engine)]
        eventually(lambda: reads.count == 4 and len(store.server._waiters._pools["remote"]._threads) >= 3)
        reads.free.set()
        loads = [future.result(10) for future in futures]
        assert [loaded.outcomes for loaded in loads] == [["hit"] * 4] * 3
        assert reads.count == 4
        assert engine.read(loads[0]) == engine.read(loads[2]) == other.read(loads[1]) == 4
        for who, loaded in zip((engine, other, engine), loads, strict=True):
            who.client.release(loaded)
        eventually(lambda: store.store.dram.pools[DIGEST].pool.pinned == 0)


class Ticking(Clock):
    """A moment passes with each reading, and no other time until a test moves it."""

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


def measured(store, monkeypatch):
    """The clock by which fetches are measured from now on; the remote was probed."""
    lanes = store.store.lanes
    eventually(lambda: lanes["remote"].transit.estimate() is not None)
    clock = Ticking(time.monotonic())
    for clocked in (*lanes.values(), *(lane.transit for lane in lanes.values())):
        monkeypatch.setattr(clocked, "_clock", clock)
    for clocked in (store.store.loads, store.store.loads.arrivals):
        monkeypatch.setattr(clocked, "clock", clock)
    return clock


def test_what_is_on_its_way_is_the_queue_of_the_next(remote, store, engine, monkeypatch):
    """While four chunks of one load come from the remote, the next is told to wait for them; once here, for nothing."""
    clock = measured(store, monkeypatch)
    keys = chain("k", 4)
    put_remote(remote, keys)
    reads = remote.fault = Reads()
    load = engine.client.load(keys, deadline_s=10)
    eventually(lambda: reads.count == 4)
    lane = store.store.lanes["remote"]
    eventually(lambda: lane.transit.estimate().transfers == 1)
    estimate = lane.transit.estimate()
    assert estimate.queue_s == pytest.approx(4 * CHUNK_BYTES / estimate.bytes_per_s)
    clock.now += 100 * estimate.queue_s  # that the remote takes
    reads.free.set()
    assert load.result(10).outcomes == ["hit"] * 4
    after = store.store.health.costs()["remote"]
    assert (after.queue_s, after.transfers, after.samples) == (0.0, 0, estimate.samples + 1)
    assert after.bytes_per_s < estimate.bytes_per_s / 5
    assert after.doubt > 0.3


def test_what_another_engine_fetches_already_is_not_waited_for_twice(remote, store, engine, monkeypatch):
    """Of a prompt of which four chunks come for another engine these are its own fetch, and no queue before it."""
    measured(store, monkeypatch)
    keys = chain("k", 6)
    put_remote(remote, keys + chain("other", 6))
    reads = remote.fault = Reads()
    load = engine.client.load(keys[:4], deadline_s=10)
    eventually(lambda: reads.count == 4)
    eventually(lambda: store.store.lanes["remote"].transit.estimate().transfers == 1)
    with Engine(store.server.path, name="engine-1") as second:
        same, others = (
            second.client.lookup("r", prompt, prompt_tokens=96).result(10) for prompt in (keys, chain("other", 6))
        )
    assert same.tiers == others.tiers == ["remote"] * 6
    assert (same.costs["remote"].queue_s, same.costs["remote"].transfers) == (0.0, 0)
    waited = 4 * CHUNK_BYTES / others.costs["remote"].bytes_per_s
    assert (others.costs["remote"].queue_s, others.costs["remote"].transfers) == (pytest.approx(waited), 1)
    reads.free.set()
    assert load.result(10).outcomes == ["hit"] * 4


def test_a_load_does_not_evict_its_own_head(home, remote):
    """Leading chunks in DRAM are held before room is made for those that follow."""
    with serving(home, remote, dram=8 * STRIDE) as store, joined(store) as engine:
        keys = chain("k", 8)
        engine.put(keys[:5])
        put_remote(remote, keys[5:])
        with Engine(store.server.path, name="engine-1") as other:
            other.put(chain("other", 3))
        written(store)
        assert engine.load(keys).outcomes == ["hit"] * 8


def test_chunks_that_came_cannot_leave_before_their_load_has_them(home, remote):
    """Loads that together want more than the pool holds: each gets a leading run, all of it whole."""
    with serving(home, remote, dram=12 * STRIDE) as store:
        chains = [chain(f"k{number}", 6) for number in range(6)]
        for keys in chains:
            put_remote(remote, keys)
        with Engine(store.server.path) as engine:
            for _ in range(5):
                futures = [engine.client.load(keys, deadline_s=10) for keys in chains]
                for future in futures:
                    loaded = future.result(10)
                    assert engine.read(loaded) == len(loaded.slots)
                    assert loaded.outcomes == ["hit"] * len(loaded.slots) + ["miss"] * (6 - len(loaded.slots))
                    engine.client.release(loaded)
            eventually(lambda: store.store.dram.pools[DIGEST].pool.pinned == 0)


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
    eventually(lambda: store.store.dram.pools[DIGEST].pool.pinned == 1)
    assert len(store.store.dram.pools[DIGEST].pool) == 1


def test_a_damaged_remote_chunk_is_corrupt_and_gone(remote, store, engine):
    """It is never read, and the next load misses it."""
    keys = chain("k", 2)
    put_remote(remote, keys)
    remote.damage(DIGEST, keys[0])
    assert engine.load(keys).outcomes[0] == "corrupt"
    assert engine.find(keys) == []


def test_damage_in_dram_is_found_by_the_reader(remote, store, engine, http):
    """The client refuses what the store did not notice; the store then drops the chunk, and fetches it anew."""
    engine.put([b"key"])
    eventually(lambda: remote.present(DIGEST, [b"key"])[1])
    store.store.dram.pools[DIGEST].pool.get(b"key").view()[17] ^= 1
    assert engine.get([b"key"]) == 0
    eventually(lambda: http.total("tier_errors_total", tier="dram", operation="read", reason="corrupt") == 1)
    eventually(lambda: http.total("tier_pinned_bytes", tier="dram") == 0)
    assert engine.find([b"key"]) == ["remote"]
    assert engine.get([b"key"]) == 1, "the copy that was written before"


def test_who_says_damaged_of_what_is_whole_drops_nothing(store, engine, http):
    """The store sums for itself."""
    engine.put([b"key"])
    loaded = engine.load([b"key"])
    loaded.slots[0].damaged = True
    engine.client.release(loaded)
    eventually(lambda: http.total("tier_pinned_bytes", tier="dram") == 0)
    assert engine.get([b"key"]) == 1
    assert http.total("tier_errors_total") == 0


def test_what_is_said_to_be_damaged_waits_for_no_disk(store, engine, http):
    """However many loads do: it lies in memory, and is pinned until it is summed."""
    engine.put([b"key"])
    loaded = engine.load([b"key"])
    loaded.slots[0].damaged = True
    free, waiters = threading.Event(), store.server._waiters._pools["disk"]
    for _ in range(waiters._max_workers):
        waiters.submit(free.wait)
    try:
        engine.client.release(loaded)
        eventually(lambda: http.total("tier_pinned_bytes", tier="dram") == 0)
    finally:
        free.set()


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
    leaving = Engine(store.server.path, name="leaving")
    future = leaving.client.load(keys, deadline_s=10)
    eventually(lambda: reads.count == 3)
    leaving.client.close()
    assert future.result(5).outcomes == ["error"] * 3
    eventually(lambda: len(store.server.sessions()) == 1)
    reads.free.set()
    eventually(lambda: engine.find(keys) == ["dram"] * 3)
    eventually(lambda: store.store.dram.pools[DIGEST].pool.pinned == 0)


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


def test_a_slow_tier_does_not_spoil_what_is_known_of_another(home, remote, monkeypatch):
    """Seconds and estimates are each tier's own; a load that joins a fetch learns nothing from it."""
    more = {"disk": {"path": home / "disk", "capacity": "4MiB"}}
    with used(home, remote, **more) as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        keys = chain("k", 6)
        engine.put(keys[:3])
        put_remote(remote, keys[3:])
        eventually(lambda: store.store.lanes["disk"].writers.queued() == 0)
        evict_all(http)
        clock = measured(store, monkeypatch)
        before = store.store.health.costs()["remote"].samples
        reads = remote.fault = Reads()
        first = engine.client.load(keys, deadline_s=10)
        eventually(lambda: reads.count == 3)
        joining = engine.client.load(keys, deadline_s=10)
        eventually(lambda: [a.waiting for a in store.store.loads.arrivals._coming.values()] == [2] * 3)  # the remote's
        clock.now += 0.3  # that the remote takes
        reads.free.set()
        seconds = first.result(10).seconds
        assert seconds["disk"] < 0.2 < seconds["remote"]
        assert joining.result(10).outcomes == ["hit"] * 6
        costs = store.store.health.costs()
        assert costs["disk"].bytes_per_s > 3 * CHUNK_BYTES / 0.2
        assert costs["remote"].samples == before + 1


def test_where_no_thread_can_be_had_a_load_misses_and_holds_nothing(remote, store, engine, http, monkeypatch):
    """What could not be asked for is called off, as its slot is free for others; the next load brings it."""
    here, there = chain("h", 2), chain("t", 2)
    engine.put(here)
    put_remote(remote, there)
    reads = remote.fault = Reads()
    reads.free.set()
    start = threading.Thread.start

    def failing(thread):
        if thread.name.startswith("remote-read"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", failing)
        loaded = engine.load(here + there)
        assert loaded.outcomes == ["hit", "hit", "miss", "miss"]
        engine.client.release(loaded)
    pool = store.store.dram.pools[DIGEST].pool
    eventually(lambda: pool.pinned == 0)
    assert reads.count == 0
    assert http.total("internal_errors_total", place="read") == 1
    loaded = engine.load(here + there)  # its threads meet what was queued before first
    assert loaded.outcomes == ["hit"] * 4
    assert (engine.read(loaded), reads.count) == (4, 2)
    engine.client.release(loaded)
    eventually(lambda: pool.pinned == 0)


def test_a_disk_that_was_slow_is_tried_again(home, remote, monkeypatch):
    """Though gates refuse what it has meanwhile: one of its chunks is read off the way of requests, and not used."""
    monkeypatch.setattr("tiertune_connector.store.health._DISK_SILENT_S", 0.0)
    with used(home, remote, disk={"path": home / "disk", "capacity": "4MiB"}) as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        health, lane = store.store.health, store.store.lanes["disk"]
        engine.put(chain("p", 3))
        eventually(lambda: store.store.disk.usage().chunks == 3)
        health.probe()
        assert "disk" not in health.costs(), "requests find out what is not known"
        lane.transit.asked(CHUNK_BYTES)
        time.sleep(0.05)
        lane.transit.ended(CHUNK_BYTES, Outcome.OK)
        slow = health.costs()["disk"].bytes_per_s
        (pool,) = store.store.disk.pools.values()
        before = list(pool.pool)
        health.probe()
        eventually(lambda: health.costs()["disk"].bytes_per_s > 2 * slow)
        assert (list(pool.pool), pool.pool.pinned) == (before, 0)


def test_metrics_tell_the_speed_of_the_chunks_that_came(remote, store, engine, http):
    """They have one bandwidth for a tier: agents take bytes by it, and know nothing of a chunk's handling."""
    lane, keys = store.store.lanes["remote"], chain("k", 12)
    put_remote(remote, keys)
    engine.client.release(engine.load(keys))
    chunk_bytes = lane.transit.chunk_bytes
    assert chunk_bytes >= CHUNK_BYTES, "the probe's among them"
    lane.transit.estimate = lambda *_: FetchEstimate(0.0, chunk_bytes / 1e9, 1e9)
    assert http.total("fetch_estimate_bytes_per_second", tier="remote") == pytest.approx(5e8)
    assert http.total("fetch_estimate_bytes_per_second", tier="dram") == store.store.health.dram_cost().bytes_per_s


def test_of_a_disk_all_sizes_are_measured_that_nobody_fetched(home, remote):
    """What a gate refuses for what another model's loads took would be refused for ever."""
    disk = {"disk": {"path": home / "disk", "capacity": "4MiB"}}
    with used(home, remote, **disk) as (store, engine, http):
        large = Namespace(model="large", chunk_tokens=CHUNK_TOKENS)
        with Engine(store.server.path, name="engine-1", namespace=large, chunk_bytes=8 * CHUNK_BYTES) as other:
            http.retune(tiers__disk__write="commit")
            for each in (engine, other):
                assert each.put(chain("k", 2)) == ["", ""]
            written(store)
            lane, asked = store.store.lanes["disk"], []
            lane.measure = lambda _, nbytes, silent_s: asked.append(nbytes)
            store.store.health.probe()
            store.store.health.probe()
    assert sorted(asked[:2]) == [CHUNK_BYTES, 8 * CHUNK_BYTES]
    assert asked[2:] == asked[1::-1], "each comes first in turn: one is read at a time"
