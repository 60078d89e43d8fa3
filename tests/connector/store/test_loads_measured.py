"""What loads from slower tiers teach of them, over the real socket: queues, estimates, speeds, sizes."""

import time

import pytest

from connector.store.serving import Reads, evict_all, put_remote, used, written
from connector.stores import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    Clock,
    Engine,
    chain,
    eventually,
)
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.keys import Namespace
from tiertune_connector.tiers.base import Outcome

pytestmark = pytest.mark.slow


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
    after = store.store.health.costs({}, 0)["remote"]
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
    with Engine(store, name="engine-1") as second:
        same, others = (
            second.client.lookup("r", prompt, prompt_tokens=96).result(10) for prompt in (keys, chain("other", 6))
        )
    assert same.tiers == others.tiers == ["remote"] * 6
    assert (same.costs["remote"].queue_s, same.costs["remote"].transfers) == (0.0, 0)
    waited = 4 * CHUNK_BYTES / others.costs["remote"].bytes_per_s
    assert (others.costs["remote"].queue_s, others.costs["remote"].transfers) == (pytest.approx(waited), 1)
    reads.free.set()
    assert load.result(10).outcomes == ["hit"] * 4


def test_a_slow_tier_does_not_spoil_what_is_known_of_another(home, remote, monkeypatch):
    """Seconds and estimates are each tier's own; a load that joins a fetch learns nothing from it."""
    with used(home, remote, disk="4MiB") as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        keys = chain("k", 6)
        engine.put(keys[:3])
        put_remote(remote, keys[3:])
        eventually(lambda: store.store.lanes["disk"].writers.queued() == 0)
        evict_all(http)
        clock = measured(store, monkeypatch)
        before = store.store.health.costs({}, 0)["remote"].samples
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
        costs = store.store.health.costs({}, 0)
        assert costs["disk"].bytes_per_s > 3 * CHUNK_BYTES / 0.2
        assert costs["remote"].samples == before + 1


def test_a_disk_that_was_slow_is_tried_again(home, remote, monkeypatch):
    """Though gates refuse what it has meanwhile: one of its chunks is read off the way of requests, and not used."""
    monkeypatch.setattr("tiertune_connector.store.health._DISK_SILENT_S", 0.0)
    with used(home, remote, disk="4MiB") as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        health, lane = store.store.health, store.store.lanes["disk"]
        engine.put(chain("p", 3))
        eventually(lambda: store.store.disk.usage().chunks == 3)
        health.probe()
        assert "disk" not in health.costs({}, 0), "requests find out what is not known"
        lane.transit.asked(CHUNK_BYTES)
        time.sleep(0.05)
        lane.transit.ended(CHUNK_BYTES, Outcome.OK)
        slow = health.costs({}, 0)["disk"].bytes_per_s
        (pool,) = store.store.disk.pools.values()
        before = list(pool.pool)
        health.probe()
        eventually(lambda: health.costs({}, 0)["disk"].bytes_per_s > 2 * slow)
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
    with used(home, remote, disk="4MiB") as (store, engine, http):
        large = Namespace(model="large", chunk_tokens=CHUNK_TOKENS)
        with Engine(store, name="engine-1", namespace=large, chunk_bytes=8 * CHUNK_BYTES) as other:
            http.retune(tiers__disk__write="commit")
            for each in (engine, other):
                each.put_all(chain("k", 2))
            written(store)
            lane, asked = store.store.lanes["disk"], []
            lane.measure = lambda _, nbytes, silent_s: asked.append(nbytes)
            store.store.health.probe()
            store.store.health.probe()
    assert sorted(asked[:2]) == [CHUNK_BYTES, 8 * CHUNK_BYTES]
    assert asked[2:] == asked[1::-1], "each comes first in turn: one is read at a time"
