"""A store that is tuned while it serves: in bounded steps, within its bounds at every moment, and nothing is lost."""

import os
import time
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.local_disk import data_bytes
from connector.local_dram import LocalDram, resize
from connector.stores import A, Engine, Http, amid, chain, eventually, in_turns, payload, running, view
from tiertune_agent.replay.traces import builtin_trace
from tiertune_connector.chunk import NOBODY
from tiertune_connector.eviction import CANDIDATES, Handover
from tiertune_connector.keys import Namespace
from tiertune_connector.pool import HANDED_OVER, Pool
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import _DROPPED as DROPPED
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tiers.shares import HANDED_OVER as STEP
from tiertune_connector.tiers.slots import LEAVING_AT_ONCE
from tiertune_connector.whatif.simulated import SimulatedPool

pytestmark = pytest.mark.slow

EMPTY = memoryview(bytes(PAGE))
MIB = 1 << 20


def full(clock, chunks, algorithm="lru"):
    """A tier with so many chunks of a page, and their keys."""
    tier, keys = LocalDram(segment_bytes=256 * PAGE, clock=clock), chain("k", chunks)
    tier.attach(A, PAGE, algorithm)
    resize(tier, chunks * PAGE)
    for key in keys:
        assert tier.write(A, key, EMPTY, NOBODY) is Outcome.OK
    return tier, keys


# -- in steps


def test_a_shrink_evicts_in_steps_and_serves_in_between(clock):
    """However much is to leave, a request waits for 64 chunks; it finds what is left, and its write is taken."""
    tier, keys = full(clock, 2000)
    told = []
    tier.on_evicted = lambda chunks: told.append(len(chunks))
    tier.retune(1000 * PAGE, {})
    assert told == [LEAVING_AT_ONCE]
    steps, left = 0, 2000 - LEAVING_AT_ONCE
    while tier.settle():
        steps += 1
        assert max(told) <= LEAVING_AT_ONCE
        assert tier.present(A, keys[-1000:])[1] == 1000, "the youngest stay"
        assert len(tier.pools[A].pool) >= max(1000, left - LEAVING_AT_ONCE)
        left = len(tier.pools[A].pool)
    assert steps >= 1000 // LEAVING_AT_ONCE
    assert tier.usage().resident_bytes == 1000 * PAGE
    tier.close()


def on_disk(root, chunks):
    """The same on disk."""
    tier, keys = DiskTier(root), chain("k", chunks)
    tier.retune(2 * chunks * 2 * PAGE, {A: (None, "lru")})
    tier.attach(A, PAGE)
    for key in keys:
        assert tier.write(A, key, EMPTY, NOBODY) is Outcome.OK
    return tier, keys


@pytest.mark.parametrize(("medium", "most"), [("dram", LEAVING_AT_ONCE), ("disk", DROPPED)])
def test_a_flush_is_made_in_steps_and_serves_in_between(clock, tmp_path, monkeypatch, medium, most):
    """However much is to go, a request waits for a step; what comes meanwhile is not flushed."""
    tier, keys = full(clock, 1000) if medium == "dram" else on_disk(tmp_path / "disk", 1000)
    left, new = [], iter(chain("n", 1000))

    def breath(_):
        left.append(sum(key in tier.pools[A].pool for key in keys))
        assert tier.write(A, next(new), EMPTY, NOBODY) is Outcome.OK

    monkeypatch.setattr("tiertune_connector.tiers.steps.sleep", breath)
    assert tier.flush(A) == (Outcome.OK, 1000)
    assert left == [max(0, 1000 - most * step) for step in range(1, len(left) + 1)]
    assert len(tier.pools[A].pool) == len(left), "those that came meanwhile"
    tier.close()


@pytest.mark.parametrize(("medium", "most"), [("dram", LEAVING_AT_ONCE), ("disk", DROPPED)])
def test_a_flush_ends_where_its_tier_is_closed_meanwhile(clock, tmp_path, monkeypatch, medium, most):
    """A store that stops: what is closed is not touched any more, as its file's number may be another's by then."""
    tier, _ = full(clock, 1000) if medium == "dram" else on_disk(tmp_path / "disk", 1000)
    pool, slots = tier.pools[A], []

    def breath(_):
        tier.close()
        slots.append(len(pool.pool))

    monkeypatch.setattr("tiertune_connector.tiers.steps.sleep", breath)
    assert tier.flush(A)[1] == most
    assert (slots, len(pool.pool)) == ([1000 - most], 1000 - most)


def test_writes_amid_a_shrink_always_find_a_slot(clock):
    """Between two steps the pool takes as many as before, and memory only falls."""
    tier, keys = full(clock, 600)
    slots = tier.pools[A].provisioned
    tier.retune(100 * PAGE, {})
    new = iter(chain("n", 2000))
    more = True
    while more:
        for key in islice(new, 3 * LEAVING_AT_ONCE):
            assert tier.write(A, key, EMPTY, NOBODY) is Outcome.OK
        more = tier.settle()
        assert tier.pools[A].provisioned <= slots
        slots = tier.pools[A].provisioned
    assert (slots, len(tier.pools[A].pool)) == (100, 100)
    assert tier.present(A, keys[:1])[1] == 0
    tier.close()


def test_memory_that_is_given_back_comes_again_segment_by_segment(clock):
    """One step takes no more than a segment of it, also where slots of many segments were given back."""
    tier, keys = full(clock, 1024)
    for key in keys[::2]:
        tier.pin(A, key)
    resize(tier, 512 * PAGE)
    pool = tier.pools[A]
    assert (pool.provisioned, len(pool.segments)) == (512, 4), "every second slot of each"
    for key in keys[::2]:
        tier.unpin(A, key)
    tier.retune(1024 * PAGE, {})
    sizes = [pool.provisioned]
    while tier.settle():
        sizes.append(pool.provisioned)
    assert sizes == [512, 640, 768, 896, 1024]
    tier.close()


@pytest.mark.parametrize("algorithm", ["arc", "s3fifo"])
def test_a_switch_is_made_in_steps_and_drops_nothing(clock, algorithm):
    """Each step hands over 512 chunks; the new name is told at once."""
    tier, keys = full(clock, 3000)
    pool = tier.pools[A].pool
    tier.retune(3000 * PAGE, {A: (None, algorithm)})
    assert pool.algorithm == algorithm
    steps = 0
    while isinstance(pool._eviction, Handover):
        before = len(pool._eviction.successor)
        more = tier.settle()
        steps += 1
        assert len(pool._eviction if not more else pool._eviction.successor) - before <= STEP
        assert tier.present(A, keys)[1] == 3000
    assert steps == -(-3000 // STEP)
    assert list(pool) == keys, "in the old order"
    tier.close()


def test_a_switch_goes_on_with_every_chunk_that_enters():
    """Where nobody drives it, it is over long before the old order alone has chosen what leaves."""
    pool: Pool[int] = Pool(640)
    for key in chain("k", 640):
        pool.reserve(key)
        pool.commit(key, 0)
    pool.switch("arc", whole=False)
    for key in chain("n", 640 // HANDED_OVER + 1):
        assert isinstance(pool._eviction, Handover)
        pool.reserve(key)
    assert pool.hand_over(HANDED_OVER) is False
    assert (pool._eviction.name, len(pool)) == ("arc", 640)


requests = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=8, unique=True), max_size=30)


@given(before=requests, after=requests, step=st.integers(1, 9), old=st.sampled_from(CANDIDATES))
@pytest.mark.parametrize("new", ["lru", "arc"])
def test_a_switch_in_steps_ends_as_one_in_one_go(new, old, before, after, step):
    """Whatever was used or entered meanwhile, the order is the same; of what leaves it is so with LRU."""
    capacity = 12 if new == "lru" else 100
    whole, slow = SimulatedPool(capacity, old), SimulatedPool(capacity, old)
    for pool in (whole, slow):
        for keys in before:
            pool.write_through(keys)
        pool.switch(new, whole=pool is whole)
    for keys in after:
        slow.hand_over(step)
        for pool in (whole, slow):
            pool.write_through(keys)
        assert set(slow) == set(whole)
    slow.hand_over(len(slow))
    assert list(slow) == list(whole)


def replayed(prompts, pool, switch, write, settle=lambda: None):
    """Accesses within the cached prefix, and all, of the prompts after the first third, when it is switched."""
    third, hits = len(prompts) // 3, 0
    for number, keys in enumerate(prompts):
        if number == third:
            switch()
        hits += pool.prefix(keys) if number >= third else 0
        pool.touch(keys)
        for key in reversed(keys):
            if key not in pool:
                write(key)
        pool.renew(keys)
        if number % 5 == 0:
            settle()
    return hits, sum(map(len, prompts[third:]))


def test_a_switch_ends_however_much_is_used_meanwhile():
    """Ten times as many uses as a step hands over; a second switch needs not wait for the first, and drops nothing."""
    pool, keys = SimulatedPool(5000, "lru"), list(range(5000))
    pool.write_through(keys)
    pool.switch("arc", whole=False)
    pool.hand_over(STEP)
    pool.switch("s3fifo", whole=False)
    steps = 1
    while pool.hand_over(STEP):
        steps += 1
        pool.touch(keys[(steps * 700) % 4000 :][:1000] * 5)
        assert steps < 50
    assert (pool.algorithm, len(pool), sorted(pool)) == ("s3fifo", 5000, keys)


@pytest.mark.parametrize(("old", "new"), [("lru", "arc"), ("arc", "s3fifo"), ("s3fifo", "lru")])
def test_hits_after_a_switch_are_those_of_the_simulation(clock, old, new):
    """A real tier, switched while it serves, within 0.2 points of a pool that is switched in one go."""
    trace = builtin_trace("shift_mix_slice")
    half, chunks = trace.chains[: len(trace.chains) // 2], trace.unique // 20
    prompts = [[int(key).to_bytes(8) for key in keys] for keys in half]
    tier, _ = full(clock, 0, old)
    resize(tier, chunks * PAGE)
    simulated: Pool[bool] = Pool(chunks, old)

    def simulate(key):
        if simulated.reserve(key) is not None:
            simulated.commit(key, place=True)

    real, asked = replayed(
        prompts,
        tier.pools[A].pool,
        lambda: tier.retune(chunks * PAGE, {A: (None, new)}),
        lambda key: tier.write(A, key, EMPTY, NOBODY),
        tier.settle,
    )
    told, _ = replayed(prompts, simulated, lambda: simulated.switch(new), simulate)
    assert told > 0.02 * asked
    assert 100 * abs(real - told) / asked <= 0.2
    tier.close()


# -- within bounds


def shared_memory() -> int:
    """Bytes of the machine that are shared memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def taken(dram):
    """Bytes behind the segments' descriptors: their part of that."""
    with dram.lock:
        segments = [segment for pool in dram.pools.values() for segment in pool.segments.values()]
        return sum(os.fstat(segment.fd).st_blocks * 512 for segment in segments)


def in_use(dram):
    """Bytes of the slots that pools have; memory is taken a moment before."""
    with dram.lock:
        return sum(pool.pool.capacity * pool.stride for pool in dram.pools.values())


def test_the_machine_has_its_memory_back_although_clients_map_it(home):
    """Two engines read every chunk; what a smaller tuning gives back is the machine's, and the rest stays whole."""
    with running(home, dram=192 * MIB) as store:
        http, dram = Http(store.address), store.store.dram
        dram._segment_bytes = 16 * MIB

        def resized(size):
            """What the machine's shared memory has changed by; others may use it, too."""
            before = shared_memory()
            http.retune(tiers__dram__capacity_bytes=size * MIB)
            eventually(lambda: abs(taken(dram) - size * MIB) < MIB // 2 and in_use(dram) == size * MIB)
            return shared_memory() - before

        with (
            Engine(store, chunk_bytes=MIB // 2) as one,
            Engine(store, chunk_bytes=MIB // 2, name="other") as two,
        ):
            eventually(lambda: taken(dram) >= 192 * MIB)
            keys = chain("k", 384)

            def given_back():
                resized(192)
                for start in range(0, 384, 64):
                    assert set(one.put(keys[start : start + 64])) <= {"", "present"}
                assert [engine.get(keys) for engine in (one, two)] == [384, 384]
                return resized(48)

            eventually(lambda: abs(given_back() + 144 * MIB) < 8 * MIB, 60)
            left = [key for key in keys if one.find([key])]
            assert [engine.get(left) for engine in (one, two)] == [96, 96]
            assert taken(dram) < 49 * MIB, "reading takes none again"
        http.close()


def test_the_disk_keeps_its_bound_at_every_moment(tmp_path):
    """Writers, a tuner and a witness: the file's data is within the bound that was, or is being, tuned."""
    chunk = 60_000
    slot = PAGE + -(-chunk // PAGE) * PAGE
    tier = DiskTier(tmp_path / "disk")
    tier.retune(64 * slot, {})
    tier.attach(A, chunk)
    path = tier.pools[A].slab.path
    seen, bounds = [], [64 * slot]

    def write(turn):
        key = b"%d" % (turn % 400)
        tier.write(A, key, view(payload(key, chunk)), NOBODY)

    def witness(_):
        since = len(bounds) - 1
        taken = data_bytes(path)
        seen.append(taken - max(bounds[since:]))

    def tune(turn):
        more = (8, 64, 32, 0, 48)[turn % 5] * slot
        bounds.append(max(bounds[-1], more))
        resize(tier, more)
        bounds.append(more)
        time.sleep(0.03)

    with amid(in_turns(write, write, witness, tune), 4):
        time.sleep(3.0)
        eventually(lambda: len(seen) > 100, 60)
    assert max(seen) <= 2 * slot, "what the two writers had in hand when it shrank"
    resize(tier, 4 * slot)
    assert data_bytes(path) <= 4 * slot
    tier.close()


# -- between models


def test_one_change_moves_memory_between_models(home):
    """Through HTTP on a serving store: what one gives back the other has, and together they never have more."""
    most = 64 * MIB
    with running(home, dram=most) as store:
        http, dram = Http(store.address), store.store.dram
        dram._segment_bytes = 4 * MIB
        other_name = Namespace(model="qwen", chunk_tokens=16)
        with (
            Engine(store, chunk_bytes=MIB) as llama,
            Engine(store, chunk_bytes=MIB, namespace=other_name) as qwen,
        ):
            digests = list(dram.pools)

            def sizes():
                pools = http.get("/v1/status")["pools"]
                return [pools[digest]["dram"]["effective"]["capacity_bytes"] for digest in digests]

            eventually(lambda: sizes() == [32 * MIB, 32 * MIB])
            llama.put_all(chain("l", 32))
            taken = []

            def witness(_):
                with dram.lock:
                    taken.append(sum(pool.provisioned * pool.stride for pool in dram.pools.values()))

            with amid(in_turns(witness), 1):
                version = http.get("/v1/tuning")["version"]
                http.retune(pools={digests[0]: {"dram": {"capacity_bytes": 8 * MIB}}})
                eventually(lambda: taken and sizes() == [8 * MIB, 56 * MIB])
            assert http.get("/v1/tuning")["version"] == version + 1
            assert max(taken) <= most
            assert llama.get(chain("l", 32)[-1:]) + llama.get(chain("l", 32)[:1]) == 1, "its youngest stay"
            assert llama.put(chain("m", 32)).count("") == 8
            qwen.put_all(chain("q", 56))
            assert qwen.get(chain("q", 56)) == 56
        http.close()
