"""A load's chunks are copied while the rest of them is on its way, and what is copied too early is never used."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.memory_tier import MemoryTier
from connector.store.serving import put_remote, serving
from connector.stores import PATIENCE_S, Engine, chain, eventually, payload, pool
from tiertune_connector.chunk import NOBODY
from tiertune_connector.protocol.messages import Report, TierReport
from tiertune_connector.store.loads import STEP_BYTES, Progress
from tiertune_connector.tiers.base import Outcome

pytestmark = pytest.mark.slow

CHUNK = 3 * STEP_BYTES + 500
KEYS = chain("parts", 3)


class Stepwise(MemoryTier):
    """A remote that has read a step more of a chunk at every ``go``; then ``ends`` tells how it ends."""

    def __init__(self):
        super().__init__()
        self.go = threading.Semaphore(0)
        self.reading = threading.Semaphore(0)
        self.ends = Outcome.OK
        self.tells = True

    def read(self, namespace, key, out, came):
        if len(out) < CHUNK:
            return super().read(namespace, key, out, came)
        self.reading.release()
        whole = memoryview(bytearray(len(out)))
        outcome, origin = super().read(namespace, key, whole)
        for start in range(0, len(out), STEP_BYTES):
            assert self.go.acquire(timeout=PATIENCE_S)
            out[start : start + STEP_BYTES] = whole[start : start + STEP_BYTES]
            if self.tells:
                came(min(len(out), start + STEP_BYTES))
        return (outcome, origin) if self.ends is Outcome.OK else (self.ends, NOBODY)


@pytest.fixture
def remote():
    return Stepwise()


@pytest.fixture
def store(home, remote):
    with serving(home, remote, dram=8 * (CHUNK + 4096)) as process:
        yield process


@pytest.fixture
def engine(store):
    with Engine(store, chunk_bytes=CHUNK) as made:
        eventually(lambda: pool(store).pool.capacity >= 6)  # memory comes segment by segment
        yield made


def hold(remote, keys):
    """Chunks that only the remote has."""
    put_remote(remote, keys, nbytes=CHUNK)


@pytest.fixture
def afar(remote, engine):
    """A chunk that only the remote has, as the engine has been told."""
    hold(remote, KEYS[:1])
    assert engine.find(KEYS[:1]) == ["remote"]
    return KEYS[:1]


class Copying:
    """A load whose parts are copied on the thread that hears of them, as `StoreClient.load` has it."""

    def __init__(self, engine, keys):
        self.rows = [np.zeros(CHUNK, np.uint8) for _ in keys]
        self.heard: list[tuple[int, int]] = []
        self.client = engine.client
        self.future = engine.client.load(keys, deadline_s=PATIENCE_S, arriving=self.arriving)

    def arriving(self, parts):
        for part in parts:
            self.client.read_part(part, self.rows[part.position])
            self.heard.append((part.position, part.nbytes))

    def finish(self):
        loaded = self.future.result(PATIENCE_S)
        good = [self.client.read(slot, row) for slot, row in zip(loaded.slots, self.rows, strict=False)]
        self.client.release(loaded)
        return loaded, good

    def whole(self, keys):
        """Whether the rows have the bytes of these chunks."""
        return [row.tobytes() for row in self.rows] == [payload(key, CHUNK).tobytes() for key in keys]


def steps(remote, count):
    remote.go.release(count)


def test_a_chunk_is_copied_while_it_comes(engine, remote, afar):
    """Every part is in the client's row before the next has come, and the whole is as it was written."""
    copying = Copying(engine, afar)
    for step in (1, 2, 3):
        steps(remote, 1)
        eventually(lambda step=step: (0, step * STEP_BYTES) in copying.heard)
        assert np.array_equal(copying.rows[0][: step * STEP_BYTES], payload(KEYS[0], CHUNK)[: step * STEP_BYTES])
    assert not copying.future.done()
    steps(remote, 1)
    loaded, good = copying.finish()
    assert (loaded.outcomes, good, copying.whole(afar)) == (["hit"], [True], True)
    assert copying.heard == [(0, step * STEP_BYTES) for step in (1, 2, 3)], "the rest is less than a step"


def test_what_dram_has_is_copied_while_the_rest_comes(engine, remote):
    """A load that waits for one chunk does not keep its client from the others."""
    engine.put_all(KEYS[:2])
    hold(remote, KEYS[2:])
    assert engine.find(KEYS) == ["dram", "dram", "remote"]
    copying = Copying(engine, KEYS)
    eventually(lambda: {(0, CHUNK), (1, CHUNK)} <= set(copying.heard))
    assert not copying.future.done()
    steps(remote, 4)
    loaded, good = copying.finish()
    assert (loaded.outcomes, good, copying.whole(KEYS)) == (["hit"] * 3, [True] * 3, True)


@pytest.mark.parametrize(("ends", "told"), [(Outcome.CORRUPT, "corrupt"), (Outcome.ERROR, "error")])
def test_what_turns_out_bad_is_not_used(engine, remote, afar, ends, told):
    """Parts were copied before the whole could be verified: the reply has no slot for them."""
    remote.ends = ends
    copying = Copying(engine, afar)
    steps(remote, 4)
    loaded, good = copying.finish()
    assert (loaded.outcomes, loaded.slots, good) == ([told], [], [])
    assert copying.heard


def test_parts_of_another_time_of_the_slot_are_copied_again(engine, remote, afar):
    """What was copied counts only for the same generation of the same slot."""
    begun = []
    future = engine.client.load(afar, deadline_s=PATIENCE_S, arriving=begun.extend)
    steps(remote, 1)
    (part,) = eventually(lambda: begun[:1])
    slot, row = part.slot, np.zeros(CHUNK, np.uint8)
    engine.client.read_part(part, row)
    slot.ref = type(slot.ref)(slot.ref.segment, slot.ref.index, slot.ref.generation - 1, 0)
    row[:] = 0
    steps(remote, 3)
    loaded = future.result(PATIENCE_S)
    assert loaded.slots[0] is not slot
    assert engine.client.read(loaded.slots[0], row)
    assert np.array_equal(row, payload(KEYS[0], CHUNK))
    assert not engine.client.read(slot, row), "its generation is over"


def test_a_byte_that_is_not_what_came_is_found(store, engine, remote, afar, http):
    """The client's own sum is of what it copied, part by part too; the store then drops the chunk."""
    copying = Copying(engine, afar)
    steps(remote, 1)
    eventually(lambda: copying.heard)
    (arrival,) = store.store.loads.arrivals._coming.values()
    with ThreadPoolExecutor(1) as another:  # as another process with the memory mapped might
        steps(remote, 1)
        eventually(lambda: len(copying.heard) == 2)
        in_slot = arrival.slot.segment.slot(arrival.slot.index)
        steps(remote, 2)
        copying.future.result(PATIENCE_S)
        another.submit(in_slot.__setitem__, -1, in_slot[-1] ^ 1).result()
    loaded, good = copying.finish()
    assert (loaded.outcomes, good) == (["hit"], [False])
    engine.heard()
    eventually(lambda: http.total("tier_errors_total", tier="dram", reason="corrupt") == 1)


def test_a_tier_that_cannot_tell_is_told_of_when_it_has_all(engine, remote):
    """So a prompt's first chunks are copied while the others come, also where payloads are coded."""
    hold(remote, KEYS[:2])
    assert engine.find(KEYS[:2]) == ["remote"] * 2
    remote.tells = False
    copying = Copying(engine, KEYS[:2])
    steps(remote, 8)
    _, good = copying.finish()
    assert good == [True, True]
    assert set(copying.heard) <= {(0, CHUNK), (1, CHUNK)}
    assert copying.heard


def test_a_chunk_that_was_read_in_part_is_read_once(engine, remote, afar):
    """A second read into other memory copies all of it."""
    steps(remote, 4)
    copying = Copying(engine, afar)
    loaded = copying.future.result(PATIENCE_S)
    assert copying.heard
    assert engine.client.read(loaded.slots[0], copying.rows[0])
    again = np.zeros(CHUNK, np.uint8)
    assert engine.client.read(loaded.slots[0], again)
    assert np.array_equal(again, payload(KEYS[0], CHUNK))
    engine.client.release(loaded)


def test_who_hears_and_fails_loads_all_the_same(engine, remote, afar, caplog):
    """The connection stays, and the reply comes."""
    steps(remote, 4)
    future = engine.client.load(afar, deadline_s=PATIENCE_S, arriving=lambda _: 1 // 0)
    assert engine.read(future.result(PATIENCE_S)) == 1
    assert caplog.text.count("what has come of a load could not be heard") == engine.client.errors > 0
    assert engine.connected


def test_a_client_that_has_gone_does_not_end_the_reading(store, remote):
    """Another one that waits for the same chunk gets it, in parts too."""
    with Engine(store, name="engine-1", chunk_bytes=CHUNK) as stays:
        with Engine(store, name="engine-0", chunk_bytes=CHUNK) as goes:
            hold(remote, KEYS[:1])
            assert goes.find(KEYS[:1]) == stays.find(KEYS[:1]) == ["remote"]
            left = Copying(goes, KEYS[:1])
            assert remote.reading.acquire(timeout=PATIENCE_S)
            steps(remote, 1)
            eventually(lambda: left.heard)
        copying = Copying(stays, KEYS[:1])
        eventually(lambda: copying.heard)
        steps(remote, 3)
        loaded, good = copying.finish()
        assert (loaded.outcomes, good, copying.whole(KEYS[:1])) == (["hit"], [True], True)
    assert not remote.reading.acquire(blocking=False), "it was read once"


def test_who_does_not_ask_for_parts_hears_of_none(engine, remote, afar):
    """One that copies nothing before gets its reply alone."""
    steps(remote, 4)
    loaded = engine.client.load(afar, deadline_s=PATIENCE_S).result(PATIENCE_S)
    assert engine.read(loaded) == 1
    assert engine.client.errors == 0


def test_what_lies_in_dram_is_copied_before_the_store_answers(store, engine):
    """While it is asked; the answer says whether that was right."""
    engine.put_all(KEYS)
    assert engine.find(KEYS) == ["dram"] * 3
    with store.store.dram.lock:
        copying = Copying(engine, KEYS)
        assert copying.heard == [(position, CHUNK) for position in range(3)]
        assert not copying.future.done()
    _, good = copying.finish()
    assert (good, copying.whole(KEYS)) == ([True] * 3, True)
    assert len(copying.heard) == 3, "the store tells nothing of what the client sees"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * STEP_BYTES)), max_size=30),
    st.integers(0, 30),
)
def test_progress_is_told_in_steps(moves, closed_after):
    """No message brings less than a step; none repeats or takes back; what is not told is less than one."""
    slots = [SimpleNamespace(segment=SimpleNamespace(number=1), index=i, generation=2, checksum=3) for i in range(4)]
    told = []
    progress = Progress(1, slots, told.append)
    here, said = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    for number, (position, nbytes) in enumerate(moves):
        before = len(told)
        if number == closed_after:
            progress.close()
        progress.came(position, nbytes)
        if number < closed_after:
            here[position] = max(here[position], nbytes)
        for part in told[before:]:
            assert number < closed_after
            assert [slot.index for slot in part.slots] == part.positions
            new = dict(zip(part.positions, part.nbytes, strict=True))
            assert sum(new.values()) - sum(said[each] for each in new) >= STEP_BYTES
            assert all(nbytes == here[each] > said[each] for each, nbytes in new.items())
            said |= new
        assert sum(here.values()) - sum(said.values()) < STEP_BYTES


def test_what_dram_costs_is_learned_of_loads_from_dram_alone(store, engine):
    """Beside a slower tier its chunks were copied while the others came: what was left tells nothing.

    Of a load of which the engine took a part all that it brought counts: so long it took. One of several at a time
    waited for the others, too: a burst of them would have engines decline what copies as fast as ever.
    """
    (session,) = store.server.sessions()
    dram, remote = (TierReport(tier, 1, 16, 16, "cheaper", 0.1, 0.5, 0.2, "won") for tier in ("dram", "remote"))
    refused = msgspec.structs.replace(remote, fetched_tokens=0, outcome="skipped", actual_s=None)
    in_vain = msgspec.structs.replace(remote, vain_tokens=16, outcome="failed")
    in_part = msgspec.structs.replace(dram, chunks=2, tokens=32, fetched_tokens=32, vain_tokens=16)
    shared = msgspec.structs.replace(dram, shared=True)
    learned = []
    store.store.health.dram_took = lambda *told: learned.append(told)
    for told in ([dram, remote], [remote], [dram], [in_part], [dram, in_vain], [shared], [dram, refused]):
        store.store.loads.report(session, Report(told))
    assert learned == [(1, CHUNK, 0.2), (2, 2 * CHUNK, 0.2), (1, CHUNK, 0.2)]
