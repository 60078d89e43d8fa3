"""Faults of a store process's Redis: away, hung, killed, shared."""

import time
from typing import Any

import pytest

from connector.stores import NAMESPACE, PATIENCE_S, Engine, at_best, chain, eventually
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
