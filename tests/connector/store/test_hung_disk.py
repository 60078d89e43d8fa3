"""A store whose disk hangs or fails: DRAM and the remote serve as before, and the store does what it is told."""

import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest

from connector.store.serving import evict_all, put_remote, serving, written
from connector.stores import NAMESPACE, PATIENCE_S, STRIDE, Clock, Engine, Http, chain, eventually, pool
from tiertune_connector.documents import FieldError
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.slab import Slab

pytestmark = pytest.mark.slow

DIGEST = NAMESPACE.digest
SLOT = 4096 + STRIDE
"""What a chunk takes on disk."""
DRAM = 64
"""Chunks."""


@pytest.fixture
def store(home, remote):
    with serving(home, remote, disk=200 * SLOT, dram=DRAM * STRIDE) as process:
        yield process


@pytest.fixture
def http(store):
    http = Http(store.address)
    http.retune(tiers__disk__write="commit", tiers__remote__write="off")
    yield http
    http.close()


@pytest.fixture
def engine(store, http):
    with Engine(store) as engine:
        eventually(lambda: http.total("tier_capacity_bytes", tier="dram", state="effective") == DRAM * STRIDE)
        yield engine


@pytest.fixture
def hung(monkeypatch):
    """Let what hangs go on, after the test at the latest."""
    free = threading.Event()

    def at(name):
        real = getattr(Slab, name)

        def waits(*args):
            free.wait()
            return real(*args)

        monkeypatch.setattr(Slab, name, waits)
        return free

    yield at
    free.set()


def put(store, engine, *prompts):
    for keys in prompts:
        engine.put_all(keys)
        written(store)


def told(store):
    return store.store.health.told("disk")


def test_dram_serves_engines_come_and_tunings_apply_while_the_disk_hangs(store, http, engine, hung):
    """A writer hangs amid its work: lookups, a Hello, a change of every pool, figures and upkeep do not."""
    keys, more = chain("k", 10), chain("more", 1)
    put(store, engine, keys)
    free = hung("_behead")
    engine.put(more)
    eventually(lambda: store.store.lanes["disk"]._under_way == 1)
    with Engine(store, name="engine-1") as other:
        assert other.connected
        assert other.find(keys) == ["dram"] * 10
        changed = {"dram": {"capacity_bytes": 32 * STRIDE}, "disk": {"capacity_bytes": 5 * SLOT, "eviction": "arc"}}
        assert http.retune(pools={DIGEST: changed}).status_code == 200
        disk = http.get("/v1/status")["pools"][DIGEST]["disk"]
        assert (disk["applied"]["capacity_bytes"], disk["effective"]["eviction"]) == (5 * SLOT, "arc")
        eventually(lambda: http.total("tier_capacity_bytes", tier="dram", state="effective") == 32 * STRIDE)
        assert engine.get(keys) == 10
        free.set()
        written(store)
        eventually(lambda: http.total("tier_resident_bytes", tier="disk") == 5 * SLOT)
        eventually(
            lambda: sum(path.stat().st_blocks * 512 for path in store.store.disk.root.glob("*.slab")) <= 6 * SLOT
        )


def test_a_bypass_is_kept_while_the_disk_does_not_tell_its_size(store, http, monkeypatch):
    """A change to a larger disk asks for it, and is refused before the bypass that waits for its turn gives up."""
    asked, free = threading.Event(), threading.Event()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: asked.set() or free.wait())
    wanted = store.store.tuning.document()
    wanted["tiers"]["disk"]["capacity_bytes"] *= 2
    try:
        with ThreadPoolExecutor(1) as other:
            change = partial(store.control.put, wanted, expected_version=wanted["version"], key="larger")
            changing = other.submit(change)
            assert asked.wait(PATIENCE_S)
            assert store.control.bypass(on=True).bypass
    finally:
        free.set()
    with pytest.raises(FieldError, match="timed out"):
        changing.result()
    assert store._state.load()[0] == store.store.tuning


def test_upkeep_goes_on_while_the_disk_hangs(store, http, engine, hung):
    """What is to be given back on disk waits, and nothing else: memory grows as it is tuned."""
    put(store, engine, chain("k", 20))
    hung("wipe")
    http.retune(tiers__disk__capacity_bytes=2 * SLOT)
    eventually(lambda: store.store.disk.pools[DIGEST].unsure)
    http.retune(tiers__dram__capacity_bytes=2 * DRAM * STRIDE)
    eventually(lambda: http.total("tier_capacity_bytes", tier="dram", state="effective") == 2 * DRAM * STRIDE)


def test_an_engine_is_welcome_though_its_place_on_disk_cannot_be_opened(store, http, hung):
    """It waits for a moment, not for the disk; what it stores is in DRAM at once, and on disk when that goes on."""
    free = hung("headers")
    with Engine(store) as engine:
        assert engine.connected
        eventually(lambda: engine.put(chain("k", 3)) in ([""] * 3, ["present"] * 3))
        assert http.total("tier_errors_total", tier="disk", operation="attach", reason="timeout") == 1
        free.set()
        eventually(lambda: store.store.disk.present(DIGEST, chain("k", 3))[1] == 3)


def test_a_place_on_disk_that_is_opened_late_is_as_the_tuning_asks(store, http, monkeypatch):
    """The disk could not be written when the engine came, and can when its first chunks come."""
    http.retune(pools={DIGEST: {"disk": {"capacity_bytes": 50 * SLOT, "eviction": "arc"}}})
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_open", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
        engine = Engine(store)
    with engine:
        assert "disk" not in http.get("/v1/status")["pools"][DIGEST]
        eventually(lambda: engine.put(chain("k", 3)) in ([""] * 3, ["present"] * 3))
        eventually(lambda: store.store.disk.present(DIGEST, chain("k", 3))[1] == 3)
        disk = http.get("/v1/status")["pools"][DIGEST]["disk"]
        for what in ("desired", "applied", "effective"):
            assert disk[what] == {"capacity_bytes": 50 * SLOT, "eviction": "arc"}


def test_a_dead_disk_hides_nothing_that_the_remote_has(store, http, engine, remote, monkeypatch):
    """Lookups answer, and count, as if it were empty, until it is tried again and answers."""
    keys, alone = chain("k", 12), chain("alone", 3)
    put(store, engine, keys, alone)
    put_remote(remote, keys)
    evict_all(http)

    def hits(tier):
        return http.total("tier_lookup_tokens_total", tier=tier, result="hit")

    with monkeypatch.context() as patch:
        patch.setattr(Slab, "read", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        assert [engine.load([key]).outcomes for key in keys[:3]] == [["error"]] * 3
        assert told(store)[0] == "dead"
        assert engine.find(keys) == ["remote"] * 12
        assert engine.find(alone) == []
        engine.heard()
        eventually(lambda: hits("remote") > 0)
        assert hits("disk") == 0
        assert engine.get(keys) == 12
    store.store.health.try_again()
    assert engine.find(alone) == ["disk"] * 3
    assert engine.get(alone) == 3
    assert told(store)[0] == "ok"


def test_nobody_waits_for_what_a_dead_disk_was_asked_for(store, http, engine, remote, hung):
    """A chunk that it still hangs with is a miss at once, also where the remote has it; others come from there."""
    keys, lane = chain("k", 12), store.store.lanes["disk"]
    put(store, engine, keys)
    put_remote(remote, keys)
    evict_all(http)
    free = hung("read")
    assert engine.load(keys[:2], deadline_s=0.05).outcomes == ["late"] * 2
    for _ in range(3):
        lane.record(Outcome.TIMEOUT)
    assert told(store)[0] == "dead"
    started = time.monotonic()
    assert engine.load(keys, deadline_s=PATIENCE_S).outcomes == ["miss"] * 12
    assert time.monotonic() - started < PATIENCE_S
    assert engine.load(keys[2:]).outcomes == ["hit"] * 10
    free.set()
    eventually(lambda: engine.get(keys) == 12)


def test_what_a_disk_hangs_with_is_stored_anew(store, http, engine, monkeypatch, hung):
    """It is in DRAM as soon as an engine has computed it again, and what the disk reads at last is nobody's."""
    keys, lane, clock = chain("k", 12), store.store.lanes["disk"], Clock(time.monotonic())
    put(store, engine, keys)
    evict_all(http)
    free, held = hung("read"), pool(store)
    assert engine.load(keys[:4], deadline_s=0.05).outcomes == ["late"] * 4
    monkeypatch.setattr(lane, "_clock", clock)
    clock.now += 60.0
    eventually(lambda: len(held.quarantined) == 4)
    engine.put_all(keys)
    assert engine.find(keys) == ["dram"] * 12
    assert (lane.transit._chunks, lane.transit._bytes) == (0, 0)
    free.set()
    eventually(lambda: not held.quarantined)
    assert engine.get(keys) == 12
    assert (held.pool.capacity, lane.transit._chunks) == (DRAM, 0)
    assert http.total("internal_errors_total") == 0


def test_reads_from_a_disk_that_hangs_leave_room_and_are_given_up(store, http, engine, monkeypatch, hung):
    """They leave a quarter of the pool, and what waits for its turn gives that back when the tier is dead.

    It is well again when what it was asked ends; and believed to be as fast as anything.
    """
    prompts = [chain(f"k{number}", 30) for number in range(4)]
    put(store, engine, *prompts)
    evict_all(http)
    hot = chain("hot", 6)
    put(store, engine, hot)
    lane, clock, held = store.store.lanes["disk"], Clock(time.monotonic()), store.store.dram.pools[DIGEST]
    pool, free = held.pool, hung("read")
    for keys in prompts:
        assert engine.find(keys) == ["disk"] * 30
        assert "hit" not in engine.load(keys, deadline_s=0.05).outcomes
    assert pool.pinned == DRAM * 3 // 4
    put(store, engine, chain("new", 10))
    assert engine.get(hot) == 6, "what is used did not leave for them"
    monkeypatch.setattr(lane, "_clock", clock)
    clock.now += 60.0
    eventually(lambda: told(store) == ("dead", "3 operations in a row ended in timeout"))
    eventually(lambda: (len(held.quarantined), pool.pinned) == (8, 0))  # one after the other
    assert engine.find(prompts[0]) == []
    free.set()
    eventually(lambda: told(store)[0] == "ok")
    eventually(lambda: not held.quarantined)
    assert "disk" not in store.store.health.costs({}, 0)
    assert engine.get(prompts[3]) == 30
    assert http.total("internal_errors_total") == 0
