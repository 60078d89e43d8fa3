"""What engines share over the real socket: DRAM, their lookups, its sizes, and random traffic over all of it."""

import threading

import numpy as np
import pytest

from connector.store.serving import ALICE, DIGEST, joined, put_remote, serving, written
from connector.stores import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    STRIDE,
    Engine,
    Http,
    amid,
    at_once,
    chain,
    eventually,
    payload,
    pinned,
    running,
)
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import Abort, Own, Report, Side, TierReport
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.units import format_size

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("algorithm", ["arc", "s3fifo"])
def test_a_chain_written_in_pieces_is_used_once(home, algorithm):
    """As chunked prefill writes it: a prompt that came once leaves before one that came again, and as a whole.

    Without a remote nothing is pinned to be written behind, and every lookup is counted before the next request.
    """
    with running(home, eviction=algorithm, dram=64 * STRIDE) as store, Engine(store) as engine:
        eventually(lambda: store.store.dram.pools[DIGEST].provisioned == 64)
        again, once = chain("again", 8), chain("once", 12)
        for request in ("a", "b", "c"):
            engine.find(again, request)
            engine.put(again, request)
        assert engine.find(once, "d") == []
        for start in range(0, 12, 3):
            engine.put_all(once[start : start + 3], "d")
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
    engine.put_all(keys[:3])
    with joined(store, name="engine-1") as other:
        assert engine.find(keys, "mine") == other.find(keys, "yours") == ["dram"] * 3
        engine.put_all(keys[3:6], "mine")
        assert len(engine.reserve(keys[6:], request="mine").slots) == 2
        assert engine.put(keys[3:], "mine")[:3] == ["present"] * 3
        assert again() == 0
        assert other.put(keys, "yours") == ["present"] * 6 + ["busy"] * 2
        assert again() == 5
        assert other.put(keys, "nobody's") == ["present"] * 6 + ["busy"] * 2
        other.put_all(new, "yours")
        assert again() == 5
        assert other.find(new, "mine too") == ["dram"] * 2
        late = chain("late", 4)
        assert other.find(late, "half") == engine.find(late, "theirs") == []
        engine.put_all(late, "theirs")
        other.client.tell(Own("half", 3, 0))
        assert other.put(late, "half") == ["present"] * 4
        assert again() == 6, "what an engine had itself it did not compute"
        other.client.tell(Report([TierReport("dram", 3, 48, 16, "cheaper", 0.1, 1.0, 3.0, "lost")]))
        eventually(lambda: again() == 8)
        other.client.tell(Report([TierReport("dram", 1, 16, 48, "cheaper", 0.1, 1.0, 3.0, "won")]))
        other.heard()
        assert again() == 8, "a counter does not fall"
        http.post("/v1/bypass", {"on": True})
        asked = other.client.lookup("bypassed", keys, prompt_tokens=8 * CHUNK_TOKENS, defer=True)
        assert asked.result(30).tiers == []
        http.post("/v1/bypass", {"on": False})
        assert other.put(keys, "bypassed") == ["present"] * 6 + ["busy"] * 2
        assert again() == 8, "while it was bypassed the store was not asked"


def test_a_chunk_is_visible_with_its_commit_and_not_before(store, engine):
    """Reserved and written is not there; an abort leaves nothing."""
    keys = chain("k", 4)
    slots = engine.reserve(keys).slots
    for slot in slots:
        assert engine.client.write(slot, payload(slot.key))
    with Engine(store, name="engine-1") as other:
        assert other.find(keys) == []
        assert other.reserve(keys).reasons == ["busy"] * 4
        assert engine.commit(slots[:2]) == [True, True]
        engine.client.abort(slots[2:])
        assert eventually(lambda: other.reserve(keys).reasons[2:] == ["", ""])
        assert other.find(keys) == ["dram"] * 2
        assert engine.commit(slots[2:]) == [False, False]


def test_a_namespace_is_not_anothers(store, engine):
    """The same keys under other weights are not there."""
    keys = chain("k", 3)
    engine.put(keys)
    with Engine(store, namespace=Namespace(model="llama", weights="x", chunk_tokens=16)) as other:
        assert other.find(keys) == []
        assert other.get(keys) == 0


def test_a_full_pool_keeps_the_heads_of_chains(home, remote):
    """A chain's suffix leaves before its prefix."""
    with serving(home, remote, dram=16 * STRIDE) as store, joined(store) as engine:
        first, second = chain("first", 10), chain("second", 10)
        for name, keys in (("first", first), ("second", second)):
            engine.find(keys, request=name)
            engine.put_all(keys, request=name)
            written(store)
        assert engine.find(second) == ["dram"] * 10
        assert engine.find(first)[:7] == ["dram"] * 6 + ["remote"]
        assert engine.get(first[:6]) == 6


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


def test_dram_that_was_once_slow_is_tried_again(remote, store, engine, monkeypatch):
    """Engines told that loads were slow and load no more: the store's own copies show that it is fast again."""
    engine.put(chain("k", 2))
    slow = TierReport("dram", 1, 16, 16, "cheaper", 0.1, 1.0, 3.0, "lost")
    for _ in range(20):
        engine.client.tell(Report([slow]))
    engine.heard()
    assert store.store.health.costs({}, 0)["dram"].seconds(1, CHUNK_BYTES) > 1.0
    monkeypatch.setattr("tiertune_connector.store.health._DRAM_SILENT_S", 0.0)

    def fast() -> bool:
        store.store.health.probe()
        return store.store.health.costs({}, 0)["dram"].seconds(1, CHUNK_BYTES) < 0.1

    for _ in range(3):
        fast()
    eventually(fast)  # a probe that a busy machine held up is outdone by those after it
    eventually(lambda: pinned(store) == 0)  # the store's own probe may copy just then


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
    """A chunk on the device or in staging is no hit of DRAM's, and is not asked of the remote. It is counted once."""
    keys = chain("k", 6)
    engine.put(keys[:4])
    before = http.total("tier_lookup_tokens_total")
    find(engine, keys, defer=True)
    assert http.total("tier_lookup_tokens_total") == before
    for _ in range(2):
        engine.client.tell(Own("r", 2, 1))
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


def test_a_start_says_what_the_container_does_not_allow(home, caplog, monkeypatch):
    """It may be allowed later, so it starts; nobody is left to find out by hit ratios."""
    for allowed in (64, 16):
        monkeypatch.setattr("tiertune_connector.serve.main.most_memory", lambda allowed=allowed: allowed * STRIDE)
        with running(home, dram=64 * STRIDE):
            pass
    assert caplog.messages == ["dram is to have 1.2 MiB: this machine or container allows 320.0 KiB"]


def test_no_floor_that_is_accepted_is_too_high_to_be_told(remote, store, engine, http):
    """The highest one reaches the clients, a higher one is refused; lookups are answered."""
    keys = chain("k", 2)
    engine.put(keys[:1])
    assert http.retune(tiers__remote__min_fetch_tokens=2**31).status_code == 200
    refused = http.retune(tiers__remote__min_fetch_tokens=10**20)
    assert (refused.status_code, refused.json()["field"]) == (422, "tiers.remote.min_fetch_tokens")
    reply = engine.client.lookup("r", keys, prompt_tokens=16).result(5)
    assert (reply.tiers, reply.gate["remote"].min_fetch_tokens) == (["dram"], 2**31)


def test_leases_and_reservations_expire(home, remote):
    """A client that forgets is not waited for; what it may still be writing is not used until it says so."""
    with serving(home, remote, dram=4 * STRIDE) as store, joined(store) as engine:
        pool, holdings = store.store.dram.pools[DIGEST], store.store.holdings
        engine.put(chain("k", 2))
        patient_s, holdings.lease_s = holdings.lease_s, 0.05
        loaded = engine.load(chain("k", 2), deadline_s=0.0)
        slots = engine.reserve(chain("r", 2)).slots
        for slot in slots:
            engine.client.write(slot, payload(slot.key))
        eventually(lambda: pool.pool.pinned == 0 and len(pool.quarantined) == 2)
        assert pool.pool.capacity == 2
        assert engine.commit(slots[:1]) == [False]
        engine.client.abort(slots[1:])
        holdings.lease_s = patient_s
        eventually(lambda: pool.quarantined == [] and pool.pool.capacity == 4)
        engine.client.release(loaded)
        written(store)
        engine.put_all(chain("n", 4))


def test_a_late_word_of_a_reservation_that_is_over_is_not_of_a_newer_one(home, remote):
    """Of the same key, by the same client: it may be writing both. An older client names no slots."""
    with serving(home, remote, dram=4 * STRIDE) as store, joined(store) as engine:
        pool, holdings = store.store.dram.pools[DIGEST], store.store.holdings
        patient_s, holdings.lease_s = holdings.lease_s, 0.05
        (late,) = engine.reserve(chain("r", 1)).slots
        eventually(lambda: len(pool.quarantined) == 1)
        (later,) = engine.reserve(chain("r", 1)).slots
        eventually(lambda: len(pool.quarantined) == 2)
        holdings.lease_s = patient_s
        (slot,) = engine.reserve(chain("r", 1)).slots
        assert slot.ref.generation == late.ref.generation, "so that only their places differ"
        engine.client.abort([late])
        assert engine.commit([later]) == [False]
        assert len(pool.quarantined) == 0
        assert pool.pool.busy(slot.key)
        assert engine.client.write(slot, payload(slot.key))
        assert engine.commit([slot]) == [True]
        (again,) = engine.reserve(chain("s", 1)).slots
        engine.client.tell(Abort([again.key]))
        assert eventually(lambda: not pool.pool.busy(again.key))


# -- traffic


def test_clients_at_once_get_only_their_own_bytes(home, remote):
    """Random lookups, loads, stores, aborts, evictions, retunes, flushes, faults: every byte that is read is right."""
    with serving(home, remote, disk="2MiB", dram=40 * STRIDE) as store, Http(store.address) as http:
        http.retune(tiers__disk__write="commit")
        counts = {"hit": 0, "stored": 0}
        chains = [chain(f"k{number}", 8) for number in range(24)]

        def play(seed: int) -> None:
            rng = np.random.default_rng(seed)
            with Engine(store, name=f"engine-{seed}") as engine:
                for turn in range(90):
                    keys = chains[rng.zipf(1.5) % 24][: int(rng.integers(1, 9))]
                    request = f"{seed}-{turn}"
                    have = engine.get(keys[: len(engine.find(keys, request))], deadline_s=float(rng.choice([0, 5])))
                    counts["hit"] += have
                    counts["stored"] += engine.put(keys[have:], request, tenant=ALICE).count("")
                    if rng.random() < 0.1:
                        slots = engine.reserve([b"%d" % turn]).slots
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
