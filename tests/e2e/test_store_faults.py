"""Faults around a store process: killed, stopped, lied to, its disk full."""

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from connector.stores import STRIDE, Engine, amid, at_best, chain, eventually, payload
from e2e.store_child import Child, limited, mapped, refused, stopped, victim

pytestmark = pytest.mark.slow

ENGINE = """
import sys, time
from pathlib import Path
from connector.stores import Engine, chain, payload
engine = Engine(Path(sys.argv[1]), name="victim")
keys = chain("victim", 10)
engine.put(keys)
loaded = engine.load(keys, deadline_s=0.5)
slots = engine.client.reserve(chain("reserved", 10)).result(5).slots
for slot in slots[:5]:
    engine.client.write(slot, payload(slot.key))
print("holds", flush=True)
time.sleep(600)
"""
"""An engine that reads ten chunks, writes ten others, and does not go on."""


# -- engines


def test_a_stopped_engine_keeps_what_it_may_be_writing(home):
    """Its connection is lost, its process is not gone: its reserved slots stay out of use."""
    with Child(home, lease=0.5) as store, Engine(store.socket) as other:
        eventually(store.has_memory)
        with victim(store, ENGINE) as engine, stopped(engine):
            eventually(lambda: store.http.total("quarantined_slots") == 10)  # the lease has ended
            eventually(lambda: other.put(chain("o", 64)).count("present") == 54)
        eventually(lambda: other.put(chain("o", 64)) == ["present"] * 64 or None)


# -- the store itself


def test_a_killed_store_amid_traffic(home):
    """Futures resolve, engines go on without; restarted it has its tuning and its disk, and serves the same engines."""
    more = {"disk": {"path": str(home / "disk"), "capacity": 256 * STRIDE}}
    answered = {"found": 0, "nothing": 0}

    def play(number: int, stop: threading.Event) -> None:
        with Engine(home / "s.sock", name=f"engine-{number}") as engine:
            turn = 0
            while not stop.is_set():
                keys = chain(f"{number}-{turn % 7}", 6)
                have = engine.get(keys[: len(engine.find(keys))])
                answered["found" if have else "nothing"] += 1
                engine.put(keys[have:])
                turn += 1

    with Child(home, **more) as store:
        store.http.retune(tiers__disk__write="commit", tiers__dram__capacity_bytes=40 * STRIDE)
        boot = store.http.get("/v1/status")["boot_id"]
        with ExitStack() as playing, Engine(store.socket, name="witness") as witness:
            playing.enter_context(amid(play, 3))
            eventually(lambda: answered["found"] > 30)
            witness.put(chain("w", 3))
            eventually(lambda: store.http.total("write_behind_queued", tier="disk") == 0)
            pending = witness.client.load("r", chain("w", 3), deadline_s=60)
            store.kill()
            assert pending.result(5).outcomes in (["hit"] * 3, ["error"] * 3)
            eventually(lambda: not witness.client.connected)
            assert witness.find(chain("w", 3)) == []
            assert witness.get(chain("w", 3)) == 0
            nothing = answered["nothing"]
            eventually(lambda: answered["nothing"] > nothing)
            eventually(lambda: mapped() == 0)

            with Child(home, **more) as again:
                eventually(lambda: witness.client.connected)
                assert witness.client.boot_id == again.http.get("/v1/status")["boot_id"] != boot
                tuning = again.http.get("/v1/tuning")
                assert (tuning["version"], tuning["tiers"]["dram"]["capacity_bytes"]) == (2, 40 * STRIDE)
                found = answered["found"]
                eventually(lambda: answered["found"] > found + 30)
                disk = again.http.total("tier_lookup_tokens_total", tier="disk", result="hit")
                assert disk > 0, "what was on disk before is found"
                playing.close()
                assert again.http.total("internal_errors_total") == 0


def test_a_store_that_hangs_stops_no_engine(home):
    """Calls return at once, whatever is unanswered; when it goes on it answers."""
    with Child(home) as store, Engine(store.socket) as engine:
        engine.put(chain("k", 3))
        with stopped(store.process):
            futures = []

            def longest() -> float:
                took = []
                for _ in range(200):
                    started = time.monotonic()
                    futures.append(engine.client.lookup("r", chain("k", 200), prompt_tokens=3200))
                    engine.client.own("r", gpu_chunks=200, staging_chunks=0)
                    took.append(time.monotonic() - started)
                return max(took)

            assert at_best(longest, 1.0)
            assert not futures[-1].done() or futures[-1].result().tiers == []
        eventually(lambda: engine.client.connected and engine.get(chain("k", 3)) == 3)


def test_a_terminated_store_ends_cleanly_under_traffic(home):
    """Status 0, within seconds; its socket, its memory and its processes are gone."""
    with Child(home) as store, Engine(store.socket) as engine:
        engine.put(chain("k", 10))
        loaded = engine.load(chain("k", 10))
        store.process.terminate()
        assert store.process.wait(10) == 0
        assert not store.socket.exists()
        eventually(lambda: not engine.client.connected)
        assert engine.read(loaded) == 0
        assert "Traceback" not in store.log.read_text()


def test_a_second_store_is_refused_with_the_place(home):
    """Same socket, same state, same disk, same port: status 2, a message, and the first goes on."""
    disk = {"path": str(home / "disk"), "capacity": 0}
    (home / "other").mkdir()
    with Child(home, disk=disk) as store, Engine(store.socket) as engine:
        port = store.http.get("/v1/status") and int(str(store.http._http.base_url).rsplit(":", 1)[1].strip("/"))
        other = home / "other"
        assert f"{home}/s.sock: another store listens here already" in refused(other, socket=str(home / "s.sock"))
        assert f"{home}/state: another store uses this state directory" in refused(other, state_dir=str(home / "state"))
        assert f"{home}/disk: another store uses this disk directory" in refused(other, disk=disk)
        assert f"http 127.0.0.1:{port}: " in refused(other, http={"port": port})
        assert "Traceback" not in (other / "log").read_text()
        assert {path.name for path in other.rglob("*")} == {"store.yaml", "log"}
        assert engine.put(chain("k", 3)) == [""] * 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dram": {"capacity": "lots"}}, "store.yaml:1:"),
        ({"remote": {"url": "ftp://x"}}, "remote.url: expected a redis://"),
        ({"remote": {"url": "redis://h/0?socket_timeout=soon"}}, "remote.url: an address has no options"),
        ({"remote": {"url": "redis://h/0", "password_file": "none"}}, "/none cannot be read: No such file"),
        ({"socket": "/proc/none/s.sock"}, "/proc/none"),
        ({"state_dir": "/dev/null/state"}, "/dev/null/state: Not a directory"),
        ({"dram": {"capacity": "9000TiB"}}, "dram.capacity: 9895604649984000 bytes are asked, the machine has"),
        ({"http": {"port": 0, "certificate_file": "none", "key_file": "none"}}, "are no certificate and key"),
    ],
)
def test_a_configuration_that_cannot_work_says_what_to_mend(home, more, message):
    """Status 2, no traceback, nothing left running, and no file or folder."""
    new = home / "a" / "b"
    folders = {"state_dir": f"{new}/state", "socket": f"{new}/run/s.sock", "disk": {"path": f"{new}/disk"}}
    told = refused(home, **(folders | more))
    assert message in told
    assert "Traceback" not in told
    assert {path.name for path in home.rglob("*")} == {"store.yaml", "log"}


def test_a_store_that_cannot_start_leaves_what_was_there(home):
    """Its name, its tuning, and what others have in the folders that it would have used."""
    with Child(home, name="") as store:
        name = store.http.get("/v1/status")["store"]
    (home / "disk").mkdir()
    (home / "disk" / "other").write_text("")
    (home / "state" / "http").unlink()  # as the next child does
    before = set(home.rglob("*"))
    refused(
        home, name="", disk={"path": str(home / "disk")}, http={"port": 0, "certificate_file": "n", "key_file": "n"}
    )
    assert set(home.rglob("*")) == before
    with Child(home, name="") as again:
        assert again.http.get("/v1/status")["store"] == name


@pytest.mark.parametrize("place", ["state_dir", "disk"])
def test_a_store_that_cannot_start_leaves_a_link_that_leads_nowhere(home, place):
    """To a disk that is not mounted yet: without it the next start would take a new folder in its place."""
    link = home / "link"
    link.symlink_to(home / "away")
    told = refused(home, **({"disk": {"path": str(link)}} if place == "disk" else {place: str(link)}))
    assert f"{link}: is there, and is no directory" in told
    assert link.is_symlink()


def test_memory_returns_to_the_machine_across_processes(home):
    """A smaller tuning unmaps segments in store and engine; the killed store's memory goes with its last engine."""
    with Child(home) as store, Engine(store.socket) as engine:
        eventually(store.has_memory)
        engine.put(chain("k", 64))
        engine.get(chain("k", 64))
        assert mapped(store.process.pid) == mapped() == 4 + 1  # and the index
        store.http.retune(tiers__dram__capacity_bytes=8 * STRIDE)
        eventually(lambda: mapped(store.process.pid) == mapped() == 1 + 1)
        store.kill()
        eventually(lambda: mapped() == 0)


# -- a full disk


def test_a_full_disk_costs_chunks_and_nothing_else(home):
    """Writes to it fail, engines do not notice, what is there is read; the tier is not dead for ever."""
    limit = 24 * STRIDE  # of any file: the disk's slab is larger, a segment of memory is not
    disk = {"path": str(home / "disk"), "capacity": 256 * STRIDE}
    with Child(home, first=limited("RLIMIT_FSIZE", limit), disk=disk) as store, Engine(store.socket) as engine:
        eventually(store.has_memory)
        store.http.retune(tiers__disk__write="commit")
        for start in range(0, 120, 10):
            assert engine.put(chain("k", 120)[start : start + 10]) == [""] * 10
            eventually(lambda: store.http.total("write_behind_queued", tier="disk") == 0)
        assert store.http.total("tier_errors_total", tier="disk", operation="write") > 0
        assert engine.get(chain("k", 120)[-10:]) == 10
        assert store.http.total("internal_errors_total") == 0


# -- sockets


def test_a_flood_of_connections_leaves_the_store_able_to_serve(home):
    """More than it has descriptors for: it refuses some, says so, and serves when they are gone."""
    with Child(home, first=limited("RLIMIT_NOFILE", 80)) as store:
        flood = []
        for _ in range(120):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(str(store.socket))
            flood.append(sock)
        eventually(lambda: "could not be accepted" in store.log.read_text())
        for sock in flood:
            sock.close()
        with Engine(store.socket, connect_s=10) as engine:
            assert engine.connected
            assert engine.put([b"key"]) == [""]
            assert engine.client.write
            assert payload(b"key").size == engine.chunk_bytes
