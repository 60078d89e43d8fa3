"""Tenants with their quotas, and flushes, while chunks are on their way."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from connector.store.serving import ALICE, DIGEST, Reads, evict_all, held, in_remote, put_remote, used
from connector.stores import CHUNK_BYTES, PATIENCE_S, Engine, chain, eventually, no_more_threads, payload, pinned
from tiertune_connector.store.flushes import _REMEMBERED, Flushes
from tiertune_connector.tiers.base import Outcome

pytestmark = pytest.mark.slow

# -- tenants


def test_a_tenants_quota_is_free_again_when_its_chunks_leave(remote, store, engine, http):
    """By eviction, abort, flush or a lost client; the account ends at nothing."""
    http.retune(tenants={ALICE.hex(): {"quota_bytes": 2 * CHUNK_BYTES}}, tiers__remote__write="off")
    keys = chain("a", 2)
    engine.put(keys, tenant=ALICE)
    evict_all(http)
    engine.put_all(chain("b", 2), tenant=ALICE)
    http.post("/v1/flush", {"tenant": ALICE.hex()})
    reserved = engine.reserve(chain("c", 2), tenant=ALICE)
    engine.client.abort([slot for slot in reserved.slots if slot])
    eventually(lambda: engine.put(chain("d", 2), tenant=ALICE) == ["", ""])
    http.post("/v1/flush", {})
    with Engine(store, name="leaving") as other:
        assert other.reserve(chain("e", 2), tenant=ALICE).reasons == ["", ""]
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


def test_a_tenant_is_offered_no_more_than_its_quota_has_room_for(remote, engine, http):
    """The rest would be fetched in vain, at every request; what is in DRAM is offered, as everything is to others."""
    keys = chain("a", 4)
    put_remote(remote, keys, ALICE)
    http.retune(tenants={ALICE.hex(): {"quota_bytes": 2 * CHUNK_BYTES}})

    def offered(tenant=ALICE):
        return engine.client.lookup("r", keys, prompt_tokens=64, tenant=tenant).result(PATIENCE_S).tiers

    assert (offered(), offered(b"b" * 16)) == (["remote"] * 2, ["remote"] * 4)
    assert engine.get(keys[:1]) == 1
    assert offered() == ["dram", "remote"]
    assert engine.get(keys[:2]) == 2
    assert offered() == ["dram", "dram"]
    assert http.total("quota_refused_chunks_total") == 0
    http.retune(tenants={ALICE.hex(): {"quota_bytes": 3 * CHUNK_BYTES}})
    assert offered() == ["dram", "dram", "remote"]
    assert engine.load(keys[2:]).outcomes.count("hit") == 1, "a load is bounded, too"


def test_a_tenant_is_16_bytes(store, engine):
    """Another length is refused where it is given: it would not be the same tenant in every tier."""
    with pytest.raises(ValueError, match="16 bytes"):
        engine.client.reserve(chain("a", 1), tenant=b"short")


# -- flushes


@pytest.mark.parametrize("reading", [False, True])
def test_what_is_flushed_was_not_evicted(store, engine, http, reading):
    """Nothing had to make room: whether or not somebody is reading it, and on disk neither."""
    engine.put(chain("a", 3))
    loaded = engine.load(chain("a", 3 if reading else 0))
    assert http.post("/v1/flush", {}).json()["dram"] == 3
    engine.client.release(loaded)
    engine.heard()
    eventually(lambda: not store.store.dram.usage().chunks)
    assert (http.total("tier_evictions_total"), http.total("tier_evicted_unused_total")) == (0, 0)
    engine.put(chain("b", 2))
    evict_all(http)
    eventually(lambda: http.total("tier_evictions_total", tier="dram", reason="capacity") == 2)


def test_a_flush_reaches_every_tier(home, remote):
    """And tells how many there were in each."""
    with used(home, remote, disk="4MiB") as (store, engine, http):
        http.retune(tiers__disk__write="commit")
        keys = chain("k", 5)
        engine.put(keys)
        eventually(lambda: in_remote(remote, keys) and store.store.lanes["disk"].tier.usage().chunks == 5)
        assert store.store.lanes["remote"].probe(100) is Outcome.OK
        assert http.post("/v1/flush", {}).json() == {"dram": 5, "disk": 5, "remote": 5}
        assert engine.find(keys) == []
        engine.put_all(keys)


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
    found = {name: engine.find(chain(name, 3)) for name in ("one", "two")}
    assert found == {name: ["dram"] * 3 if name in left else [] for name in found}


@pytest.mark.parametrize(
    ("ended", "outcomes", "told"),
    [
        (True, (Outcome.OK, Outcome.OK), Outcome.OK),
        (True, (Outcome.ERROR, Outcome.OK), Outcome.ERROR),
        (True, (Outcome.OK, Outcome.ERROR), Outcome.ERROR),
        (False, (Outcome.OK, Outcome.OK), Outcome.TIMEOUT),
    ],
)
def test_a_flush_of_which_a_part_may_be_left_is_not_ok(ended, outcomes, told):
    """Whichever of an epoch's namespaces it was, or a write that did not end in time."""
    answers = iter(outcomes)
    writers = SimpleNamespace(drop_queued=lambda _matches, _patience_s: ended)
    lane = SimpleNamespace(writers=writers, flush=lambda _namespace, _tenant: (next(answers), 2))
    dram = SimpleNamespace(lock=threading.RLock(), flush=lambda _namespace, _tenant: (Outcome.OK, 1))
    flushes = Flushes(dram, {"remote": lane}, SimpleNamespace(of=lambda _epoch, _namespace: ["a", "b"]))
    assert flushes.drop(epoch=1) == {"dram": (Outcome.OK, 2), "remote": (told, 4)}


@pytest.mark.parametrize("what", [{}, {"namespace": DIGEST}])
def test_what_is_on_its_way_during_a_flush_does_not_come_after_it(remote, store, engine, http, what):
    """Neither from the remote into DRAM, nor from an engine that had reserved before."""
    keys = chain("k", 2)
    put_remote(remote, keys)
    reserved = engine.reserve([b"reserved"])
    (slot,) = reserved.slots
    engine.client.write(slot, payload(b"reserved"))
    reads = remote.fault = Reads()
    future = engine.client.load(keys, deadline_s=10)
    eventually(lambda: reads.count == 2)
    assert http.post("/v1/flush", what).status_code == 200
    reads.free.set()
    assert future.result(10).outcomes == ["miss", "miss"]
    assert engine.commit([slot]) == [False]
    remote.fault = lambda _: None
    assert engine.find([*keys, b"reserved"]) == []
    engine.put_all([b"reserved"])
    eventually(lambda: pinned(store) == 0)


@pytest.mark.parametrize("what", [{"namespace": "f" * 32}, {"tenant": ALICE.hex()}, {"epoch": 7}])
@pytest.mark.parametrize("ended", [False, True])
def test_what_a_flush_does_not_name_comes_and_stays(remote, engine, http, what, ended):
    """A flush of a large remote takes minutes: engines of other namespaces and tenants load and store meanwhile."""
    keys = chain("k", 2)
    put_remote(remote, keys)
    (slot,) = engine.reserve([b"reserved"]).slots
    engine.client.write(slot, payload(b"reserved"))
    flushes, free = threading.Event(), threading.Event()
    reads = Reads()

    def slow(operation):
        if operation == "flush":
            flushes.set()
            free.wait(PATIENCE_S)
        return reads(operation)

    remote.fault = slow
    future = engine.client.load(keys, deadline_s=PATIENCE_S)
    eventually(lambda: reads.count == 2)
    with ThreadPoolExecutor(1) as flushing:
        flushed = flushing.submit(http.post, "/v1/flush", what)
        if what != {"epoch": 7}:  # of which nothing is known
            assert flushes.wait(PATIENCE_S)
        if ended:
            free.set()
            flushed.result()
        reads.free.set()
        assert future.result(PATIENCE_S).outcomes == ["hit", "hit"]
        assert engine.commit([slot]) == [True]
        engine.put_all([b"new"])
        assert engine.put([b"hers"], tenant=ALICE) == (["lost"] if "tenant" in what and not ended else [""])
        free.set()
        assert flushed.result().status_code == 200


def test_what_was_on_its_way_before_more_flushes_than_are_known_does_not_come(store, engine):
    """Doubt is a miss."""
    reserved = engine.reserve([b"a", b"b"]).slots
    flushes = store.store.flushes
    era = flushes.era
    for _ in range(_REMEMBERED):
        flushes.drop("f" * 32)
    assert flushes.current(era, DIGEST, b"")
    assert engine.commit(reserved[:1]) == [True]
    flushes.drop("f" * 32)
    assert not flushes.current(era, DIGEST, b"")
    assert engine.commit(reserved[1:]) == [False]
    assert flushes.current(flushes.era, DIGEST, b"")


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


def test_a_flush_needs_no_thread_that_is_not_there_yet(home, remote, monkeypatch):
    """A machine may run out of threads: all tiers are flushed all the same."""
    with used(home, remote, disk="4MiB") as (store, engine, http):
        engine.put(chain("k", 3))
        eventually(lambda: in_remote(remote, chain("k", 3)))
        for tier in store.store.lanes:
            no_more_threads(monkeypatch, named=f"{tier}-ask")
        answer = http.post("/v1/flush", {"namespace": DIGEST})
        assert answer.status_code == 200
        assert answer.json() == {"dram": 3, "disk": 0, "remote": 3}
