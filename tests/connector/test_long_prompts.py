"""Lookups of prompts of thousands of chunks: to use and to count these takes milliseconds, which are not others'."""

import threading
from unittest.mock import Mock

import pytest

from connector.stores import CHUNK_TOKENS, Engine, chain, eventually, no_more_threads, pool
from tiertune_connector.counters import Counters
from tiertune_connector.protocol.messages import Own, Side
from tiertune_connector.sampling.observer import Observer
from tiertune_connector.serve.waiters import Waiters
from tiertune_connector.store import lookups

LOOKED_UP = "tier_lookup_tokens_total"


def test_who_looks_up_a_long_prompt_holds_up_nobody(store, engine, monkeypatch):
    """It has its answer, and others have theirs, while it is counted."""
    counting, go_on, seen = threading.Event(), threading.Event(), Observer.seen

    def slow(observer, session, keys, *rest):
        if len(keys) > 2000:
            counting.set()
            go_on.wait(30)
        seen(observer, session, keys, *rest)

    monkeypatch.setattr(Observer, "seen", slow)
    with Engine(store, name="engine-1") as other:
        try:
            assert engine.find(chain("long", 2001)) == []
            assert counting.wait(10)
            assert other.find(chain("short", 2)) == []
            assert engine.find(chain("short", 2)) == []
        finally:
            go_on.set()


@pytest.mark.parametrize("at_once", [3, 1024])
def test_a_long_prompt_is_counted_and_used_in_steps_as_at_once(store, engine, http, monkeypatch, at_once):
    """Whatever was found where, and its head leaves last."""
    monkeypatch.setattr(lookups, "AT_ONCE", at_once)
    keys, side = chain("k", 11), chain("side", 5)
    with Engine(store, name="engine-1") as other:
        other.put_all(keys[:4])
        engine.put_all(keys[4:8])
        engine.put_all([*side, *chain("younger", 1)])
        asked = {"prompt_tokens": 11 * CHUNK_TOKENS, "sides": [Side(side, CHUNK_TOKENS, 1)]}
        assert engine.client.lookup("r", keys, **asked).result(10).tiers == ["dram"] * 8
    eventually(lambda: http.total(LOOKED_UP, tier="dram") == 11 * CHUNK_TOKENS)
    assert http.total(LOOKED_UP, tier="dram", result="miss") == 3 * CHUNK_TOKENS
    told = {origin: http.total(LOOKED_UP, tier="dram", result="hit", origin=origin) for origin in ("self", "same_host")}
    assert told == {"self": 4 * CHUNK_TOKENS, "same_host": 4 * CHUNK_TOKENS}
    used = [*chain("younger", 1), *reversed(side), *reversed(keys[:8])]
    assert list(pool(store).pool) == used


def test_what_an_engine_had_of_a_long_prompt_is_counted_though_it_tells_both_at_once(store, engine, http, monkeypatch):
    """It has looked for it itself, and told nothing before."""
    monkeypatch.setattr(lookups, "AT_ONCE", 3)
    keys = chain("k", 8)
    engine.put_all(keys)
    eventually(lambda: engine.client.find(keys)[0])
    engine.heard()
    with store.store.dram.lock:  # nobody could answer
        found = engine.client.lookup("r", keys, prompt_tokens=8 * CHUNK_TOKENS, defer=True).result(0)
        engine.client.tell(Own("r", 2, 1))
    assert found.tiers == ["dram"] * 8
    engine.heard()
    hits = {tier: http.total(LOOKED_UP, tier=tier, result="hit") for tier in ("gpu", "staging", "dram")}
    assert hits == {"gpu": 2 * CHUNK_TOKENS, "staging": CHUNK_TOKENS, "dram": 5 * CHUNK_TOKENS}


def test_no_more_of_them_wait_to_be_counted_than_are_bounded():
    """Who looks them up faster than they are counted has one counted at once: they take megabytes."""
    waiters, go_on, here = Waiters(Counters()), threading.Event(), list[threading.Thread]()
    for _ in range(8):
        waiters.later(Mock(), lambda: go_on.wait(30))
    waiters.later(Mock(), lambda: here.append(threading.current_thread()))
    assert here == [threading.current_thread()]
    go_on.set()
    eventually(lambda: waiters._room._value == 8)
    done = threading.Event()
    waiters.later(Mock(), done.set)
    assert done.wait(10)
    waiters.close()


def test_where_no_more_threads_can_be_had_they_are_counted_all_the_same(monkeypatch):
    """One after another; each takes room meanwhile, and gives it back."""
    waiters, counted = Waiters(Counters()), list[str]()
    no_more_threads(monkeypatch)
    waiters.later(Mock(), lambda: counted.append("first"))
    waiters.later(Mock(), lambda: counted.append("second"))
    eventually(lambda: waiters._room._value == 8)
    assert counted == ["first", "second"]
    waiters.close()
