"""A store process whose Redis is spoilt in every way that a test can: away, stopped, killed, full, read-only, cut off.

Deadlines are held by all but a few of some hundred calls: on a busy machine the kernel alone makes some wait longer.
What took long while a processor was away (`stalls`) does not count.
"""

import contextlib
import random
import re
import time
from itertools import count
from types import SimpleNamespace

import pytest
import redis as library

from connector.stores import STRIDE, Engine, amid, at_best, chain, eventually, short_folder
from e2e.relay import relay
from e2e.servers import redis_server, wait_until
from e2e.stalls import stalls, timed
from e2e.store_child import Child, stopped
from tiertune_agent.demo.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.real]
TIMEOUT_S, PROBE_S, DEADLINE_S, MARGIN_S = 0.3, 1.0, 0.2, 0.05
FEW = 0.03
"""Of calls, those that may be late for want of a processor."""


def remote(port, probe_s=PROBE_S):
    return {"url": f"redis://127.0.0.1:{port}/0", "timeout": TIMEOUT_S, "probe_every": probe_s}


def calls(store, *turns):
    """Engines, one for each of ``turns``, which call ``turn(engine, number)`` again and again until the block ends."""

    def play(player, stop):
        with Engine(store.socket, name=f"client-{player}") as engine:
            for number in count():
                if stop.is_set():
                    return
                turns[player](engine, number)

    return amid(play, len(turns))


def late(spans, bound_s, stood):
    """The share that took longer, of the calls during which no processor was away."""
    free = [ended - started for started, ended in spans if not stood.during(started, ended)]
    return sum(each > bound_s for each in free) / max(1, len(free))


def median(spans):
    return sorted(ended - started for started, ended in spans)[len(spans) // 2]


def errors(store, reason):
    return store.http.total("tier_errors_total", tier="remote", reason=reason)


def used_again(store, engine, keys):
    """Whether chunks that are offered now are found in the remote afterwards."""
    engine.put(keys)
    engine.find(keys)
    eventually(lambda: store.idle("remote"))
    store.empty()
    return engine.get(keys) == len(keys)


class Traffic:
    """What four engines call, and when: of DRAM, of the disk, of what nobody has, and of what only Redis has."""

    def __init__(self, store, engine):
        self.on_disk = [chain(f"disk-{number}", 2) for number in range(300)]
        self.away, self.hot = chain("remote", 12), chain("hot", 6)
        store.http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        for start in range(0, 300, 20):
            engine.put([key for keys in self.on_disk[start : start + 20] for key in keys])
            eventually(lambda: store.idle("disk"))
        store.http.retune(tiers__disk__write="off", tiers__remote__write="commit")
        store.leave_in_remote(engine, self.away)
        engine.put(self.hot)
        held = engine.load(self.hot, deadline_s=120)  # pinned: what the disk brings takes no room of theirs
        assert held.outcomes == ["hit"] * len(self.hot)
        self.hung = False
        kinds = ("dram", "disk", "lookup", "load")
        self.took = {(what, when): [] for what in kinds for when in (False, True)}
        """Beginning and end of each call, by what it was and whether Redis was stopped all the while."""

    def note(self, what, call):
        was, started = self.hung, time.monotonic()
        result = call()
        if was == self.hung:
            self.took[what, was].append((started, time.monotonic()))
        return result

    def from_dram(self, engine, _number):
        assert self.note("dram", lambda: engine.get(self.hot)) == len(self.hot)

    def from_disk(self, engine, number):
        self.note("disk", lambda: engine.get(self.on_disk[number % 300]))

    def unknown(self, engine, _number):
        self.note("lookup", lambda: engine.find(chain(f"new-{random.random()}", 4)))

    def far(self, engine, number):
        self.note("load", lambda: engine.load([self.away[number % 12]], deadline_s=DEADLINE_S))
        engine.find(self.hot)


@pytest.fixture(scope="module")
def outage():
    """A Redis that is stopped amid traffic and goes on: all calls, and what the store told of it."""
    with (
        short_folder() as home,
        redis_server() as redis,
        Child(home, disk={"path": str(home / "disk"), "capacity": 1024 * STRIDE}, remote=remote(redis.port)) as store,
        Engine(store.socket, name="setup") as engine,
    ):
        traffic, met = Traffic(store, engine), SimpleNamespace()
        turns = (traffic.from_dram, traffic.from_disk, traffic.unknown, traffic.far)
        with stalls() as met.stood, calls(store, *turns):
            eventually(lambda: len(traffic.took["disk", False]) > 150, 60)
            with stopped(redis.process):
                traffic.hung = True
                met.told_s, met.told = met.stood.timed(lambda: eventually(lambda: _unwell(store)))
                store.await_health("remote", "dead")
                eventually(lambda: len(traffic.took["disk", True]) > 100, 60)
                traffic.hung = False
            met.recovered_s, _ = met.stood.timed(lambda: store.await_health("remote", "ok"))
        met.took = traffic.took
        met.found = eventually(lambda: len(found := engine.find(traffic.away)) == len(traffic.away) and found)
        met.internal_errors = store.http.total("internal_errors_total")
        return met


def test_health_tells_of_a_stopped_redis_and_of_its_return(outage):
    """Within 2 s that it does not answer in time, and within 5 s that it does again."""
    assert outage.told_s < 2.0
    state, reason = outage.told
    assert (state in ("slow", "dead"), "timeout" in reason) == (True, True)
    assert outage.recovered_s < 5.0


def test_nothing_waits_for_a_stopped_redis_beyond_its_deadline(outage):
    """Neither lookups of what nobody has, nor loads of what only Redis has."""
    assert late(outage.took["lookup", True], TIMEOUT_S + MARGIN_S, outage.stood) <= FEW
    assert late(outage.took["load", True], DEADLINE_S + MARGIN_S, outage.stood) <= FEW


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_other_tiers_are_as_fast_while_redis_is_stopped(outage, tier):
    """Twice is noise of the machine; a wait for Redis would be hundreds of times."""
    took = outage.took
    assert median(took[tier, True]) < 2 * median(took[tier, False]) + 0.001
    assert late(took[tier, True], TIMEOUT_S, outage.stood) <= FEW


def test_what_a_stopped_redis_held_is_found_when_it_goes_on(outage):
    """All of it, unless it is in DRAM by now, and no thread of the store failed."""
    assert set(outage.found) <= {"remote", "dram"}
    assert outage.internal_errors == 0


def test_a_store_whose_redis_is_away_starts_serves_and_uses_it_when_it_comes(home):
    """It says so meanwhile; within a probe period of its coming chunks are written and read there."""
    port = free_port()
    started = time.monotonic()
    with stalls() as stood, Child(home, remote=remote(port)) as store, Engine(store.socket) as engine:
        ended = time.monotonic()
        assert ended - started - stood.seconds(started, ended) < 10
        store.await_health("remote", "dead")
        assert "remote: dead: " in store.http.text("/healthz")
        keys = chain("k", 5)
        engine.put_all(keys)

        def without():
            started = time.monotonic()
            assert engine.get(keys) == 5
            assert engine.find(chain("nowhere", 5)) == []
            return time.monotonic() - started

        assert at_best(without, TIMEOUT_S)
        with redis_server(port=port):
            took, _ = stood.timed(lambda: store.await_health("remote", "ok"))
            assert took < PROBE_S + 1.0
            assert store.http.text("/healthz") == "ok\n"
            engine.find(keys)
            eventually(lambda: store.http.total("tier_transfer_bytes_total", tier="remote", operation="write") > 0)
            store.leave_in_remote(engine, keys)
            eventually(lambda: engine.get(keys) == 5)


def test_a_store_with_a_hung_redis_ends_in_time(home):
    """A tier that does not answer does not keep the process."""
    with redis_server() as redis, Child(home, remote=remote(redis.port)) as store:
        with Engine(store.socket) as engine:
            eventually(store.has_memory)
            with stopped(redis.process):
                engine.put(chain("k", 40))
                future = engine.client.load(chain("gone", 10), deadline_s=60)
                store.process.terminate()
                assert store.process.wait(12) == 0
                assert set(future.result(5).outcomes) <= {"error", "miss", "late"}
        assert "Traceback" not in store.log.read_text()


def test_a_redis_that_goes_on_is_used_again_within_seconds_by_default(home):
    """Not at the next of the regular probes, which are half a minute apart."""
    with redis_server() as redis, Child(home, remote={"url": redis.url}) as store, Engine(store.socket) as engine:
        store.await_health("remote", "ok")
        with stopped(redis.process):
            while store.health("remote") != "dead":
                engine.find(chain(f"n{random.random()}", 2))
        seconds, _ = timed(lambda: store.await_health("remote", "ok", 60))
        assert seconds < 5.0


@pytest.mark.parametrize("what", ["lookups", "loads"])
def test_a_load_from_disk_ends_in_time_however_many_wait_for_redis(home, what):
    """They wait on threads of their own: more than those are, none of them delays it."""
    with (
        redis_server() as redis,
        Child(home, disk={"path": str(home / "disk"), "capacity": 1 << 22},
              remote=remote(redis.port) | {"timeout": 1.0}) as store,
        Engine(store.socket) as engine,
    ):  # fmt: skip
        eventually(store.has_memory)
        store.await_health("remote", "ok")
        store.http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        keys = chain("disk", 4)
        engine.put(keys)
        eventually(lambda: store.idle("disk"))
        store.empty()

        def beside():
            far = [chain(f"n{random.random()}-{each}", 1) for each in range(40)]
            store.empty()
            store.await_health("remote", "ok")
            with stopped(redis.process):
                if what == "lookups":
                    waiting = [engine.client.lookup("r", each, prompt_tokens=16) for each in far]
                else:
                    waiting = [engine.client.load(each, deadline_s=1.0) for each in far]
                seconds, loaded = timed(lambda: engine.load(keys, deadline_s=DEADLINE_S))
                for future in waiting:
                    future.result(10)
            return seconds if loaded.outcomes == ["hit"] * 4 else 10.0

        assert at_best(beside, DEADLINE_S + MARGIN_S)


def _unwell(store):
    state, reason = store.told("remote")
    return (state, reason) if state != "ok" else None


WHY = {"killed": "Connection", "swallowed": "", "no password": "Authentication required."}


@pytest.mark.parametrize("fault", ["killed", "swallowed", "no password"])
def test_a_redis_that_cannot_be_asked_is_missed_and_comes_back(home, fault):
    """Misses in time and counted by reason, chunks of DRAM as ever; it is used again by itself, whole or empty."""
    reason = "timeout" if fault == "swallowed" else "error"
    port = free_port()
    with (
        contextlib.ExitStack() as servers,
        relay(port) as way,
    ):
        server = servers.enter_context(redis_server(port=port))
        with Child(home, remote=remote(way.port)) as store, Engine(store.socket) as engine:
            keys, near = chain("k", 8), chain("near", 4)
            store.leave_in_remote(engine, keys)
            engine.put(near)
            before = errors(store, reason)
            with contextlib.ExitStack() as spoilt:
                stood = spoilt.enter_context(stalls())
                if fault == "killed":
                    server.process.kill()
                    server.process.wait()
                    way.drop()
                elif fault == "swallowed":
                    spoilt.enter_context(way.swallowing())
                else:
                    raw = spoilt.enter_context(library.Redis(port=port))
                    raw.config_set("requirepass", "secret")
                    way.drop()
                    spoilt.callback(lambda: library.Redis(port=port, password="secret").config_set("requirepass", ""))
                while store.health("remote") != "dead":
                    took_s, loaded = stood.timed(lambda: engine.load(keys, deadline_s=DEADLINE_S))
                    assert set(loaded.outcomes) <= {"late", "error", "miss"}
                    assert took_s < DEADLINE_S + 0.3
                    assert engine.find(chain(f"new-{random.random()}", 2)) == []
                assert errors(store, reason) > before
                assert "in a row ended in " + reason in store.told("remote")[1]
                assert WHY[fault] in store.told("remote")[1]
                assert (engine.find(keys), engine.load(keys).outcomes) == ([], ["miss"] * 8)
                assert engine.get(near) == 4
            if fault == "killed":
                servers.enter_context(redis_server(port=port))
            store.await_health("remote", "ok")
            left = 0 if fault == "killed" else 8
            eventually(lambda: engine.find(keys) == ["remote"] * left)  # connections of before fail once
            eventually(lambda: engine.get(keys) == left)
            eventually(lambda: used_again(store, engine, keys), 30)
            assert store.http.total("internal_errors_total") == 0


def test_a_replica_is_read_and_not_written_until_it_is_a_master(home):
    """What it has is served; what it refuses is counted, and tells of it; promoted, it is written by itself."""
    with (
        redis_server() as master,
        redis_server(options=["--replicaof", f"127.0.0.1 {master.port}"]) as replica,
        Child(home, remote=remote(replica.port)) as store,
        Engine(store.socket) as engine,
        library.Redis(port=replica.port) as raw,
    ):
        wait_until(lambda: raw.info("replication").get("master_link_status") == "up", "the replica is in step")
        keys = chain("k", 8)
        engine.put(keys)
        engine.find(keys)
        eventually(lambda: errors(store, "error") > 0)
        eventually(lambda: "error: READONLY" in store.told("remote")[1])
        assert engine.get(keys) == 8, "DRAM serves"
        assert raw.keys(b"tiertune:*") == []
        raw.replicaof("NO", "ONE")
        store.await_health("remote", "ok")
        eventually(lambda: used_again(store, engine, chain("after", 4)))


def test_a_full_redis_that_refuses_is_told_and_used_again_when_it_has_room(home):
    """What it has is read, writes are dropped as full; nobody has to restart anything."""
    with (
        redis_server(maxmemory="4mb", policy="noeviction") as redis,
        Child(home, remote=remote(redis.port)) as store,
        Engine(store.socket) as engine,
        library.Redis(port=redis.port) as raw,
    ):
        store.await_health("remote", "ok")
        keys = chain("k", 8)
        store.leave_in_remote(engine, keys)
        raw.config_set("maxmemory", 1 << 20)  # below what it holds
        engine.put(chain("more", 8))
        eventually(lambda: store.http.total("write_behind_dropped_total", tier="remote", reason="full") >= 8)
        found_full = re.compile(r"slow: full: \d+ writes in a row found no room")
        eventually(lambda: found_full.fullmatch(": ".join(store.told("remote"))))
        assert "remote: slow: full: " in store.http.text("/healthz")
        eventually(lambda: engine.get(keys) == 8)
        assert engine.find(chain("more", 8)) == ["dram"] * 8
        raw.config_set("maxmemory", 64 << 20)
        eventually(lambda: used_again(store, engine, chain("last", 8)), 30)
        store.await_health("remote", "ok")
        assert not list(raw.scan_iter(b"tiertune:writing:*"))
