"""What goes with a namespace: what was learned of it, its pools, its files; and what brings it back."""

import json

import pytest

from connector.small_store import CHUNKS, NEW, OLD, OTHER, replaced, session_of, slab_files
from connector.stores import (
    CHUNK_TOKENS,
    Engine,
    Http,
    chain,
    counted,
    eventually,
    payload,
    running,
    view,
)
from tiertune_connector.chunk import NOBODY
from tiertune_connector.protocol.messages import Load, Lookup, PrefillLine
from tiertune_connector.sessions.namespaces import LENT_AFTER_S
from tiertune_connector.tiers.base import Evicted, Outcome
from tiertune_connector.tiers.segment import PAGE

pytestmark = pytest.mark.slow


def learned(served):
    """Namespaces of which the store tells totals, and those of which it has ghosts."""
    header, _ = served.store.observer.read(0)
    return set(header["namespaces"]), {labels[3] for _, labels, _ in served.store.observer.rows()}


def test_what_was_learned_of_a_namespace_goes_with_its_last_pool(served):
    """Each revision of the weights is another one: what they leave must not add up."""
    first = served.join(OLD)
    second = served.join(NEW)
    for session in (first, second):
        served.store.observer.seen(session, chain("k", 3), 48)
    both = {OLD.digest, NEW.digest}
    assert learned(served) == (both, both)
    served.leave(first)
    assert served.held(OLD) == [None, None]
    served.store.forget()
    assert learned(served) == (both, both), "engines that only start anew go on with their ghosts"
    served.clock.now += LENT_AFTER_S
    served.store.forget()
    served.store.observer.prefill(first, PrefillLine(0.01, 1e-15, 8e9, 32, 4096, 8192))
    served.store.observer.seen(first, chain("late", 3), 48)
    assert learned(served) == ({NEW.digest}, {NEW.digest})
    assert OLD.digest not in served.store.namespaces._used_at
    third = served.join(OLD)
    served.store.observer.seen(third, chain("k", 2), 32)
    assert learned(served) == (both, both)
    assert served.store.observer.read(0)[0]["namespaces"][OLD.digest]["chunks"] == 2
    assert served.store.accounts.pool_labels(OLD.digest) == (OLD.digest, "llama")


def test_what_was_counted_of_a_namespace_stays_for_some_others_after_what_was_learned(served, monkeypatch):
    """Metrics must not grow with each revision of the weights. What a remote evicts later counts for no namespace."""
    monkeypatch.setattr("tiertune_connector.store.tiered.COUNTED", 1)
    old, new, latest = (served.join(each) for each in (OLD, NEW, OTHER))
    asked = {name: ("no", each.digest, "llama") for name, each in (("old", old), ("new", new), ("latest", latest))}
    gone = [Evicted(each.digest, "lru", "room", None, NOBODY) for each in (old, new)]
    for session in (old, new, latest):
        served.store.accounts.prompt(session, 48)
    served.store._evicted("remote", gone)
    served.leave(old, LENT_AFTER_S)
    served.store.forget()
    served.store._evicted("remote", gone)
    assert counted(served.counters, "requests_total") == dict.fromkeys(asked.values(), 1)
    served.leave(latest, LENT_AFTER_S)
    served.store.forget()
    assert counted(served.counters, "requests_total") == dict.fromkeys([asked["new"], asked["latest"]], 1)
    remote = ("remote", "lru", "room")
    assert counted(served.counters, "tier_evictions_total") == {(*remote, NEW.digest, "llama"): 2, (*remote, "", ""): 1}


def test_counts_of_a_namespace_that_came_back_stay(served, monkeypatch):
    """Though others are over since it was."""
    monkeypatch.setattr("tiertune_connector.store.tiered.COUNTED", 1)
    session, other = served.join(OLD), served.join(NEW)
    served.store.accounts.prompt(session, 48)
    served.leave(session, LENT_AFTER_S)
    served.store.forget()
    served.join(OLD)
    served.leave(other, LENT_AFTER_S)
    served.store.forget()
    assert counted(served.counters, "requests_total") == {("no", OLD.digest, "llama"): 1}


def test_what_was_learned_of_a_namespace_that_is_held_stays(served):
    """However long nobody uses it: in DRAM, or on disk alone."""
    first = served.join(OLD)
    served.fill(OLD, 2)
    served.join(NEW)
    served.leave(first, 10 * LENT_AFTER_S)
    served.store.forget()
    assert OLD.digest in learned(served)[0]
    for key in chain("new", CHUNKS):
        assert served.dram.write(NEW.digest, key, view(payload(key, PAGE)), NOBODY) is Outcome.OK
        served.settle()
    assert served.held(OLD) == [None, (2, 2)]
    served.store.forget()
    assert OLD.digest in learned(served)[0]
    served.fill(NEW, CHUNKS)
    assert served.held(OLD) == [None, None]
    served.store.forget()
    assert OLD.digest not in learned(served)[0]


def test_a_namespace_that_is_flushed_when_it_has_lent_its_share_is_forgotten(served):
    """As at once after its last client: else its memory stays taken until others need it, if ever."""
    replaced(served, chunks=CHUNKS // 4)
    assert served.held(OLD) == [(CHUNKS // 4, CHUNKS // 4)] * 2
    served.store.flushes.drop(OLD.digest)
    served.settle()
    assert served.held(OLD) == [None, None]
    assert served.held(NEW) == [(0, CHUNKS)] * 2


def test_a_running_store_lets_go_of_what_it_learned(home, monkeypatch):
    """By itself; neither samples nor metrics tell of the namespace any more."""
    monkeypatch.setattr("tiertune_connector.sessions.namespaces.LENT_AFTER_S", 0.0)

    def told():
        header = json.loads(http.text("/v1/samples").splitlines()[0])
        rows = http.get("/v1/counters")["metrics"]["whatif_tokens_total"]["rows"]
        return set(header["namespaces"]), {row[3] for row in rows}

    with running(home) as process, Http(process.address) as http, Engine(process, namespace=NEW) as engine:
        engine.find(chain("k", 3))
        with Engine(process, namespace=OLD) as other:
            other.find(chain("k", 3))
            both = {NEW.digest, OLD.digest}
            assert told() == (both, both)
        eventually(lambda: told() == ({NEW.digest}, {NEW.digest}))


def test_a_flushed_namespace_is_dropped_when_it_is_unused(served, tmp_path):
    """At once: its memory, its file, and its part of the tiers; what its clients still ask is a miss."""
    replaced(served, after_s=0)
    gone = session_of(OLD)
    segments = {segment.number for segment in served.dram.pools[OLD.digest].segments.values()}
    served.dram.dropped_segments()
    assert served.store.flushes.drop(OLD.digest)["dram"] == (Outcome.OK, CHUNKS // 2)
    served.disk.flush(OLD.digest)
    served.settle()
    assert served.held(OLD) == [None, None]
    assert served.held(NEW) == [(0, CHUNKS)] * 2
    assert segments <= set(served.dram.dropped_segments())
    assert slab_files(tmp_path) == [NEW.digest]
    asked = Lookup(0, "r", chain("k", 2), 2 * CHUNK_TOKENS, b"")
    reply = served.store.lookups.lookup(gone, asked, wait=True)
    served.store.lookups.looked_up(gone, asked, reply)
    assert reply.tiers == []
    assert served.store.loads.load(gone, Load(1, chain("k", 2), 1.0), served.clock.now + 1).outcomes == ["miss", "miss"]
    assert served.dram.reserve(OLD.digest, b"key", NOBODY) is None


def test_a_lookup_that_ends_after_its_client_leaves_nothing_of_it(served):
    """It waited for the remote; the session may stay for its slots."""
    session = served.join(OLD)
    served.store.holdings.end(session)
    served.store.lookups.lookup(session, Lookup(0, "r", chain("k", 2), 2 * CHUNK_TOKENS, b"", defer=True), wait=True)
    assert session.chains.get("r") is None


def test_a_namespace_that_comes_back_before_it_is_forgotten_stays(served):
    """While its memory goes, an engine comes: it has a pool, and its part."""
    first = served.join(OLD)
    served.join(NEW)
    served.store.holdings.end(first)
    assert served.store.pools.settle(), "the first step of several"
    assert served.held(OLD)[0] == (0, 0)
    served.join(OLD)
    assert served.held(OLD) == [(0, CHUNKS // 2)] * 2
