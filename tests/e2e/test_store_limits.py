"""What reaches a store's socket that should not, and more of it than it has room for; a clock that jumps."""

import json
import os
import random
import socket
import struct
import subprocess
import sys
import time

import msgspec
import pytest

from connector.stores import CHUNK_BYTES, NAMESPACE, STRIDE, Engine, chain, eventually, short_folder
from e2e.stalls import timed
from e2e.store_child import Child, limited, resident_bytes
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.frames import MAX_FRAME_BYTES, Frames
from tiertune_connector.protocol.messages import (
    Abort,
    Commit,
    FirstToken,
    Hello,
    Load,
    Lookup,
    Own,
    Release,
    Reply,
    Report,
    Reserve,
    SlotRef,
    StepReport,
    Steps,
    TierReport,
)

pytestmark = pytest.mark.slow
FRAMES, CONNECTIONS = 100_000, 2000
"""Frames in all, evenly over connections; the last of each connection is none that a store can understand."""
CLIENTS, AT_ONCE = 1000, 100
NOBODY = 65_534
ENCODE = msgspec.msgpack.Encoder().encode

JUMPS = """
import pathlib, time
offset, real = pathlib.Path({file!r}), time.time
time.time = lambda: real() + float(offset.read_text())
"""
"""A clock that another may set. What it tells is the hour; how long something took is told by one that nobody sets."""


def dial(path):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(str(path))
    return sock


def greet(path, client):
    sock = dial(path)
    frames = Frames(sock, Reply)
    frames.send(Hello(1, "test", client, "engine", "all", NAMESPACE, CHUNK_BYTES, 16))
    welcome = next(frames.receive())
    assert welcome.refusal == ""
    return sock


# -- frames


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def some_keys(rng):
    return [rng.randbytes(rng.choice((1, 8, 32, 64))) for _ in range(rng.choice((0, 1, 3, 8)))]


def some_message(rng):
    """Of a client that is out of its mind, but speaks the language."""
    number, keys = rng.randrange(1 << 40), some_keys(rng)
    ref = SlotRef(rng.randrange(9), rng.randrange(1 << 20), rng.randrange(1 << 63), rng.randrange(1 << 63))
    report = TierReport(
        rng.choice(("dram", "remote")), number, number, rng.randrange(2) * number, "cheaper", -1e9, 1e9, 1e9, "lost"
    )
    return rng.choice(
        (
            lambda: Lookup(number, str(number), keys, number, rng.randbytes(rng.choice((0, 3, 16))), defer=True),
            lambda: Own(str(number), number, number),
            lambda: Load(number, list(dict.fromkeys(keys)), 0.0),
            lambda: Release(number),
            lambda: Reserve(number, "r", list(dict.fromkeys(keys)), b""),
            lambda: Commit(number, keys, [ref] * len(keys)),
            lambda: Abort(keys),
            lambda: Report([report] * rng.randrange(4)),
            lambda: FirstToken(number, 1e9, "held"),
            lambda: Steps([StepReport("all", "prefill", 1e9, number)]),
        )
    )()


def nonsense(rng):
    """Noise, half a message, a length beyond all bounds, a message with a byte changed or of a server."""
    whole = ENCODE(some_message(rng))
    at = rng.randrange(len(whole))
    return rng.choice(
        (
            lambda: frame(rng.randbytes(rng.randrange(300))),
            lambda: frame(whole[:at]),
            lambda: frame(whole) + frame(b"\xc1"),
            lambda: struct.pack("<I", rng.randrange(MAX_FRAME_BYTES + 1, 1 << 32)),
            lambda: struct.pack("<I", rng.randrange(1, MAX_FRAME_BYTES)) + b"too few",
            lambda: frame(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]) + frame(b""),
            lambda: frame(ENCODE(["welcome", ""])),
            lambda: rng.randbytes(50),
        )
    )()


def babble(path, rng, count):
    """One connection: frames that make sense, then one that makes none; ended by the store, or by us."""
    sock = greet(path, "mad")
    with sock:
        try:
            sock.sendall(b"".join(frame(ENCODE(some_message(rng))) for _ in range(count - 1)) + nonsense(rng))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass  # it did not wait for the rest


def test_a_hundred_thousand_senseless_frames_harm_nobody(home):
    """Every connection ends, another engine is served all the while; no error within, and nothing grows."""
    rng = random.Random(11)
    with Child(home) as store, Engine(store.socket) as engine:
        eventually(store.has_memory)
        keys = chain("k", 6)
        engine.put(keys)

        def play(connections):
            for _ in range(connections):
                babble(store.socket, rng, FRAMES // CONNECTIONS)
            eventually(lambda: len(store.http.get("/v1/status")["clients"]) == 1)
            return resident_bytes(store.process.pid), store.descriptors(), store.threads()

        warm = play(CONNECTIONS // 4)
        started = time.monotonic()
        assert engine.find(keys) in ([], ["dram"] * 6)  # what is mad may have evicted it
        engine.put(keys)
        after = play(CONNECTIONS - CONNECTIONS // 4)
        assert engine.client.connected
        assert time.monotonic() - started < 120
        engine.put(keys)
        assert engine.get(keys) == 6
        assert after[0] < warm[0] + (16 << 20), "memory"
        assert after[1] <= warm[1] + 2, "descriptors"
        assert after[2] <= warm[2] + 32, "threads: a pool of so many fills as they are needed"
        assert store.http.total("internal_errors_total") == 0
        eventually(lambda: store.http.total("tier_pinned_bytes", tier="dram") == 0)
        greet(store.socket, "mad").close()  # it writes no more: what it had reserved is free
        eventually(lambda: store.http.total("quarantined_slots") == 0)
        assert "Traceback" not in store.log.read_text()
        assert " ended: " in store.log.read_text(), "why a connection ended is told"


# -- who may not


def as_nobody(code, *arguments):
    """What a process of another user says, that has loaded its program before it became one."""
    command = "import os, socket, sys\nfrom tiertune_connector.serve.__main__ import main\n"
    command += f"os.setgid({NOBODY}); os.setuid({NOBODY})\n{code}"
    return subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(home):
    """Neither its engines nor its stores get at what is ours; it is told the place, and the store goes on."""
    home.chmod(0o755)
    connect = "socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with Child(home, disk={"path": str(home / "disk"), "capacity": 0}) as store, Engine(store.socket) as engine:
        told = as_nobody(connect, str(store.socket))
        assert "PermissionError" in told.stderr
        other = "sys.exit(main(sys.argv[1:]))"
        for what, message in (
            ({"state_dir": str(home / "state")}, f"{home}/state/lock: Permission denied"),
            ({"disk": {"path": str(home / "disk"), "capacity": 0}}, f"{home}/disk"),
        ):
            with short_folder() as folder:
                folder.chmod(0o777)
                config = {"socket": str(folder / "s.sock"), "state_dir": str(folder / "state"), "http": {"port": 0}}
                (folder / "store.yaml").write_text(json.dumps({**config, "dram": {"capacity": STRIDE}} | what))
                (folder / "store.yaml").chmod(0o644)
                told = as_nobody(other, str(folder / "store.yaml"))
            assert told.returncode == 2, told.stderr
            assert message in told.stderr
            assert "Traceback" not in told.stderr
        engine.put_all(chain("k", 3))


def test_two_stores_that_start_at_once_are_one(home):
    """Whoever comes second, however close, is refused; the other serves."""
    disk = {"path": str(home / "disk"), "capacity": 0}
    for name in ("a", "b"):
        (home / name).mkdir()
    children = [Child(home / name, socket=str(home / "s.sock"), disk=disk) for name in ("a", "b")]
    eventually(lambda: any(child.process.poll() is not None for child in children), 30)
    (second,) = [child for child in children if child.process.poll() is not None]
    (first,) = [child for child in children if child is not second]
    assert second.process.returncode == 2
    assert "another store" in second.log.read_text()
    with first, Engine(home / "s.sock") as engine:
        engine.put_all(chain("k", 3))


# -- limits


def test_a_thousand_clients_come_and_go(home):
    """A hundred at a time, some with chunks in their hands: all are served, and nothing is left of them."""
    with Child(home) as store, Engine(store.socket) as engine:
        eventually(store.has_memory)
        engine.put(chain("k", 6))

        def wave(number):
            socks = [greet(store.socket, f"client-{number}-{each}") for each in range(AT_ONCE)]
            for sock in socks[: AT_ONCE // 2]:
                sock.sendall(frame(ENCODE(Load(1, chain("k", 6), 1.0))))
            assert engine.get(chain("k", 6)) == 6
            for sock in socks:
                sock.close()
            eventually(lambda: len(store.http.get("/v1/status")["clients"]) == 1)
            return resident_bytes(store.process.pid), store.descriptors(), store.threads()

        seen = [wave(number) for number in range(CLIENTS // AT_ONCE)]
        memory, descriptors, threads = zip(*seen, strict=True)
        assert max(memory[-3:]) < max(memory[:3]) + (8 << 20)
        assert descriptors[-1] <= descriptors[0] + 2
        eventually(lambda: store.threads() <= threads[0] + 2)
        eventually(lambda: store.http.total("tier_pinned_bytes", tier="dram") == 0)
        assert store.http.total("internal_errors_total") == 0


def test_a_store_without_descriptors_serves_who_is_there_and_tells_it(home):
    """Those connected read and write; of those turned away its log and a counter tell; then others are let in again."""
    with Child(home, first=limited("RLIMIT_NOFILE", 96)) as store, Engine(store.socket) as engine:
        eventually(store.has_memory)
        engine.put(chain("k", 6))
        flood = [dial(store.socket) for _ in range(60)]
        eventually(lambda: "could not be accepted: [Errno 24]" in store.log.read_text())
        for turn in range(50):
            assert engine.find(chain("k", 6)) == ["dram"] * 6
            assert engine.get(chain("k", 6)) == 6
            engine.put_all(chain(f"n{turn}", 2))
        for sock in flood:
            sock.close()
        eventually(lambda: store.http.total("internal_errors_total", place="accept") > 0)
        with Engine(store.socket, connect_s=10) as late:
            assert late.get(chain("k", 6)) == 6


def test_large_dram_leaves_descriptors_for_engines(home):
    """It has less than it is to have, which its log tells; engines come, also those of another model."""
    large = {"capacity": 1024 * STRIDE, "segment": 16 * STRIDE}
    with Child(home, first=limited("RLIMIT_NOFILE", 96), dram=large) as store, Engine(store.socket) as engine:
        eventually(lambda: "Too many open files; it goes on trying" in store.log.read_text())
        assert store.http.total("tier_capacity_bytes", tier="dram", state="effective") > 256 * STRIDE
        other = Namespace(model="other", chunk_tokens=NAMESPACE.chunk_tokens)
        with Engine(store.socket, name="b") as second, Engine(store.socket, name="c", namespace=other) as third:
            engine.put_all(chain("k", 6))
            assert second.get(chain("k", 6)) == 6
            assert third.connected


def test_a_clock_that_jumps_changes_nothing_but_the_hour(home):
    """A day ahead, a year back: leases, deadlines and health go on; counters tell the new hour."""
    file = home / "offset"
    file.write_text("0")
    with Child(home, first=JUMPS.format(file=str(file)), lease=1.0) as store, Engine(store.socket) as engine:
        eventually(store.has_memory)
        keys = chain("k", 6)
        engine.put(keys)
        for offset in (86_400.0, -31_536_000.0, 0.0):
            held = engine.load(keys, deadline_s=0.2)
            aside = file.with_suffix(".new")
            aside.write_text(str(offset))
            aside.replace(file)
            told = store.http.get("/v1/counters")["time_s"]
            assert abs(told - time.time() - offset) < 5
            assert engine.read(held) == 6, "the lease is no shorter"
            took_s, _ = timed(lambda: eventually(lambda: store.http.total("tier_pinned_bytes", tier="dram") == 0))
            assert took_s < 0.2 + 1.0 + 2.0, "nor longer: it ends by itself"
            assert engine.get(keys) == 6
            assert engine.load(chain("none", 1), deadline_s=0.1).outcomes == ["miss"]
            assert store.health("dram") == "ok"
            assert store.http.get("/v1/status")["uptime_s"] < 3600
        assert store.http.total("internal_errors_total") == 0
