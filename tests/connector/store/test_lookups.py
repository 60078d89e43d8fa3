"""Lookups of a store whose remote is slow to answer."""

import time

import pytest

from connector.lanes import Gate
from connector.store.serving import put_remote, used
from connector.stores import CHUNK_TOKENS, chain, eventually, no_more_threads
from tiertune_connector.protocol.messages import Lookup, Own, Side


def test_what_the_remote_has_not_told_by_the_deadline_is_not_waited_for(remote, store, engine, http):
    """What DRAM has is found in time all the same, by the chain and by the other groups; without one all is waited for.

    The remote is well: it only takes longer than the engine waits.
    """
    keys, window = chain("r", 6), chain("window", 6)
    assert engine.put(keys[:3]) == engine.put(window[:3]) == [""] * 3
    gate = remote.fault = Gate("present")
    asked = {"prompt_tokens": 6 * CHUNK_TOKENS, "sides": [Side(window, CHUNK_TOKENS, 1)]}
    started = time.monotonic()
    found = engine.client.lookup("a", keys, **asked, deadline_s=1.0).result(30)
    assert (found.tiers, found.reason) == (["dram"] * 3, "")
    assert time.monotonic() - started < 10, "the lane's patience is 30"
    waiting = engine.client.lookup("b", keys, **asked)
    eventually(lambda: gate.entered == 2)
    assert not waiting.done()
    gate.open()
    assert waiting.result(30).tiers == ["dram"] * 3
    assert store.store.health.told("remote") == ("ok", "")
    assert http.total("tier_errors_total", tier="remote", operation="present", reason="late") == 1


def test_what_left_before_it_was_counted_is_still_its_engine_s(engine, http):
    """A request may wait for its turn for long: what it found has an engine, whatever was evicted meanwhile."""
    keys = chain("r", 4)
    engine.put_all(keys)
    asked = {"prompt_tokens": 4 * CHUNK_TOKENS, "defer": True}
    assert engine.client.lookup("a", keys, **asked).result(30).tiers == ["dram"] * 4
    engine.heard()
    assert http.post("/v1/flush", {}).status_code == 200
    engine.client.tell(Own("a", 0, 0))
    engine.heard()
    assert http.total("tier_lookup_tokens_total", tier="dram", result="hit", origin="self") == 4 * CHUNK_TOKENS
    assert http.total("tier_lookup_tokens_total", origin="same_host") == 0


def test_what_an_engine_has_itself_counts_also_while_the_store_is_bypassed(engine, http):
    """Its prompts count, too: a share of them would tell that its own memory finds nothing."""
    assert http.post("/v1/bypass", {"on": True}).status_code == 200
    found = engine.client.lookup("a", chain("r", 6), prompt_tokens=6 * CHUNK_TOKENS, defer=True).result(30)
    engine.client.tell(Own("a", 3, 1))
    engine.heard()
    assert (found.tiers, found.reason) == ([], "bypassed")
    assert http.total("prompt_tokens_total") == 6 * CHUNK_TOKENS
    hits = {tier: http.total("tier_lookup_tokens_total", tier=tier, result="hit") for tier in ("gpu", "staging")}
    assert hits == {"gpu": 3 * CHUNK_TOKENS, "staging": CHUNK_TOKENS}
    assert (
        http.total("tier_lookup_tokens_total", tier="dram")
        == http.total("tier_lookup_tokens_total", tier="remote")
        == 0
    )


@pytest.mark.parametrize(("left_s", "wait"), [(-0.5, True), (1.0, False)], ids=["too late", "not to wait"])
def test_a_lookup_that_cannot_wait_does_not_ask_the_remote(remote, store, engine, left_s, wait):
    """Its deadline has passed, or it is on the thread that serves all: what DRAM has is told at once."""
    keys = chain("r", 6)
    engine.put_all(keys[:3])
    gate = remote.fault = Gate("present")
    (session,) = store.server.sessions()
    asked = Lookup(1, "a", keys, 6 * CHUNK_TOKENS, b"", [], deadline_s=1.0)
    until = time.monotonic() + left_s
    assert store.store.lookups.lookup(session, asked, until, wait=wait).tiers == ["dram"] * 3
    assert gate.entered == 0


def test_where_no_more_threads_can_be_had_a_client_is_served_by_those_there(remote, store, engine, http, monkeypatch):
    """All is found, brought and summed as ever, and nothing is answered twice."""
    here, there = chain("h", 2), chain("t", 2)
    engine.put(here)
    put_remote(remote, there)
    no_more_threads(monkeypatch, named="wait-")
    assert engine.find(here + there) == ["dram"] * 2 + ["remote"] * 2
    loaded = engine.load(here + there)
    assert loaded.outcomes == ["hit"] * 4
    loaded.slots[0].damaged = True
    engine.client.release(loaded)
    eventually(lambda: http.total("tier_pinned_bytes", tier="dram") == 0)
    assert engine.get(here + there) == 4
    engine.heard()
    assert engine.client.errors == 0
    assert http.total("internal_errors_total") == 0


def test_what_a_lookup_found_is_counted_though_its_tier_is_no_longer_asked(remote, store, engine, http):
    """Fetching was switched off, or the remote died, between the answer and the count."""
    keys = chain("r", 6)
    put_remote(remote, keys)
    (session,), lookups = store.server.sessions(), store.store.lookups
    asked = Lookup(1, "a", keys, 6 * CHUNK_TOKENS, b"", [])
    found = lookups.lookup(session, asked, wait=True)
    assert found.tiers == ["remote"] * 6
    assert http.retune(tiers__remote__fetch="off").status_code == 200
    lookups.looked_up(session, asked, found)
    assert http.total("tier_lookup_tokens_total", tier="remote", result="hit") == 6 * CHUNK_TOKENS


def test_a_disk_without_a_capacity_is_not_asked(home, remote):
    """It is off: what disks find is a share of what those are asked that are on."""
    with used(home, remote, disk="4MiB") as (_, engine, http):
        for size, missed in ((4 << 20, 3), (0, 3), (4 << 20, 6)):
            http.retune(tiers__disk__capacity_bytes=size)
            engine.find(chain("nobody's", 3))
            engine.heard()
            assert http.total("tier_lookup_tokens_total", tier="disk", result="miss") == missed * CHUNK_TOKENS
