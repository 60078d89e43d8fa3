"""What clients see in host memory themselves: where a chunk lies is a hint, and never more than that."""

import errno
import os
import time
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from connector.local_dram import LocalDram, resize
from connector.stores import NAMESPACE, Engine, Http, chain, eventually, payload, pool, running
from tiertune_connector.chunk import NOBODY
from tiertune_connector.client import link as links
from tiertune_connector.client.link import StoreLink
from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.messages import Lookup
from tiertune_connector.tiers import index as index_module
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.segment import PAGE

DIGEST = NAMESPACE.digest
KEYS = chain("k", 8)
ALL = ["dram"] * len(KEYS)


# -- memory that was given back


def test_memory_that_a_reader_took_again_is_given_back_again(clock):
    """A client that looks holds no pin: a chunk may leave while it is copied."""
    tier = LocalDram(segment_bytes=64 * PAGE, clock=clock)
    tier.attach(DIGEST, PAGE, "lru")
    resize(tier, 64 * PAGE)
    (segment,) = tier.pools[DIGEST].segments.values()
    for key in chain("k", 64):
        assert tier.write(DIGEST, key, memoryview(bytes(PAGE)), NOBODY) is Outcome.OK
    resize(tier, 8 * PAGE)
    small = os.fstat(segment.fd).st_blocks
    retired = [slot.index for slot in tier.pools[DIGEST].retired[segment.number]]
    for slot in retired:
        segment.slot(slot).max()
        segment.slot(slot)[:] = 1
    assert os.fstat(segment.fd).st_blocks > small
    clock.now += 1.0
    tier.settle()
    assert os.fstat(segment.fd).st_blocks == small
    resize(tier, 64 * PAGE)
    clock.now += 1.0
    for key in chain("n", 64):
        tier.write(DIGEST, key, memoryview(payload(key, PAGE)), NOBODY)
    tier.settle()
    outs = {key: bytearray(PAGE) for key in chain("n", 64)}
    assert {tier.read(DIGEST, key, memoryview(out))[0] for key, out in outs.items()} == {Outcome.OK}
    tier.close()


# -- client and store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with running(tmp_path_factory.mktemp("i")) as process:
        yield process


@pytest.fixture
def engine(store, http):
    store.store.flushes.drop(DIGEST) if DIGEST in store.store.dram.pools else None
    with Engine(store) as engine:
        engine.put_all(KEYS)
        eventually(lambda: engine.client.find(KEYS)[0])
        yield engine


def held(store):
    """As long as the store's lock: nothing is answered meanwhile."""
    return store.store.dram.lock


def test_a_lookup_of_what_lies_in_dram_asks_nobody(store, engine):
    """Its answer is the store's, with what a fetch from there costs."""
    with held(store):
        reply = engine.client.lookup("r", KEYS, prompt_tokens=128).result(0)
    assert reply.tiers == ALL
    assert reply.costs["dram"].bytes_per_s == pytest.approx(store.store.health.dram_cost().bytes_per_s)


def test_the_store_hears_of_it_and_counts_it(store, engine, http):
    """Exactly as if it had been asked."""
    engine.heard()
    before = http.total("tier_lookup_tokens_total", tier="dram", result="hit")
    with held(store):
        assert engine.client.lookup("r", KEYS, prompt_tokens=128).result(0).tiers == ALL
    engine.heard()
    assert http.total("tier_lookup_tokens_total", tier="dram", result="hit") - before == 16 * len(KEYS)


@pytest.mark.parametrize("at", [3, len(KEYS)], ids=["amid", "at the end"])
def test_a_chain_of_which_some_is_not_seen_is_asked(store, engine, monkeypatch, at):
    """The store may have the rest on disk, or in the remote."""
    asked = []
    ask = StoreLink.ask
    monkeypatch.setattr(StoreLink, "ask", lambda self, *rest, **more: asked.append(rest) or ask(self, *rest, **more))
    assert engine.find([*KEYS[:at], *chain("other", 1), *KEYS[at:]]) == ["dram"] * at
    assert len(asked) == 1


def test_who_looks_up_more_than_the_store_can_hear_of_asks(store, engine, monkeypatch):
    """Else it would be ever further ahead of what is counted; after the next load, or tick, it looks again."""
    link = engine.client
    monkeypatch.setattr(link._live.receiver, "tick", lambda: None)
    engine.heard()
    looked = [link.look(KEYS) is not None for _ in range(links._MOST_LOOKS + 1)]
    assert looked == [True] * links._MOST_LOOKS + [False]
    assert engine.find(KEYS) == ALL
    assert link.look(KEYS) is None
    assert engine.get(KEYS) == len(KEYS)
    assert link.look(KEYS) is not None
    engine.heard()
    link._looks = links._MOST_LOOKS
    link._tick()
    assert link.look(KEYS) is not None


def test_chunks_that_have_left_are_not_seen(store, engine, http):
    """Flushed."""
    assert engine.client.find(KEYS)[0]
    store.store.flushes.drop(DIGEST)
    assert engine.client.find(KEYS)[0] == []
    assert engine.find(KEYS) == []


def test_a_store_that_is_bypassed_is_asked(store, engine, http):
    """At once, and it says why nothing is found; afterwards clients see again."""
    assert http.retune(bypass=True).status_code == 200
    assert engine.client.lookup("r", KEYS, prompt_tokens=128).result(5).reason == "bypassed"
    assert http.retune(bypass=False).status_code == 200
    assert engine.client.look(KEYS) is not None
    assert engine.find(KEYS) == ALL


def test_a_store_that_does_not_say_that_it_is_well_is_asked(store, engine, monkeypatch):
    """One that hangs says nothing; what it said holds for a second."""
    monkeypatch.setattr(store.store, "show", lambda: None)
    eventually(lambda: engine.client.find(KEYS)[0] == [])
    engine.heard()
    engine.client._looks = 0
    with held(store):
        asked = engine.client.lookup("r", KEYS, prompt_tokens=128)
        time.sleep(0.05)
        assert not asked.done()
    assert asked.result(5).tiers == ALL


@pytest.mark.parametrize("there", [True, False])
def test_a_place_that_is_not_right_any_more_is_noticed(store, engine, monkeypatch, there):
    """Its chunk left, another came, and the first came back elsewhere; or did not: the store's reply decides."""
    stale = engine.client.find(KEYS)
    store.store.flushes.drop(DIGEST)
    engine.put(chain("new", 20))
    if there:
        engine.put(KEYS)
    monkeypatch.setattr(engine.client, "find", lambda _: stale)
    slots = [segment.generations for segment in engine.client._segments.values()]
    for segment, slot, generation in stale[0]:
        assert any(int(each[slot]) != generation for each in slots), segment
    rows = [np.zeros(engine.chunk_bytes, np.uint8) for _ in KEYS]

    def copy(parts):
        for part in parts:
            engine.client.read_part(part, rows[part.position])

    loaded = engine.client.load(KEYS, deadline_s=5, arriving=copy).result(15)
    good = [engine.client.read(slot, row) for slot, row in zip(loaded.slots, rows, strict=False)]
    assert good == [True] * len(KEYS) if there else good == []
    for key, row in zip(KEYS, rows, strict=True) if there else ():
        assert np.array_equal(row, payload(key))
    engine.client.release(loaded)


def test_a_chunk_that_is_replaced_while_it_is_copied_is_not_used(store, engine):
    """What was copied before the store's reply is summed with the rest: a torn copy has another sum."""
    rows = [np.zeros(engine.chunk_bytes, np.uint8)]

    def copy(parts):
        (part,) = parts
        segment = pool(store).segments[part.slot.ref.segment]
        data = segment.slot(part.slot.ref.index)
        kept = data.copy()
        data[100] ^= 1
        engine.client.read_part(part, rows[0])
        data[:] = kept

    loaded = engine.client.load(KEYS[:1], deadline_s=5, arriving=copy).result(15)
    assert engine.client.read(loaded.slots[0], rows[0]) is False
    engine.client.release(loaded)
    assert engine.get(KEYS[:1]) == 1, "the store has summed it, and it is whole"


def test_clients_that_do_not_look_are_served_as_before(store, engine):
    """One of an older version gets no index, and segments only when a reply names them."""
    other = StoreClient(store.server.path, NAMESPACE, chunk_bytes=20_000, chunk_tokens=16, engine="older")
    other.hello = msgspec.structs.replace(other.hello, looks=False)
    assert other.connect(5)
    assert other.lookup("r", KEYS, prompt_tokens=128).result(5).tiers == ALL
    assert (other._index, other._segments) == (None, {})
    loaded = other.load(KEYS[:1], deadline_s=5).result(5)
    row = np.zeros(20_000, np.uint8)
    assert other.read(loaded.slots[0], row)
    assert len(other._segments) == 1
    other.close()


def test_one_that_only_tells_gets_no_reply(store, engine, monkeypatch):
    """A reply to nobody's question would be taken for another's."""
    sent = []
    put = Frames.encode
    monkeypatch.setattr(Frames, "encode", lambda self, message: sent.append(message) or put(self, message))
    assert engine.find(KEYS) == ALL
    engine.heard()
    assert [type(message).__name__ for message in sent] == ["Lookup", "Reserve", "ReserveReply"]
    assert isinstance(sent[0], Lookup)
    assert sent[0].id == 0


def test_a_client_maps_what_replies_name(store, engine):
    """However many segments there are: one that has only looked up asks, until it has loaded."""
    with Engine(store, name="second") as other:
        link = other.client
        assert other.find(KEYS) == ALL
        assert (link._index, link._segments) == (None, {})
        assert other.get(KEYS[:1]) == 1
        assert len(link._segments) == 1
        assert link.find(KEYS)[0]


def test_one_that_knows_another_layout_asks(store, monkeypatch):
    """Its descriptor is closed, and what it loads is whole."""
    monkeypatch.setattr(links, "LAYOUT", 2)
    with Engine(store, name="other") as other:
        other.put(KEYS)
        assert other.get(KEYS) == len(KEYS)
        held = {pool(store).pool.get(key).segment.number for key in KEYS}
        assert (other.client._index, set(other.client._segments)) == (None, held)
        assert not other.client._live.frames.descriptors


def test_where_there_is_no_memory_for_an_index_clients_ask(home, monkeypatch):
    """They are served all the same."""
    monkeypatch.setattr(index_module, "touched", Mock(side_effect=OSError(errno.ENOMEM, "none")))
    with running(home) as store, Engine(store) as engine:
        engine.put_all(KEYS)
        assert engine.get(KEYS) == len(KEYS)
        assert pool(store).index is None
        assert engine.client._index is None
        store.store.show()
        store.store.flushes.drop(DIGEST)
        assert engine.find(KEYS) == []


def test_a_lookup_that_is_only_told_asks_no_remote(home):
    """What has left DRAM since the client saw it is no miss of a tier that nobody asked."""
    with (
        running(home, remote={}) as store,
        Engine(store) as engine,
        Http(store.address) as http,
    ):
        eventually(lambda: store.store.loads.residency.readable)
        engine.client.tell(Lookup(0, "r", KEYS, 128, b""))
        engine.heard()
        missed = [http.total("tier_lookup_tokens_total", tier=tier, result="miss") for tier in ("dram", "remote")]
        assert missed == [16 * len(KEYS), 0]
        assert engine.find(KEYS) == []
        eventually(lambda: http.total("tier_lookup_tokens_total", tier="remote", result="miss") == 16 * len(KEYS))


def test_a_store_that_has_gone_is_noticed_before_its_connection_is_lost(home):
    """Whatever holds up who receives: a lookup finds nothing at once."""
    with running(home) as store, Engine(store) as engine:
        engine.put(KEYS)
        eventually(lambda: engine.client.look(KEYS))
        link = engine.client
        with link._live.receiver._turn:  # nobody receives
            for connection in list(store.server._connections):
                connection.shutdown()
            assert link._index is not None
            assert eventually(lambda: link.look(KEYS) is None)
            assert link._live.frames.ended()


def test_after_a_restart_a_client_sees_what_the_new_store_has(home):
    """The old index ends with its connection."""
    with running(home) as first, Engine(first) as engine:
        engine.put(KEYS)
        eventually(lambda: engine.client.find(KEYS)[0])
        first.stop()
        eventually(lambda: engine.client._index is None)
        assert engine.client.find(KEYS)[0] == []
        with running(home):
            eventually(lambda: engine.client.connected)
            assert engine.find(KEYS) == []
            engine.put(KEYS)
            eventually(lambda: engine.client.find(KEYS)[0])
            assert engine.get(KEYS) == len(KEYS)
