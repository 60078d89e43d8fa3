"""Faults of a store process's Redis: away, hung, killed, shared."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from connector.stores import NAMESPACE, PATIENCE_S, STRIDE, Engine, amid, at_best, chain, eventually
from e2e.servers import redis_server
from e2e.stalls import stalls
from e2e.store_child import Child, stopped
from tiertune_agent.demo.ports import free_port

pytestmark = pytest.mark.slow
DIGEST = NAMESPACE.digest
TIMEOUT_S = 0.5
PROBE_S = 1.0


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
            store.leave_in_remote(engine, keys)
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
            store.leave_in_remote(engine, chain("after", 5))
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
        store.leave_in_remote(engine, keys)
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
