"""Stores and engines killed, stopped or cut off amid their work: how soon the others are well, and what is left."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from connector.stores import STRIDE, Engine, amid, chain, eventually, payload
from e2e.stalls import timed
from e2e.store_child import Child, stopped, victim
from tiertune_connector.chunk import HEADER_BYTES, decode_header

pytestmark = pytest.mark.slow
READY_S, RELEASED_S = 2.0, 1.0
SMALL = 600
"""Bytes of a chunk where many of them matter, and not their size."""
SMALL_SLOT = 8192
"""What such a one takes on disk."""

VICTIM = """
import sys, time
from pathlib import Path
from connector.stores import Engine, chain, payload
engine = Engine(Path(sys.argv[1]), name="victim")
keys = chain("victim", 10)
engine.put(keys)
loaded = engine.load(keys, deadline_s=0.5)
slots = engine.client.reserve(chain("reserved", 10)).result(5).slots
print("holds", flush=True)
while True:
    for slot in slots:
        engine.client.write(slot, payload(b"half"))
"""
"""An engine that has pinned ten chunks, and is writing ten others without end."""


def processor_s(pid):
    """Seconds of a processor that a process has had: of its start, all but what others took of the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def killed_with(keys, home, **settings):
    """A store that had these chunks on its disk is killed."""
    with Child(home, **settings) as store, Engine(store.socket, chunk_bytes=SMALL) as engine:
        store.http.retune(tiers__disk__write="commit")
        eventually(store.has_memory)
        for start in range(0, len(keys), 200):
            engine.put(keys[start : start + 200])
            eventually(lambda: store.idle("disk"))
        store.kill()


def left_behind(temporary):
    """What processes could leave on this machine: names in shared memory, and temporary files."""
    return {*temporary.iterdir(), *(path for path in Path("/dev/shm").iterdir() if "tiertune" in path.name)}


def test_a_store_killed_again_and_again_under_load_is_soon_back_and_leaves_nothing(home, tmp_path, monkeypatch):
    """Clients miss at once and are back by themselves; ready within 2 s with 2,000 chunks on disk; no file piles up."""
    disk = {"path": str(home / "disk"), "capacity": 32_768 * SMALL_SLOT}  # so that nothing has to leave it
    dram = {"capacity": "8MiB", "segment": "1MiB"}
    keys = chain("kept", 2000)
    served = [0]
    ready, missed, names = [], [], []

    def play(number, stop):
        with Engine(home / "s.sock", name=f"engine-{number}", chunk_bytes=SMALL) as engine:
            turn = 0
            while not stop.is_set():
                piece = keys[turn % 1900 :][:20]
                served[0] += engine.get(piece, deadline_s=1.0) == 20
                if not engine.client.connected:
                    stop.wait(0.01)  # it computes itself
                engine.put(chain(f"{number}-{turn}", 5))
                turn += 7

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = left_behind(tmp_path)
    killed_with(keys, home, disk=disk, dram=dram)
    witness = Engine(home / "s.sock", chunk_bytes=SMALL, connect_s=0)
    with amid(play, 2):
        for _ in range(6):
            with Child(home, disk=disk, dram=dram) as store:
                eventually(lambda: witness.client.connected)
                ready.append(processor_s(store.process.pid))
                assert witness.find(keys[:2]) != [], "the disk's chunks are found at once"
                was = served[0]
                eventually(lambda was=was: served[0] > was + 20)
                eventually(store.has_memory)  # in the background
                assert store.http.get("/v1/tuning")["tiers"]["disk"]["write"] == "commit", "tuned as before"
                assert store.http.total("internal_errors_total") == 0
                store.kill()
                started = time.monotonic()
                assert (witness.find(keys[:2]), witness.get(keys[:2])) == ([], 0)
                missed.append(time.monotonic() - started)
            names.append({str(path.relative_to(home)) for path in home.rglob("*")})
    witness.client.close()
    assert sorted(ready)[len(ready) // 2] < READY_S, "a start waits for nothing but its processor"
    assert sorted(missed)[len(missed) // 2] < 0.5
    assert names == [names[0]] * len(names), "no file more than after the first"
    assert left_behind(tmp_path) <= before


def test_damage_on_a_disk_of_a_killed_store_is_found_at_the_first_read(home):
    """A third of a thousand chunks is spoilt meanwhile: each is a miss and counted, asked for or not."""
    disk = {"path": str(home / "disk"), "capacity": 2048 * SMALL_SLOT}
    dram = {"capacity": "8MiB", "segment": "1MiB"}
    keys = chain("k", 1000)
    killed_with(keys, home, disk=disk, dram=dram)
    (slab,) = (home / "disk").glob("*.slab")
    rng = np.random.default_rng(3)
    damaged = set[bytes]()  # by their headers: two who write at a time take slots in no order
    with slab.open("r+b") as file:
        for slot in range(0, 1000, 3):
            file.seek(slot * SMALL_SLOT)
            header = decode_header(file.read(HEADER_BYTES))
            assert header is not None
            damaged.add(header.key)
            at = slot * SMALL_SLOT + 4096 + int(rng.integers(SMALL))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << int(rng.integers(8))]))
    assert len(damaged) == 334
    with Child(home, disk=disk, dram=dram) as store, Engine(store.socket, chunk_bytes=SMALL) as engine:
        eventually(store.has_memory)
        asked = [key for key in keys[:500] if engine.get([key]) == 0]
        assert asked == [key for key in keys[:500] if key in damaged]
        assert {engine.load([key]).outcomes[0] for key in asked} == {"miss"}, "dropped by the first read"
        eventually(lambda: store.http.get("/v1/status")["tiers"]["disk"]["chunks"] == 666, 30)
        eventually(lambda: store.http.total("tier_errors_total", tier="disk", reason="corrupt") == 334)  # behind that
        assert store.http.total("tier_errors_total", tier="disk", operation="scrub") >= 334 - len(asked)
        assert [key for key in keys[500:] if engine.get([key]) == 0] == [key for key in keys[500:] if key in damaged]
        assert store.http.total("internal_errors_total") == 0


def test_what_a_killed_engine_held_is_free_within_a_second(home):
    """Pins and slots that it was writing: no lease or quarantine of a process that is gone is waited for."""
    with Child(home) as store, Engine(store.socket) as other:
        eventually(store.has_memory)
        released = []
        for turn in range(5):
            with victim(store, VICTIM):
                assert store.http.total("tier_pinned_bytes", tier="dram") == 20 * STRIDE
                assert other.put(chain(f"beside-{turn}", 64)).count("") == 44
                started = time.monotonic()
            eventually(lambda: store.http.total("tier_pinned_bytes", tier="dram") == 0)
            eventually(lambda: store.http.total("quarantined_slots") == 0)
            released.append(time.monotonic() - started)
            other.put_all(chain(f"o{turn}", 64))
            assert other.get(chain(f"o{turn}", 64)) == 64
            assert other.find(chain("reserved", 10)) == []
        assert store.http.get("/v1/status")["clients"][0]["engine"] == "engine-0"
        assert sorted(released)[2] < RELEASED_S


def test_a_stopped_engine_keeps_what_it_may_be_writing(home):
    """Its connection is lost, its process is not gone: its reserved slots stay out of use."""
    with Child(home, lease=0.5) as store, Engine(store.socket) as other:
        eventually(store.has_memory)
        with victim(store, VICTIM) as engine, stopped(engine):
            eventually(lambda: store.http.total("quarantined_slots") == 10)  # the lease has ended
            eventually(lambda: other.put(chain("o", 64)).count("present") == 54)
        eventually(lambda: other.put(chain("o", 64)) == ["present"] * 64 or None)


def test_slots_of_an_engine_whose_socket_broke_are_kept_for_it_and_readers_notice(home):
    """It lives, and copies: what it writes is nobody's before it is back; what it reads meanwhile shows as reused."""
    with Child(home) as store, Engine(store.socket, name="cut") as engine, Engine(store.socket) as other:
        eventually(store.has_memory)
        engine.put(chain("read", 1))
        loaded = engine.load(chain("read", 1))
        writing = engine.client.reserve(chain("w", 4)).result(5).slots
        copies = [engine.client.mapped(slot.ref, slot.connection) for slot in (loaded.slots[0], *writing)]
        segments = [copy.__enter__() for copy in copies]
        engine.client._hang_up()
        eventually(lambda: store.http.total("quarantined_slots") == 4)
        released_s, _ = timed(lambda: eventually(lambda: store.http.total("tier_pinned_bytes", tier="dram") == 0))
        assert released_s < RELEASED_S
        for turn in range(2):
            other.put_all(chain(f"o{turn}", 60))
            for segment, slot in zip(segments[1:], writing, strict=True):
                segment.slot(slot.ref.index)[:] = 0xEE
            assert other.get(chain(f"o{turn}", 60)) == 60, "the late copies meet no chunk"
        ref = loaded.slots[0].ref
        assert int(segments[0].generations[ref.index]) != ref.generation, "its reader can tell"
        assert not engine.client.connected, "it comes back when its copies have ended"
        assert store.http.total("quarantined_slots") == 4
        for copy in copies:
            copy.__exit__(None, None, None)
        released_s, _ = timed(
            lambda: eventually(lambda: engine.client.connected and store.http.total("quarantined_slots") == 0)
        )
        assert released_s < RELEASED_S
        assert engine.client.commit(writing).result(5) == [False] * 4
        assert not engine.client.read(loaded.slots[0], np.empty(engine.chunk_bytes, np.uint8))
        assert not engine.client.write(writing[0], payload(writing[0].key))
        other.put_all(chain("all", 64))
