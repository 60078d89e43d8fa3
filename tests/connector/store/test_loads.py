"""Loads from slower tiers, over the real socket: in time, once, and within the pool."""

import time

import pytest

from connector.store.serving import Reads, evict_all, joined, put_remote, serving, used, written
from connector.stores import CHUNK_TOKENS, STRIDE, Engine, at_best, chain, eventually, pinned


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
    assert not store.store.loads.arrivals._numbers, "what came is not on its way"
    assert engine.find(keys) == ["dram"] * 12
    hit = {"tier": "dram", "result": "hit", "origin": "other_host"}
    eventually(lambda: http.total("tier_lookup_tokens_total", **hit) == 12 * 16)  # counted behind the answer


@pytest.mark.parametrize("slower", ["disk", "remote"])
def test_what_comes_back_from_slower_tiers_is_still_its_engine_s(home, remote, slower):
    """What sharing brings is what another engine computed; the engine's own is not, wherever it lay meanwhile."""
    disk = {"disk": "4MiB"} if slower == "disk" else {}

    def hits(http, tier, chunks):
        told = {"tier": tier, "result": "hit"}
        eventually(lambda: http.total("tier_lookup_tokens_total", **told) == sum(chunks.values()) * 16)
        return {origin: http.total("tier_lookup_tokens_total", **told, origin=origin) / 16 for origin in chunks}

    with used(home, remote, **disk) as (store, engine, http), joined(store, name="engine-1") as other:
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
    eventually(lambda: pinned(store) == 1)  # what a late load was given


def test_a_chunk_on_its_way_is_fetched_once(remote, store, engine):
    """However many loads wait for it, each gets it, and each holds it."""
    keys = chain("k", 4)
    put_remote(remote, keys)
    reads = remote.fault = Reads()
    with Engine(store, name="engine-1") as other:
        futures = [e.client.load(keys, deadline_s=10) for e in (engine, other, engine)]
        eventually(lambda: reads.count == 4 and len(store.server._waiters._pools["remote"]._threads) >= 3)
        reads.free.set()
        loads = [future.result(10) for future in futures]
        assert [loaded.outcomes for loaded in loads] == [["hit"] * 4] * 3
        assert reads.count == 4
        assert engine.read(loads[0]) == engine.read(loads[2]) == other.read(loads[1]) == 4
        for who, loaded in zip((engine, other, engine), loads, strict=True):
            assert pinned(store) == 4
            who.client.release(loaded)
            who.heard()
        assert pinned(store) == 0


def test_a_load_holds_nothing_behind_a_chunk_that_cannot_come(store, engine, http):
    """Nobody would give it back: its client is told of the leading chunks alone."""
    keys = chain("k", 4)
    engine.put_all([keys[0], *keys[2:]])
    written(store)
    assert http.retune(tiers__remote__fetch="off").status_code == 200
    loaded = engine.load(keys)
    assert loaded.outcomes == ["hit", "miss", "miss", "miss"]
    assert pinned(store) == 1
    engine.client.release(loaded)
    engine.heard()
    assert pinned(store) == 0


def test_a_load_does_not_evict_its_own_head(home, remote):
    """Leading chunks in DRAM are held before room is made for those that follow."""
    with serving(home, remote, dram=8 * STRIDE) as store, joined(store) as engine:
        keys = chain("k", 8)
        engine.put(keys[:5])
        put_remote(remote, keys[5:])
        with Engine(store, name="engine-1") as other:
            other.put(chain("other", 3))
        written(store)
        assert engine.load(keys).outcomes == ["hit"] * 8


@pytest.mark.parametrize("near", [0, 1, 3])
@pytest.mark.parametrize("own", [0, 2, 5])
def test_a_lookup_tells_how_much_of_a_prompt_can_come(home, remote, near, own):
    """No more than DRAM holds, and of one slower tier three quarters of it; what an engine has itself needs no room."""
    keys = chain("k", 14)
    with serving(home, remote, dram=8 * STRIDE) as store, joined(store) as engine:
        engine.put(keys[:near])
        put_remote(remote, keys[near:])
        written(store)
        found = engine.client.lookup("r", keys, prompt_tokens=14 * CHUNK_TOKENS).result(10)
        assert found.tiers == ["dram"] * near + ["remote"] * (14 - near)
        loaded = engine.load(keys[own:])
        assert loaded.outcomes.count("hit") == found.reach(own) - own < 14 - own
        engine.client.release(loaded)
        whole = engine.client.lookup("r", keys[: 6 + own], prompt_tokens=(6 + own) * CHUNK_TOKENS).result(10)
        assert whole.reach(own) == 6 + own


def test_chunks_that_came_cannot_leave_before_their_load_has_them(home, remote):
    """Loads that together want more than the pool holds: each gets a leading run, all of it whole."""
    with serving(home, remote, dram=12 * STRIDE) as store:
        chains = [chain(f"k{number}", 6) for number in range(6)]
        for keys in chains:
            put_remote(remote, keys)
        with Engine(store) as engine:
            for _ in range(5):
                futures = [engine.client.load(keys, deadline_s=10) for keys in chains]
                for future in futures:
                    loaded = future.result(10)
                    assert engine.read(loaded) == len(loaded.slots)
                    assert loaded.outcomes == ["hit"] * len(loaded.slots) + ["miss"] * (6 - len(loaded.slots))
                    engine.client.release(loaded)
            eventually(lambda: pinned(store) == 0)
