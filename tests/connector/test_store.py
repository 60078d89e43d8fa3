"""The store over its real socket: every tier behind lookup, load, reserve, commit, retune, flush and bypass."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from connector.stores import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    NAMESPACE,
    PATIENCE_S,
    STRIDE,
    Clock,
    Engine,
    Http,
    amid,
    at_best,
    at_once,
    chain,
    eventually,
    payload,
    running,
    view,
)
from tiertune_connector.chunk import Origin
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import Side, TierReport
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.memory import MemoryTier
from tiertune_connector.units import format_size

DIGEST = NAMESPACE.digest
ALICE, BOB = b"a" * 16, b"b" * 16


@pytest.fixture
def remote():
    """The remote of a store: memory, whose faults a test sets."""
    return MemoryTier()


@pytest.fixture
def store(home, remote):
    with serving(home, remote) as process:
        yield process


def serving(home, remote, **more):
    (home / "remote").mkdir(exist_ok=True)
    url = {"url": f"file://{home}/remote", "probe_every": 3600}
    return running(home, wrap_remote=lambda _: remote, remote=url, **more)


@contextmanager
def joined(store, **more):
    """An engine of a store that has all its memory, and has probed its remote."""
    eventually(lambda: store.store.lanes["remote"].transit.estimate() is not None)
    with Engine(store.server.path, **more) as engine:
        eventually(lambda: all(pool.provisioned == pool.allowed for pool in store.store.dram.pools.values()))
        yield engine


@contextmanager
def used(home, remote, **more):
    """A store of a test's own, an engine of it, and its HTTP."""
    with serving(home, remote, **more) as store, joined(store) as engine, Http(store.address) as http:
        yield store, engine, http


@pytest.fixture
def engine(store):
    with joined(store) as engine:
        yield engine


def put_remote(remote, keys, tenant=b""):
    for key in keys:
        assert remote.write(DIGEST, key, view(payload(key)), Origin("host-b", tenant)) is Outcome.OK


def written(store):
    """Nothing waits to be written behind any more: until then it is pinned, and no room for others."""
    eventually(lambda: all(lane.writers.queued() == 0 for lane in store.store.lanes.values()))


def held(remote):
    """Chunks of ours in the remote; the probe's is not."""
    return sum(namespace == DIGEST for namespace, _ in remote._chunks)


def in_remote(remote, keys):
    return remote.present(DIGEST, keys)[1] == len(keys)


def evict_all(http):
    """Empty DRAM, and give it its size back."""
    size = http.get("/v1/tuning")["tiers"]["dram"]["capacity_bytes"]
    assert http.retune(tiers__dram__capacity_bytes=0).status_code == 200
    assert http.retune(tiers__dram__capacity_bytes=size).status_code == 200
    eventually(lambda: http.total("tier_capacity_bytes", tier="dram", state="effective") == size)


# -- DRAM, and between engines


@pytest.mark.parametrize("algorithm", ["arc", "s3fifo"])
def test_a_chain_written_in_pieces_is_used_once(home, algorithm):
    """As chunked prefill writes it: a prompt that came once leaves before one that came again, and as a whole.

    Without a remote nothing is pinned to be written behind, and every lookup is counted before the next request.
    """
    with running(home, eviction=algorithm, dram=64 * STRIDE) as store, Engine(store.server.path) as engine:
        eventually(lambda: store.store.dram.pools[DIGEST].provisioned == 64)
        again, once = chain("again", 8), chain("once", 12)
        for request in ("a", "b", "c"):
            engine.find(again, request)
            engine.put(again, request)
        assert engine.find(once, "d") == []
        for start in range(0, 12, 3):
            assert engine.put(once[start : start + 3], "d") == [""] * 3
        for number in range(6):
            engine.put(chain(f"other {number}", 10), f"o{number}")
        pool = store.store.dram.pools[DIGEST].pool
        assert all(key in pool for key in again)
        kept = [key in pool for key in once]
        assert not all(kept)
        assert kept == sorted(kept, reverse=True), "its tail left first"
        for number in range(6):
            engine.put(chain(f"further {number}", 10), f"f{number}")
        assert pool.prefix(again) == 8
        assert pool.prefix(once) == 0


def test_what_two_engines_compute_at_a_time_is_counted_once_too_often(store, engine, http):
    """Of a prompt that neither found: what the other one has stored or is storing; not what was found, or one's own."""

    def again():
        return http.total("duplicate_prefill_tokens_total", namespace=DIGEST) / CHUNK_TOKENS

    keys, new = chain("k", 8), chain("new", 2)
    assert engine.put(keys[:3]) == [""] * 3
    with joined(store, name="engine-1") as other:
        assert engine.find(keys, "mine") == other.find(keys, "yours") == ["dram"] * 3
        assert engine.put(keys[3:6], "mine") == [""] * 3
        assert len(engine.client.reserve(keys[6:], request="mine").result(10).slots) == 2
        assert engine.put(keys[3:], "mine")[:3] == ["present"] * 3
        assert again() == 0
        assert other.put(keys, "yours") == ["present"] * 6 + ["busy"] * 2
        assert again() == 5
        assert other.put(keys, "nobody's") == ["present"] * 6 + ["busy"] * 2
        assert other.put(new, "yours") == [""] * 2
        assert again() == 5
        assert other.find(new, "mine too") == ["dram"] * 2
        late = chain("late", 4)
        assert other.find(late, "half") == engine.find(late, "theirs") == []
        assert engine.put(late, "theirs") == [""] * 4
        other.client.own("half", gpu_chunks=3, staging_chunks=0)
        assert other.put(late, "half") == ["present"] * 4
        assert again() == 6, "what an engine had itself it did not compute"
        other.client.report("yours", [TierReport("dram", 3, 48, 16, "cheaper", 0.1, 1.0, 3.0, "lost")])
        eventually(lambda: again() == 8)
        other.client.report("yours", [TierReport("dram", 1, 16, 48, "cheaper", 0.1, 1.0, 3.0, "won")])
        other.heard()
        assert again() == 8, "a counter does not fall"


def test_what_one_engine_stored_another_reads(store, engine):
    """Bit for bit, out of the same memory."""
    keys = chain("k", 20)
    assert engine.put(keys) == [""] * 20
    with Engine(store.server.path, name="engine-1") as other:
        assert other.find(keys) == ["dram"] * 20
        assert other.get(keys) == 20


def test_a_chunk_is_visible_with_its_commit_and_not_before(store, engine):
    """Reserved and written is not there; an abort leaves nothing."""
    keys = chain("k", 4)
    slots = engine.client.reserve(keys).result(5).slots
    for slot in slots:
        assert engine.client.write(slot, payload(slot.key))
    with Engine(store.server.path, name="engine-1") as other:
        assert other.find(keys) == []
        assert other.client.reserve(keys).result(5).reasons == ["busy"] * 4
        assert engine.client.commit(slots[:2]).result(5) == [True, True]
        engine.client.abort(slots[2:])
        assert eventually(lambda: other.client.reserve(keys).result(5).reasons[2:] == ["", ""])
        assert other.find(keys) == ["dram"] * 2
        assert engine.client.commit(slots[2:]).result(5) == [False, False]


def test_a_namespace_is_not_anothers(store, engine):
    """The same keys under other weights are not there."""
    keys = chain("k", 3)
    engine.put(keys)
    with Engine(store.server.path, namespace=Namespace(model="llama", weights="x", chunk_tokens=16)) as other:
        assert other.find(keys) == []
        assert other.get(keys) == 0


def test_a_full_pool_keeps_the_heads_of_chains(home, remote):
    """A chain's suffix leaves before its prefix."""
    with serving(home, remote, dram=16 * STRIDE) as store, joined(store) as engine:
        first, second = chain("first", 10), chain("second", 10)
        for name, keys in (("first", first), ("second", second)):
            engine.find(keys, request=name)
            assert engine.put(keys, request=name) == [""] * 10
            written(store)
        assert engine.find(second) == ["dram"] * 10
        assert engine.find(first)[:7] == ["dram"] * 6 + ["remote"]
        assert engine.get(first[:6]) == 6


def test_a_chain_longer_than_the_pool_is_stored_as_far_as_there_is_room(home, remote):
    """The head is taken, the rest is told to be too much."""
    with serving(home, remote, dram=8 * STRIDE) as store, joined(store) as engine:
        keys = chain("k", 20)
        assert engine.put(keys) == [""] * 8 + ["full"] * 12
        assert engine.get(keys) == 8


def test_pins_hold_against_eviction_until_they_are_released(home, remote):
    """What an engine reads stays, however much others store."""
    with serving(home, remote, dram=8 * STRIDE) as store, joined(store) as engine:
        keys = chain("k", 6)
        engine.put(keys)
        loaded = engine.load(keys)
        assert engine.put(chain("other", 8)).count("") == 2
        assert engine.read(loaded) == 6
        engine.client.release(loaded)
        # what is still being written behind has no room at first
        eventually(lambda: set(engine.put(chain("more", 8))) <= {"", "present"})


def test_a_read_after_the_release_does_not_take_the_next_owners_bytes(home, remote):
    """The slot's generation tells."""
    with serving(home, remote, dram=2 * STRIDE) as store, joined(store) as engine:
        engine.put(chain("k", 2))
        loaded = engine.load(chain("k", 2))
        engine.client.release(loaded)
        others = chain("other", 2)
        # the release takes its time: until it is known, there is room for fewer than both
        eventually(lambda: bool(engine.put(others)) and engine.find(others) == ["dram"] * 2)
        assert engine.read(loaded) == 0


# -- loads from slower tiers


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


class Reads:
    """A fault that holds reads until it is let go, and counts them."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self, operation):
        if operation == "read":
            with self._lock:
                self.count += 1
            self.free.wait(30)


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
        futures = [e.client.load("r", keys, deadline_s=10) for e in (engine, other, engine)]
        eventually(lambda: reads.count == 4 and len(store.server._waiters["remote"]._threads) >= 3)
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
    for clocked in (
        *lanes.values(),
        *(lane.transit for lane in lanes.values()),
        store.store.loads,
        store.store.loads.arrivals,
    ):
        monkeypatch.setattr(clocked, "_clock", clock)
    return clock


def test_what_is_on_its_way_is_the_queue_of_the_next(remote, store, engine, monkeypatch):
    """While four chunks of one load come from the remote, the next is told to wait for them; once here, for nothing."""
    clock = measured(store, monkeypatch)
    keys = chain("k", 4)
    put_remote(remote, keys)
    reads = remote.fault = Reads()
    load = engine.client.load("r", keys, deadline_s=10)
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
                futures = [engine.client.load("r", keys, deadline_s=10) for keys in chains]
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


def test_a_client_that_leaves_during_its_load_pins_nothing(remote, store, engine):
    """The chunk comes, and can leave again."""
    keys = chain("k", 3)
    put_remote(remote, keys)
    reads = remote.fault = Reads()
    leaving = Engine(store.server.path, name="leaving")
    future = leaving.client.load("r", keys, deadline_s=10)
    eventually(lambda: reads.count == 3)
    leaving.client.close()
    assert future.result(5).outcomes == ["error"] * 3
    eventually(lambda: len(store.server.sessions()) == 1)
    reads.free.set()
    eventually(lambda: engine.find(keys) == ["dram"] * 3)
    eventually(lambda: store.store.dram.pools[DIGEST].pool.pinned == 0)


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
        first = engine.client.load("r", keys, deadline_s=10)
        eventually(lambda: reads.count == 3)
        joining = engine.client.load("r", keys, deadline_s=10)
        eventually(lambda: [a.waiting for a in store.store.loads.arrivals._coming.values()] == [2] * 3)  # the remote's
        clock.now += 0.3  # that the remote takes
        reads.free.set()
        seconds = first.result(10).seconds
        assert seconds["disk"] < 0.2 < seconds["remote"]
        assert joining.result(10).outcomes == ["hit"] * 6
        costs = store.store.health.costs()
        assert costs["disk"].bytes_per_s > 3 * CHUNK_BYTES / 0.2
        assert costs["remote"].samples == before + 1


# -- write-behind and admission


@pytest.mark.parametrize(("write", "there"), [("commit", True), ("off", False), ("evict", False)])
def test_when_a_commit_is_written_behind(store, engine, http, write, there):
    """At once, when it is about to leave, or never."""
    remote = store.store.lanes["remote"].tier.inner
    http.retune(tiers__remote__write=write)
    keys = chain("k", 5)
    engine.put(keys)
    if there:
        eventually(lambda: in_remote(remote, keys))
    store.store.behind.clean_ahead(store.store.tuning)
    assert eventually(lambda: store.store.lanes["remote"].writers.queued() == 0)
    assert in_remote(remote, keys) is there


def looked_ahead(store, monkeypatch):
    """Waits, when called, until the store has looked at what is about to leave as it is by then."""
    rounds, clean_ahead = [], store.store.behind.clean_ahead
    monkeypatch.setattr(store.store.behind, "clean_ahead", lambda tuning: rounds.append(clean_ahead(tuning)))

    def wait():
        was = len(rounds)
        eventually(lambda: len(rounds) > was + 1)  # one that began after this

    return wait


def test_what_is_about_to_leave_is_written_before(home, remote, monkeypatch):
    """In mode evict, chunks that left DRAM are found in the remote, and those that stay need not be there."""
    with used(home, remote, dram=32 * STRIDE) as (store, engine, http):
        http.retune(tiers__remote__write="evict")
        looks = looked_ahead(store, monkeypatch)
        chains = [chain(f"k{number}", 8) for number in range(8)]
        for keys in chains:
            engine.put(keys)
            looks()
            written(store)
        for keys in chains[:3]:
            assert engine.find(keys) == ["remote"] * 8
            assert engine.get(keys) == 8


def test_prompts_leave_to_an_idle_disk_as_wholes(home, remote, monkeypatch):
    """In mode evict, prompts of an eighth of DRAM, one after another: none has lost a chunk, and none is counted."""
    more = {"disk": {"path": home / "disk", "capacity": "16MiB"}, "dram": 256 * STRIDE}
    with used(home, remote, **more) as (store, engine, http):
        http.retune(tiers__disk__write="evict", tiers__remote__write="off")
        looks = looked_ahead(store, monkeypatch)
        chains = [chain(f"k{number}", 32) for number in range(14)]
        for keys in chains:
            engine.put(keys)
            looks()
            written(store)
        assert http.total("tier_evictions_total", tier="dram") == 14 * 32 - 256
        assert [len(engine.find(keys)) for keys in chains] == [32] * 14
        assert http.total("write_behind_dropped_total") == 0


def test_what_leaves_before_its_turn_is_counted(home, remote, monkeypatch):
    """By tier, whether room was made for other chunks or the capacity fell; what is on disk already is none of it."""
    more = {"disk": {"path": home / "disk", "capacity": "4MiB"}, "dram": 16 * STRIDE}
    with used(home, remote, **more) as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        there = chain("there", 4)
        engine.put(there)
        written(store)
        monkeypatch.setattr(store.store.behind, "clean_ahead", lambda _: None)
        http.retune(tiers__disk__write="evict")
        engine.put(chain("a", 12))
        engine.put(chain("b", 10))
        assert http.total("write_behind_dropped_total", tier="disk", reason="evicted") == 10 - len(there)
        evict_all(http)
        assert http.total("write_behind_dropped_total", tier="disk", reason="evicted") == 22
        assert http.total("write_behind_dropped_total") == 22


def test_what_a_tier_lost_is_written_there_again(home, remote, monkeypatch):
    """A remote that came back empty, and a disk that had no room for a while, have again what DRAM serves."""
    more = {"disk": {"path": home / "disk", "capacity": "4MiB"}}
    with used(home, remote, **more) as (store, engine, http):
        keys = chain("k", 10)
        http.retune(tiers__disk__write="commit", tiers__remote__write="commit")
        engine.put(keys)
        written(store)
        size = http.get("/v1/tuning")["tiers"]["disk"]["capacity_bytes"]
        remote.flush()
        http.retune(tiers__disk__capacity_bytes=0)
        eventually(lambda: store.store.disk.usage().chunks == 0)
        http.retune(tiers__disk__capacity_bytes=size)
        eventually(lambda: http.total("tier_capacity_bytes", tier="disk", state="effective") > 0)
        engine.find(keys)
        written(store)
        assert (held(remote), store.store.disk.usage().chunks) == (0, 0), "written only now"
        monkeypatch.setattr("tiertune_connector.slower.behind.BELIEVED_S", 0.0)  # that time has passed
        engine.find(keys)
        eventually(lambda: in_remote(remote, keys) and store.store.disk.usage().chunks == 10)


def test_second_access_admits_what_is_used_again(remote, store, engine, http):
    """A chunk that nobody asks for twice is not written; a lookup, or a hit in the engine's own memory, is a use."""
    http.retune(admission__remote="second_access")
    once, again, own = chain("once", 3), chain("again", 3), chain("own", 3)
    for keys in (once, again, own):
        engine.put(keys)
    assert held(remote) == 0
    engine.find(again)
    engine.client.lookup("r", own, prompt_tokens=3 * CHUNK_TOKENS, defer=True).result(10)
    engine.client.own("r", gpu_chunks=3, staging_chunks=0)
    eventually(lambda: in_remote(remote, again) and in_remote(remote, own))
    assert held(remote) == 6


def test_a_full_queue_drops_counts_and_is_caught_up_later(remote, store, engine, http):
    """A slow remote takes at most a share of DRAM; what was dropped is written at its next use."""
    free = threading.Event()
    remote.fault = lambda operation: free.wait(30) and None if operation == "write" else None
    keys = chain("k", 60)
    assert engine.put(keys) == [""] * 60
    dropped = http.total("write_behind_dropped_total", tier="remote", reason="queue_full")
    assert dropped > 0
    assert engine.put(chain("more", 20)).count("") == 20, "the pool is not full of pins"
    free.set()
    eventually(lambda: store.store.lanes["remote"].writers.queued() == 0)
    present = [key for key in keys if engine.find([key]) == ["dram"]]
    eventually(lambda: in_remote(remote, present))


def test_a_chunk_that_could_not_be_written_is_tried_again(remote, store, engine, http):
    """At its next use; the failure is counted."""
    remote.fault = lambda operation: Outcome.FULL if operation == "write" else None
    keys = chain("k", 2)
    engine.put(keys)
    eventually(lambda: http.total("write_behind_dropped_total", tier="remote", reason="full") == 2)
    remote.fault = lambda _: None
    eventually(lambda: engine.find(keys) and in_remote(remote, keys))


def test_disk_takes_what_leaves_dram(home, remote):
    """Chunks come back from disk, also after a restart of the store; a chunk goes there once."""
    more = {"disk": {"path": home / "disk", "capacity": "4MiB"}, "dram": 16 * STRIDE}
    keys = chain("k", 30)
    with used(home, remote, **more) as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        for start in range(0, 30, 5):
            engine.put(keys[start : start + 5])
            eventually(lambda: store.store.lanes["disk"].writers.queued() == 0)
        assert set(engine.find(keys)) == {"dram", "disk"}
        assert engine.get(keys[:10]) == 10
    with serving(home, remote, **more) as store, joined(store) as engine:
        assert engine.find(keys) == ["disk"] * 30
        for start in range(0, 30, 10):
            assert engine.get(keys[start : start + 10]) == 10
    assert held(remote) == 0


# -- tenants


def test_a_tenant_holds_no_more_than_its_quota(remote, store, engine, http):
    """Of DRAM on this store; other tenants, and chunks without one, are not counted to it."""
    http.retune(tenants={ALICE.hex(): {"quota_bytes": 4 * CHUNK_BYTES}})
    assert engine.put(chain("a", 6), tenant=ALICE) == [""] * 4 + ["over_quota"] * 2
    assert engine.put(chain("b", 6), tenant=BOB) == [""] * 6
    assert engine.put(chain("n", 6)) == [""] * 6
    assert engine.put(chain("a2", 1), tenant=ALICE) == ["over_quota"]
    assert http.total("quota_refused_chunks_total", namespace=NAMESPACE.digest) == 3
    told = {"quota_bytes": 4 * CHUNK_BYTES, "resident_bytes": 4 * CHUNK_BYTES}
    assert http.get("/v1/status")["tenants"] == {ALICE.hex(): told}
    assert ALICE.hex() not in http.text("/metrics")


def test_a_tenants_quota_is_free_again_when_its_chunks_leave(remote, store, engine, http):
    """By eviction, abort, flush or a lost client; the account ends at nothing."""
    http.retune(tenants={ALICE.hex(): {"quota_bytes": 2 * CHUNK_BYTES}}, tiers__remote__write="off")
    keys = chain("a", 2)
    engine.put(keys, tenant=ALICE)
    evict_all(http)
    assert engine.put(chain("b", 2), tenant=ALICE) == ["", ""]
    http.post("/v1/flush", {"tenant": ALICE.hex()})
    reserved = engine.client.reserve(chain("c", 2), tenant=ALICE).result(5)
    engine.client.abort([slot for slot in reserved.slots if slot])
    eventually(lambda: engine.put(chain("d", 2), tenant=ALICE) == ["", ""])
    http.post("/v1/flush", {})
    with Engine(store.server.path, name="leaving") as other:
        assert other.client.reserve(chain("e", 2), tenant=ALICE).result(5).reasons == ["", ""]
    eventually(lambda: store.store.quotas._held == {})


def test_a_tenant_cannot_go_round_its_quota_through_the_remote(remote, store, engine, http):
    """What it has there beyond its quota is recomputed, not brought."""
    keys = chain("a", 4)
    put_remote(remote, keys, ALICE)
    http.retune(tenants={ALICE.hex(): {"quota_bytes": 2 * CHUNK_BYTES}})
    loaded = engine.load(keys)
    assert loaded.outcomes.count("hit") == 2
    assert store.store.quotas._held == {ALICE: 2 * CHUNK_BYTES}
    assert http.total("quota_refused_chunks_total") == 2


def test_a_tenant_is_16_bytes(store, engine):
    """Another length is refused where it is given: it would not be the same tenant in every tier."""
    with pytest.raises(ValueError, match="16 bytes"):
        engine.client.reserve(chain("a", 1), tenant=b"short")


# -- flush and bypass


def test_a_flush_reaches_every_tier(home, remote):
    """And tells how many there were in each."""
    more = {"disk": {"path": home / "disk", "capacity": "4MiB"}}
    with used(home, remote, **more) as (store, engine, http):
        http.retune(tiers__disk__write="commit")
        keys = chain("k", 5)
        engine.put(keys)
        eventually(lambda: in_remote(remote, keys) and store.store.lanes["disk"].tier.usage().chunks == 5)
        remote.flush("0" * 32)
        assert http.post("/v1/flush", {}).json() == {"dram": 5, "disk": 5, "remote": 5}
        assert engine.find(keys) == []
        assert engine.put(keys) == [""] * 5


@pytest.mark.parametrize(
    ("what", "left"),
    [({"tenant": ALICE.hex()}, {"one"}), ({"namespace": DIGEST}, set()), ({"namespace": "f" * 32}, {"one", "two"}),
     ({"epoch": 0}, set()), ({"epoch": 7}, {"one", "two"})],
)  # fmt: skip
def test_a_flush_drops_what_it_names(remote, engine, http, what, left):
    """A tenant, a namespace, an epoch."""
    engine.put(chain("one", 3))
    engine.put(chain("two", 3), tenant=ALICE)
    eventually(lambda: in_remote(remote, chain("two", 3)) and in_remote(remote, chain("one", 3)))
    assert http.post("/v1/flush", what).status_code == 200
    assert {name for name in ("one", "two") if engine.find(chain(name, 3))} == left


def test_what_is_on_its_way_during_a_flush_does_not_come_after_it(remote, store, engine, http):
    """Neither from the remote into DRAM, nor from an engine that had reserved before."""
    keys = chain("k", 2)
    put_remote(remote, keys)
    reserved = engine.client.reserve([b"reserved"]).result(5)
    (slot,) = reserved.slots
    engine.client.write(slot, payload(b"reserved"))
    reads = remote.fault = Reads()
    future = engine.client.load("r", keys, deadline_s=10)
    eventually(lambda: reads.count == 2)
    assert http.post("/v1/flush", {}).status_code == 200
    reads.free.set()
    assert future.result(10).outcomes == ["miss", "miss"]
    assert engine.client.commit([slot]).result(5) == [False]
    remote.fault = lambda _: None
    assert engine.find([*keys, b"reserved"]) == []
    assert engine.put([b"reserved"]) == [""]
    eventually(lambda: store.store.dram.pools[DIGEST].pool.pinned == 0)


def test_what_is_being_written_behind_during_a_flush_is_flushed_too(remote, store, engine, http, monkeypatch):
    """The flush waits for it; what waits in the queue is dropped."""
    monkeypatch.setattr("tiertune_connector.store.flushes._PATIENCE_S", PATIENCE_S)
    keys = chain("k", 6)
    free, writes = threading.Event(), []

    def slow(operation):
        if operation == "write":
            writes.append(operation)
            free.wait(10)

    remote.fault = slow
    engine.put(keys)
    eventually(lambda: len(writes) == 2)
    lane = store.store.lanes["remote"]
    with ThreadPoolExecutor(1) as flushing:
        flushed = flushing.submit(http.post, "/v1/flush", {"namespace": DIGEST})
        eventually(lambda: lane.writers.queued() == 2)
        free.set()
        answer = flushed.result()
    assert (answer.status_code, answer.json()["dram"], answer.json()["remote"]) == (200, 6, 2)
    assert held(remote) == 0
    assert engine.find(keys) == []


def test_a_flush_that_a_tier_did_not_make_is_no_success(remote, store, engine, http):
    """503, saying where chunks may be left; the other tiers are flushed."""
    engine.put(chain("k", 3))
    eventually(lambda: in_remote(remote, chain("k", 3)))
    remote.fault = lambda operation: Outcome.TIMEOUT if operation == "flush" else None
    answer = http.post("/v1/flush", {})
    assert answer.status_code == 503
    assert answer.json() == {"message": "remote: timeout, some chunks may be left", "dropped": {"dram": 3, "remote": 0}}


def test_bypass_answers_miss_and_keeps_the_chunks(remote, store, engine, http):
    """Nothing is found, loaded or taken; switched off, all is as before."""
    keys = chain("k", 3)
    engine.put(keys)
    assert http.post("/v1/bypass", {"on": True}).json()["bypass"] is True
    reply = engine.client.lookup("r", keys, prompt_tokens=48).result(5)
    assert (reply.tiers, reply.reason) == ([], "bypassed")
    assert engine.load(keys).outcomes == ["miss"] * 3
    assert engine.put(chain("new", 2)) == ["bypassed"] * 2
    tiers = http.get("/v1/status")["tiers"]
    assert [tiers[tier]["health"] for tier in ("dram", "remote", "disk")] == ["bypassed", "bypassed", "absent"]
    http.post("/v1/bypass", {"on": False})
    assert engine.get(keys) == 3


def test_dram_that_was_once_slow_is_tried_again(remote, store, engine, monkeypatch):
    """Engines told that loads were slow and load no more: the store's own copies show that it is fast again."""
    engine.put(chain("k", 2))
    slow = TierReport("dram", 1, 16, 16, "cheaper", 0.1, 1.0, 3.0, "lost")
    for _ in range(20):
        engine.client.report("r", [slow])
    engine.heard()
    assert store.store.health.costs()["dram"].seconds(1, CHUNK_BYTES) > 1.0
    monkeypatch.setattr("tiertune_connector.store.health._DRAM_SILENT_S", 0.0)

    def fast() -> bool:
        store.store.health.probe()
        return store.store.health.costs()["dram"].seconds(1, CHUNK_BYTES) < 0.1

    for _ in range(3):
        fast()
    eventually(fast)  # a probe that a busy machine held up is outdone by those after it
    assert store.store.dram.pools[DIGEST].pool.pinned == 0


# -- other groups of layers, and what an engine has itself


def find(engine, keys, *sides, defer=False):
    future = engine.client.lookup("r", keys, prompt_tokens=len(keys) * 16, sides=sides, defer=defer)
    return future.result(5).tiers


def test_a_cut_needs_the_last_chunks_of_every_window(remote, store, engine):
    """With a window of two chunks, a cut is found only where the two before it are somewhere, local or remote."""
    keys, window = chain("k", 6), chain("w", 6)
    engine.put(keys)
    engine.put([window[2]])
    put_remote(remote, [window[3]])
    side = Side(window, 16, 2)
    assert find(engine, keys, side) == ["dram"] * 4
    assert find(engine, keys, Side(window, 16, 1)) == ["dram"] * 4
    assert find(engine, keys[:3], side) == []
    assert find(engine, keys[:3], Side(window, 16, 1)) == ["dram"] * 3


def test_a_cut_needs_all_chunks_of_another_whole_group(remote, store, engine):
    """Chunks of twice the tokens: a cut inside one needs it too."""
    keys, other = chain("k", 4), chain("o", 2)
    engine.put(keys)
    engine.put(other[:1])
    assert find(engine, keys, Side(other, 32, 0)) == ["dram"] * 2
    engine.put(other[1:])
    assert find(engine, keys, Side(other, 32, 0)) == ["dram"] * 4


def test_a_deferred_lookup_is_counted_from_what_the_engine_lacked(remote, store, engine, http):
    """A chunk on the device or in staging is no hit of DRAM's, and is not asked of the remote."""
    keys = chain("k", 6)
    engine.put(keys[:4])
    before = http.total("tier_lookup_tokens_total")
    find(engine, keys, defer=True)
    assert http.total("tier_lookup_tokens_total") == before
    engine.client.own("r", gpu_chunks=2, staging_chunks=1)
    engine.heard()
    counted = {
        (tier, result): http.total("tier_lookup_tokens_total", tier=tier, result=result) / 16
        for tier in ("gpu", "staging", "dram")
        for result in ("hit", "miss")
    }
    assert counted == {
        ("gpu", "hit"): 2, ("gpu", "miss"): 4, ("staging", "hit"): 1, ("staging", "miss"): 3,
        ("dram", "hit"): 1, ("dram", "miss"): 2,
    }  # fmt: skip


# -- retuning


def test_sizes_that_were_tuned_outlive_other_settings_and_a_start_says_so(home, caplog):
    """Settings are those of a store that was never tuned: until then the file's new size is taken."""
    caplog.set_level("INFO")
    for capacity, tuned, held in ((64, None, 64), (32, None, 32), (32, 48, 48), (64, None, 48)):
        with running(home, dram=capacity * STRIDE) as store:
            if tuned:
                with Http(store.address) as http:
                    http.retune(tiers__dram__capacity_bytes=tuned * STRIDE)
            assert store.server.store.tuning.tiers.dram.capacity_bytes == held * STRIDE
    kept, asked = format_size(48 * STRIDE), format_size(64 * STRIDE)
    assert [line for line in caplog.messages if "keeps the" in line] == [
        f"dram keeps the {kept} of its tuning, not the {asked} of the settings"
    ]


def test_a_smaller_dram_keeps_the_youngest(remote, store, engine, http):
    """At once, and the memory is given back soon after; a larger one is there soon after."""
    http.retune(tiers__remote__write="off")
    old, young = chain("old", 32), chain("young", 8)
    engine.put(old)
    engine.put(young)
    http.retune(tiers__dram__capacity_bytes=8 * STRIDE)
    assert engine.find(old) == []
    assert engine.get(young) == 8
    pool = store.store.dram.pools[DIGEST]
    eventually(lambda: pool.provisioned == 8)
    http.retune(tiers__dram__capacity_bytes=64 * STRIDE)
    eventually(lambda: pool.provisioned == 64)
    assert engine.put(old) == [""] * 32
    assert engine.get(young) == 8


def test_fetch_off_hides_the_remote_and_on_shows_it_again(remote, store, engine, http):
    """Live; the client's gate is told."""
    keys = chain("k", 3)
    put_remote(remote, keys)
    http.retune(tiers__remote__fetch="off")
    reply = engine.client.lookup("r", keys, prompt_tokens=48).result(5)
    assert (reply.tiers, reply.gate["remote"].fetch_on) == ([], False)
    assert engine.load(keys).outcomes == ["miss"] * 3
    assert http.get("/v1/status")["tiers"]["remote"] | {"resident_bytes": 0, "chunks": 3} == {
        "health": "bypassed", "reason": "remote fetch is off by tuning", "resident_bytes": 0, "capacity_bytes": None,
        "chunks": 3,
    }  # fmt: skip
    http.retune(tiers__remote__fetch="on")
    assert engine.find(keys) == ["remote"] * 3


def test_the_gates_bounds_reach_the_clients(remote, store, engine, http):
    """With the next lookup."""
    http.retune(tiers__remote__margin=2.5, tiers__remote__min_fetch_tokens=64, tiers__remote__deadline_factor=3.0)
    gate = engine.client.lookup("r", chain("k", 1), prompt_tokens=16).result(5).gate["remote"]
    assert (gate.margin, gate.min_fetch_tokens, gate.deadline_factor) == (2.5, 64, 3.0)


def test_no_floor_that_is_accepted_is_too_high_to_be_told(remote, store, engine, http):
    """The highest one reaches the clients, a higher one is refused; lookups are answered."""
    keys = chain("k", 2)
    engine.put(keys[:1])
    assert http.retune(tiers__remote__min_fetch_tokens=2**31).status_code == 200
    refused = http.retune(tiers__remote__min_fetch_tokens=10**20)
    assert (refused.status_code, refused.json()["field"]) == (422, "tiers.remote.min_fetch_tokens")
    reply = engine.client.lookup("r", keys, prompt_tokens=16).result(5)
    assert (reply.tiers, reply.gate["remote"].min_fetch_tokens) == (["dram"], 2**31)


def test_pools_have_sizes_and_algorithms_of_their_own(remote, store, engine, http):
    """Both are in force at once, and keep what is there."""
    engine.put(chain("k", 10))
    pool = {"capacity_bytes": 20 * STRIDE, "eviction": "arc"}
    assert http.retune(pools={DIGEST: {"dram": pool}}).status_code == 200
    told = http.get("/v1/status")["pools"][DIGEST]["dram"]
    assert told["desired"] == pool
    assert told["applied"] == told["effective"] == pool
    assert engine.get(chain("k", 10)) == 10
    written(store)
    eventually(lambda: store.store.dram.pools[DIGEST].pool.pinned == 0)  # what was read is known to be
    assert engine.put(chain("l", 30)).count("") == 20
    assert http.retune(defaults__eviction="arc", pools={}).status_code == 200
    assert http.get("/v1/status")["pools"][DIGEST]["dram"]["applied"]["eviction"] == "arc"


def test_models_share_what_is_left(home, remote):
    """The sum is the store's capacity, whoever comes."""
    with serving(home, remote, dram=32 * STRIDE) as store, joined(store) as engine:
        engine.put(chain("k", 32))
        with Engine(store.server.path, namespace=Namespace(model="qwen", chunk_tokens=16)) as other:
            eventually(lambda: [pool.provisioned for pool in store.store.dram.pools.values()] == [16, 16])
            assert other.put(chain("q", 16)) == [""] * 16
            assert other.get(chain("q", 16)) == 16
            written(store)
            assert engine.put(chain("l", 32)).count("") == 16


def test_leases_and_reservations_expire(home, remote):
    """A client that forgets is not waited for; what it may still be writing is not used until it says so."""
    with serving(home, remote, dram=4 * STRIDE) as store, joined(store) as engine:
        pool, holdings = store.store.dram.pools[DIGEST], store.store.holdings
        engine.put(chain("k", 2))
        patient_s, holdings._lease_s = holdings._lease_s, 0.05
        loaded = engine.load(chain("k", 2), deadline_s=0.0)
        slots = engine.client.reserve(chain("r", 2)).result(5).slots
        for slot in slots:
            engine.client.write(slot, payload(slot.key))
        eventually(lambda: pool.pool.pinned == 0 and len(pool.quarantined) == 2)
        assert pool.pool.capacity == 2
        assert engine.client.commit(slots[:1]).result(5) == [False]
        engine.client.abort(slots[1:])
        holdings._lease_s = patient_s
        eventually(lambda: pool.quarantined == [] and pool.pool.capacity == 4)
        engine.client.release(loaded)
        written(store)
        assert engine.put(chain("n", 4)) == [""] * 4


# -- traffic


def test_clients_at_once_get_only_their_own_bytes(home, remote):
    """Random lookups, loads, stores, aborts, evictions, retunes, flushes, faults: every byte that is read is right."""
    more = {"disk": {"path": home / "disk", "capacity": "2MiB"}, "dram": 40 * STRIDE}
    with serving(home, remote, **more) as store, Http(store.address) as http:
        http.retune(tiers__disk__write="commit")
        counts = {"hit": 0, "stored": 0}
        chains = [chain(f"k{number}", 8) for number in range(24)]

        def play(seed: int) -> None:
            rng = np.random.default_rng(seed)
            with Engine(store.server.path, name=f"engine-{seed}") as engine:
                for turn in range(90):
                    keys = chains[rng.zipf(1.5) % 24][: int(rng.integers(1, 9))]
                    request = f"{seed}-{turn}"
                    have = engine.get(keys[: len(engine.find(keys, request))], deadline_s=float(rng.choice([0, 5])))
                    counts["hit"] += have
                    counts["stored"] += engine.put(keys[have:], request, tenant=ALICE).count("")
                    if rng.random() < 0.1:
                        slots = engine.client.reserve([b"%d" % turn]).result(5).slots
                        engine.client.abort([slot for slot in slots if slot])

        def disturb(_: int, stop: threading.Event) -> None:
            rng = np.random.default_rng(99)
            while not stop.wait(0.01):
                bad = Outcome.ERROR if rng.random() < 0.1 else None
                remote.fault = lambda _, bad=bad: bad
                http.retune(
                    key=str(rng.integers(1 << 60)),
                    tiers__dram__capacity_bytes=int(rng.integers(4, 60)) * STRIDE,
                    tiers__remote__fetch=str(rng.choice(["on", "off"])),
                    tiers__remote__write=str(rng.choice(["commit", "evict", "off"])),
                    defaults__eviction=str(rng.choice(["lru", "arc"])),
                )
                if rng.random() < 0.1:
                    http.post("/v1/flush", {})

        with amid(disturb, 1):
            at_once(play, 6)
        assert counts["hit"] > 100
        assert counts["stored"] > 100
        assert http.total("internal_errors_total") == 0
        http.retune(tiers__dram__capacity_bytes=16 * STRIDE)
        pool = store.store.dram.pools[DIGEST]
        written(store)
        eventually(lambda: (pool.pool.pinned, pool.quarantined, pool.provisioned) == (0, [], 16))
        assert len(pool.free) + len(pool.pool) == 16
        assert store.store.quotas._held.get(ALICE, 0) <= 16 * CHUNK_BYTES
        http.post("/v1/flush", {})
        assert store.store.quotas._held == {}
