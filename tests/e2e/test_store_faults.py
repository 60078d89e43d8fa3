"""Faults around a store process: killed, stopped, lied to, its Redis away, hung, restarted, its disk full."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from connector.stores import (
    NAMESPACE,
    PATIENCE_S,
    STRIDE,
    Engine,
    amid,
    at_best,
    chain,
    eventually,
    payload,
)
from e2e.servers import redis_server
from e2e.stalls import stalls
from e2e.store_child import Child, limited, mapped, refused, stopped, victim
from tiertune_agent.demo.ports import free_port

pytestmark = pytest.mark.slow
DIGEST = NAMESPACE.digest
TIMEOUT_S = 0.5
PROBE_S = 1.0

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
    ],
)
def test_a_configuration_that_cannot_work_says_what_to_mend(home, more, message):
    """Status 2, no traceback, nothing left running."""
    told = refused(home, **more)
    assert message in told
    assert "Traceback" not in told


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


# -- Redis


@pytest.fixture
def remote():
    """What the configuration says of a Redis that a test starts and stops."""
    port = free_port()
    return {"url": f"redis://127.0.0.1:{port}/0", "timeout": TIMEOUT_S, "probe_every": PROBE_S}


def until_well(store: Child) -> float:
    """Seconds until the store uses its remote, but for those in which a processor was away."""
    with stalls() as stood:
        started = time.monotonic()
        eventually(lambda: store.health("remote") == "ok")
        ended = time.monotonic()
        return ended - started - stood.seconds(started, ended)


def steady(figure: Callable[[], float], quiet_s: float) -> float:
    """A figure that has stayed the same for so long."""
    told, since = figure(), time.monotonic()

    def quiet() -> bool:
        nonlocal told, since
        if (now := figure()) != told:
            told, since = now, time.monotonic()
        return time.monotonic() - since > quiet_s

    eventually(quiet)
    return told


def leave_in_remote(store: Child, engine: Engine, keys: list[bytes]) -> None:
    """Out of DRAM; what a busy machine did not write or find in time is tried again."""

    def left() -> bool:
        engine.put(keys)
        engine.find(keys)
        eventually(lambda: store.http.total("write_behind_queued", tier="remote") == 0)
        store.empty()
        return engine.find(keys) == ["remote"] * len(keys)

    eventually(left)


def port_of(remote: dict[str, Any]) -> int:
    return int(remote["url"].rsplit(":", 1)[1].split("/")[0])


@pytest.mark.real
def test_a_store_whose_redis_is_away_starts_serves_and_uses_it_when_it_comes(home, remote):
    """It says so meanwhile; within a probe period of its coming chunks are written and read there."""
    started = time.monotonic()
    with Child(home, remote=remote) as store, Engine(store.socket) as engine:
        assert time.monotonic() - started < 10
        eventually(lambda: store.health("remote") == "dead")
        assert "remote: dead: " in store.http.text("/healthz")
        keys = chain("k", 5)
        assert engine.put(keys) == [""] * 5

        def written() -> float:
            return store.http.total("tier_transfer_bytes_total", tier="remote", operation="write")

        def without() -> float:
            started = time.monotonic()
            assert engine.get(keys) == 5
            assert engine.find(chain("nowhere", 5)) == []
            return time.monotonic() - started

        assert at_best(without, TIMEOUT_S)
        with redis_server(port=port_of(remote)):
            took = [until_well(store)]
            assert store.http.text("/healthz") == "ok\n"
            engine.find(keys)
            eventually(lambda: written() > 0)
            leave_in_remote(store, engine, keys)
            eventually(lambda: engine.get(keys) == 5)
        eventually(lambda: store.health("remote") == "dead")
        assert engine.put(chain("after", 5)) == [""] * 5
        assert engine.get(chain("after", 5)) == 5
        with redis_server(port=port_of(remote)):
            took.append(until_well(store))
            assert min(took) < PROBE_S + 1.0
            before = written()
            engine.find(chain("after", 5))
            eventually(lambda: written() > before)
            leave_in_remote(store, engine, chain("after", 5))
            eventually(lambda: engine.get(chain("after", 5)) == 5)


@pytest.mark.real
def test_a_hung_redis_delays_by_its_time_out_and_then_by_nothing(home, remote):
    """Lookups and loads end in time, the breaker opens, writes behind let go of DRAM; afterwards it is used again."""
    with (
        redis_server(port=port_of(remote)) as redis,
        Child(home, remote=remote) as store,
        Engine(store.socket) as engine,
    ):
        eventually(store.has_memory)
        eventually(lambda: store.health("remote") == "ok")
        keys = chain("k", 10)
        leave_in_remote(store, engine, keys)
        with stopped(redis.process), stalls() as stood:

            def in_time(call: Callable[[], Any], bound_s: float) -> Any:
                started = time.monotonic()
                answer, ended = call(), time.monotonic()
                assert ended - started - stood.seconds(started, ended) < bound_s
                return answer

            loaded = in_time(lambda: engine.load(keys, deadline_s=0.2), 0.2 + 0.3)
            assert loaded.outcomes == ["late"] * 10
            for _ in range(4):
                assert in_time(lambda: engine.find(chain("new", 10)), TIMEOUT_S + 0.3) == []
            eventually(lambda: store.health("remote") == "dead")
            asked = steady(lambda: store.asked("remote"), 2 * TIMEOUT_S)  # by then all that was asked has ended
            assert engine.find(keys) == []
            assert engine.load(keys).outcomes == ["miss"] * 10
            eventually(lambda: store.http.total("tier_pinned_bytes", tier="dram") == 0)
            assert engine.put(chain("more", 60)) == [""] * 60
            assert engine.get(chain("more", 60)) == 60
            assert store.asked("remote") == asked, "requests do not ask a dead tier"
            eventually(lambda: store.http.total("tier_pinned_bytes", tier="dram") == 0)
            answer = store.http.post("/v1/flush", {"namespace": "f" * 32})
            assert (answer.status_code, "remote: timeout" in answer.json()["message"]) == (503, True)
        assert until_well(store) < PROBE_S + 2 * TIMEOUT_S + 1.0
        eventually(lambda: engine.find(keys) == ["remote"] * 10)
        eventually(lambda: engine.get(keys) == 10)
        assert store.http.total("internal_errors_total") == 0


@pytest.mark.real
def test_a_store_with_a_hung_redis_ends_in_time(home, remote):
    """A tier that does not answer does not keep the process."""
    with redis_server(port=port_of(remote)) as redis, Child(home, remote=remote) as store:
        with Engine(store.socket) as engine:
            eventually(store.has_memory)
            with stopped(redis.process):
                engine.put(chain("k", 40))
                future = engine.client.load("r", chain("gone", 10), deadline_s=60)
                store.process.terminate()
                assert store.process.wait(12) == 0
                assert set(future.result(5).outcomes) <= {"error", "miss", "late"}
        assert "Traceback" not in store.log.read_text()


@pytest.mark.real
def test_a_redis_killed_again_and_again_amid_traffic(home, remote):
    """Engines read only what was stored, and every request is answered in time."""
    slowest = [0.0]
    with Child(home, remote=remote) as store, stalls() as stood:

        def play(number: int, stop: threading.Event) -> None:
            with Engine(store.socket, name=f"engine-{number}") as engine:
                turn = 0
                while not stop.is_set():
                    keys = chain(f"{number}-{turn % 20}", 6)
                    started = time.monotonic()
                    found = engine.find(keys)
                    have = engine.get(keys[: len(found)], deadline_s=TIMEOUT_S)
                    ended = time.monotonic()
                    slowest[0] = max(slowest[0], ended - started - stood.seconds(started, ended))
                    engine.put(keys[have:])
                    turn += 1

        with amid(play, 3):
            for _ in range(3):
                with redis_server(port=port_of(remote), maxmemory="4mb") as redis:
                    written = store.http.total("tier_transfer_bytes_total", tier="remote", operation="write")
                    eventually(
                        lambda was=written: (
                            store.http.total("tier_transfer_bytes_total", tier="remote", operation="write")
                            > was + 20 * STRIDE
                        ),
                        30,
                    )
                    redis.process.kill()
                    redis.process.wait()
                eventually(lambda: store.health("remote") == "dead", 30)
        assert slowest[0] < 2 * TIMEOUT_S + 2.0
        assert store.http.total("internal_errors_total") == 0
        eventually(lambda: store.http.total("tier_pinned_bytes", tier="dram") == 0)


@pytest.mark.real
def test_two_hosts_share_through_redis(home, remote):
    """What one store's engine wrote the other's reads; a flush on one reaches the shared tier."""
    (home / "a").mkdir()
    (home / "b").mkdir()
    remote["timeout"] = PATIENCE_S  # it always answers
    with (
        redis_server(port=port_of(remote)),
        Child(home / "a", remote=remote, name="gpu-a-eu-west-1-node-01") as one,
        Child(home / "b", remote=remote, name="gpu-a-eu-west-1-node-02") as two,
        Engine(one.socket) as left,
        Engine(two.socket) as right,
    ):
        eventually(lambda: (one.health("remote"), two.health("remote")) == ("ok", "ok"))
        eventually(lambda: one.has_memory() and two.has_memory())  # what waits to be written is a share of it
        keys = chain("k", 10)
        left.put(keys)
        eventually(lambda: right.find(keys) == ["remote"] * 10)
        assert right.get(keys) == 10
        assert right.find(keys) == ["dram"] * 10
        hit = {"tier": "dram", "result": "hit", "origin": "other_host"}
        eventually(lambda: two.http.total("tier_lookup_tokens_total", **hit) == 160)  # counted behind the answer
        assert one.http.post("/v1/flush", {"namespace": DIGEST}).json() == {"dram": 10, "remote": 10}
        assert two.http.post("/v1/flush", {"namespace": DIGEST}).json() == {"dram": 10, "remote": 0}
        assert right.find(keys) == []


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
