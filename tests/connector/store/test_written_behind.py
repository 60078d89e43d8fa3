"""What goes from DRAM to slower tiers, when, and what becomes of it there."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from connector.store.serving import evict_all, held, in_remote, joined, serving, used, written
from connector.stores import CHUNK_TOKENS, STRIDE, chain, eventually
from tiertune_connector.counters import Counters
from tiertune_connector.protocol.messages import Own
from tiertune_connector.serve.server import Server
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier

pytestmark = pytest.mark.slow


def looked_ahead(store, monkeypatch):
    """Waits, when called, until the store has looked at what is about to leave as it is by then."""
    rounds, clean_ahead = [], store.store.behind.clean_ahead
    monkeypatch.setattr(store.store.behind, "clean_ahead", lambda: rounds.append(clean_ahead()))

    def wait():
        was = len(rounds)
        eventually(lambda: len(rounds) > was + 1)  # one that began after this

    return wait


def test_prompts_leave_to_an_idle_disk_as_wholes(home, remote, monkeypatch):
    """In mode evict, prompts of an eighth of DRAM, one after another: none has lost a chunk, and none is counted."""
    with used(home, remote, disk="16MiB", dram=256 * STRIDE) as (store, engine, http):
        http.retune(tiers__disk__write="evict", tiers__remote__write="off")
        looks = looked_ahead(store, monkeypatch)
        chains = [chain(f"k{number}", 32) for number in range(14)]
        for keys in chains:
            engine.put(keys)
            looks()
            written(store)
        assert http.total("tier_evictions_total", tier="dram") == 14 * 32 - 256
        assert [len(engine.find(keys)) for keys in chains] == [32] * 14
        assert http.total("write_behind_dropped_total") == 0


def test_upkeep_comes_soon_while_a_queue_drains_quickly(store, engine, monkeypatch):
    """In 5 ms instead of 50; and as ever after a step that failed."""
    steps = []
    monkeypatch.setattr(store.store.pools, "settle", lambda: False)
    for drains in (True, False):
        monkeypatch.setattr(store.store.behind, "clean_ahead", lambda told=drains: told)
        steps.append(store.server._step())
    steps += [OSError("it failed"), 0.0]
    waits = []
    stopping = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or len(waits) == 5)
    one = SimpleNamespace(
        _stopping=stopping, _step=Mock(side_effect=steps), store=Mock(), counters=Counters(), sessions=list
    )
    Server._upkeep(one)
    assert waits == [0.05, 0.005, 0.05, 0.05, 0.0]


def test_what_leaves_before_its_turn_is_counted(home, remote, monkeypatch):
    """By tier, whether room was made for other chunks or the capacity fell; what is on disk already is none of it."""
    with used(home, remote, disk="4MiB", dram=16 * STRIDE) as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        there = chain("there", 4)
        engine.put(there)
        written(store)
        monkeypatch.setattr(store.store.behind, "clean_ahead", lambda _: None)
        http.retune(tiers__disk__write="evict")
        engine.put(chain("a", 12))
        engine.put(chain("b", 10))
        assert http.total("write_behind_dropped_total", tier="disk", reason="evicted") == 10 - len(there)
        evict_all(http)
        assert http.total("write_behind_dropped_total", tier="disk", reason="evicted") == 22
        assert http.total("write_behind_dropped_total") == 22


def test_what_a_tier_lost_is_written_there_again(home, remote, monkeypatch):
    """A remote that came back empty, and a disk that had no room for a while, have again what DRAM serves."""
    with used(home, remote, disk="4MiB") as (store, engine, http):
        keys = chain("k", 10)
        http.retune(tiers__disk__write="commit", tiers__remote__write="commit")
        engine.put(keys)
        written(store)
        size = http.get("/v1/tuning")["tiers"]["disk"]["capacity_bytes"]
        remote.flush()
        http.retune(tiers__disk__capacity_bytes=0)
        eventually(lambda: store.store.disk.usage().chunks == 0)
        http.retune(tiers__disk__capacity_bytes=size)
        eventually(lambda: http.total("tier_capacity_bytes", tier="disk", state="effective") > 0)
        engine.find(keys)
        written(store)
        assert (held(remote), store.store.disk.usage().chunks) == (0, 0), "written only now"
        monkeypatch.setattr("tiertune_connector.slower.behind.BELIEVED_S", 0.0)  # that time has passed
        engine.find(keys)
        eventually(lambda: in_remote(remote, keys) and store.store.disk.usage().chunks == 10)


def test_second_access_admits_what_is_used_again(remote, store, engine, http):
    """A chunk that nobody asks for twice is not written; a lookup, or a hit in the engine's own memory, is a use."""
    http.retune(admission__remote="second_access")
    once, again, own = chain("once", 3), chain("again", 3), chain("own", 3)
    for keys in (once, again, own):
        engine.put(keys)
    assert held(remote) == 0
    engine.find(again)
    engine.client.lookup("r", own, prompt_tokens=3 * CHUNK_TOKENS, defer=True).result(10)
    engine.client.tell(Own("r", 3, 0))
    eventually(lambda: in_remote(remote, again) and in_remote(remote, own))
    assert held(remote) == 6


def test_a_full_queue_drops_counts_and_is_caught_up_later(remote, store, engine, http):
    """A slow remote takes at most a share of DRAM; what was dropped is written at its next use."""
    free = threading.Event()
    remote.fault = lambda operation: free.wait(30) and None if operation == "write" else None
    keys = chain("k", 60)
    engine.put_all(keys)
    dropped = http.total("write_behind_dropped_total", tier="remote", reason="queue_full")
    assert dropped > 0
    assert engine.put(chain("more", 20)).count("") == 20, "the pool is not full of pins"
    free.set()
    eventually(lambda: store.store.lanes["remote"].writers.queued() == 0)
    present = [key for key in keys if engine.find([key]) == ["dram"]]
    eventually(lambda: in_remote(remote, present))


@pytest.mark.parametrize("first", ["disk", "remote"])
def test_two_slow_tiers_leave_room_in_dram_too(home, remote, monkeypatch, first):
    """Also where each keeps other chunks waiting: one stood still while the other went on, and then both do."""
    goes_on, write = {name: threading.Event() for name in ("disk", "remote")}, DiskTier.write
    goes_on["remote"].set()  # for its probe
    monkeypatch.setattr(DiskTier, "write", lambda *given: goes_on["disk"].wait(30) and write(*given))
    remote.fault = lambda operation: None if operation != "write" or goes_on["remote"].wait(30) else Outcome.ERROR
    with used(home, remote, disk="16MiB", dram=64 * STRIDE) as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="commit")
        (other,) = {"disk", "remote"} - {first}
        goes_on[first].clear()
        goes_on[other].set()
        for number in range(20):
            engine.put(chain(f"a{number}", 4))
        eventually(lambda: store.store.lanes[other].writers.queued() == 0)
        goes_on[other].clear()
        for number in range(20):
            engine.put(chain(f"b{number}", 4))
        assert engine.put(chain("more", 20)).count("") == 20, "the pool is not full of pins"
        for each in goes_on.values():
            each.set()
        written(store)


def test_a_chunk_that_could_not_be_written_is_tried_again(remote, store, engine, http):
    """At its next use; the failure is counted."""
    remote.fault = lambda operation: Outcome.FULL if operation == "write" else None
    keys = chain("k", 2)
    engine.put(keys)
    eventually(lambda: http.total("write_behind_dropped_total", tier="remote", reason="full") == 2)
    remote.fault = lambda _: None
    eventually(lambda: engine.find(keys) and in_remote(remote, keys))


@pytest.mark.parametrize("mode", ["commit", "evict"])
def test_a_chunk_that_is_dropped_is_counted_once(home, remote, mode):
    """It waited when the remote died, and leaves DRAM while that is dead: it is one chunk that was not written."""
    free = threading.Event()
    with used(home, remote, dram=16 * STRIDE) as (store, engine, http):
        http.retune(tiers__remote__write=mode)
        lane = store.store.lanes["remote"]
        remote.fault = lambda operation: free.wait(30) and Outcome.ERROR if operation == "write" else None
        engine.put_all(chain("k", 16))  # DRAM is full: in either mode some are to be written now
        eventually(lane.writers.queued)
        for _ in range(20):
            lane.record(Outcome.ERROR)
        assert lane.breaker.open
        free.set()
        written(store)
        evict_all(http)
        assert http.total("write_behind_dropped_total", tier="remote") == 16


def test_disk_takes_what_leaves_dram(home, remote):
    """Chunks come back from disk, also after a restart of the store; a chunk goes there once."""
    more = {"disk": "4MiB", "dram": 16 * STRIDE}
    keys = chain("k", 30)
    with used(home, remote, **more) as (store, engine, http):
        http.retune(tiers__disk__write="commit", tiers__remote__write="off")
        for start in range(0, 30, 5):
            engine.put(keys[start : start + 5])
            eventually(lambda: store.store.lanes["disk"].writers.queued() == 0)
        assert set(engine.find(keys)) == {"dram", "disk"}
        assert engine.get(keys[:10]) == 10
    with serving(home, remote, **more) as store, joined(store) as engine:
        assert engine.find(keys) == ["disk"] * 30
        for start in range(0, 30, 10):
            assert engine.get(keys[start : start + 10]) == 10
    assert held(remote) == 0
