"""Namespaces that come and go: who lends a share of the tiers, what is dropped, and what is known after a restart."""

import json
import threading
from unittest.mock import Mock

import pytest

from connector.local_dram import LocalDram
from connector.stores import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    PATIENCE_S,
    STRIDE,
    Engine,
    Http,
    chain,
    eventually,
    payload,
    running,
    view,
)
from tiertune_connector.chunk import NOBODY
from tiertune_connector.counters import Counters
from tiertune_connector.httpd.sites import REMARK
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import Lookup, PrefillLine
from tiertune_connector.sessions.namespaces import LENT_AFTER_S, Namespaces
from tiertune_connector.sessions.session import Session
from tiertune_connector.slower.lane import Lane
from tiertune_connector.state import StateDir
from tiertune_connector.store.tiered import TieredStore
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tuning import parse_tuning

OLD, NEW, OTHER = (Namespace(model="llama", chunk_tokens=CHUNK_TOKENS, epoch=epoch) for epoch in (1, 2, 3))
CHUNKS = 160
SLOT = 2 * PAGE
"""Bytes that a page takes on disk, with its header."""


def session_of(namespace):
    return Session("client", "engine", "mixed", namespace, PAGE, CHUNK_TOKENS)


class Served:
    """A store of 160 chunks of a page in DRAM, and as many on disk, and sessions with it."""

    def __init__(self, clock, root, own=None):
        pools = {OLD.digest: {tier: {"capacity_bytes": own} for tier in ("dram", "disk")}} if own is not None else {}
        tiers = {"dram": {"capacity_bytes": CHUNKS * PAGE}, "disk": {"capacity_bytes": CHUNKS * SLOT}}
        tuning = parse_tuning({"tiers": {**tiers, "remote": {"fetch": "off", "write": "off"}}, "pools": pools})
        self.dram, self.disk = LocalDram(segment_bytes=64 * PAGE, clock=clock), DiskTier(root)
        self.disk.recover(CHUNKS * SLOT, "lru")
        counters = Counters()
        lanes = {"disk": Lane(self.disk, counters, clock, patience_s=PATIENCE_S)}
        self.store = TieredStore(
            "host-a", tuning, dram=self.dram, disk=self.disk, lanes=lanes, counters=counters, clock=clock
        )
        self.store.retune(tuning)
        self.clock = clock

    def join(self, namespace):
        session = session_of(namespace)
        assert self.store.attach(session) == ""
        assert namespace.digest in self.disk.pools, "nobody is still opening it"
        self.settle()
        return session

    def leave(self, session, after_s=0.0):
        self.store.holdings.end(session)
        self.settle()
        self.clock.now += after_s
        self.settle()

    def settle(self):
        for _ in range(1000):
            more = self.store.pools.settle(), self.store.pools.settle_disk()
            assert sum(pool.provisioned for pool in self.dram.pools.values()) <= CHUNKS
            assert sum(pool.taken_bytes for pool in self.disk.pools.values()) <= CHUNKS * SLOT
            if not any(more):
                return
        pytest.fail("it never settles")

    def fill(self, namespace, count, name=""):
        for key in chain(name or namespace.digest, count):
            for tier in (self.dram, self.disk):
                assert tier.write(namespace.digest, key, view(payload(key, PAGE)), NOBODY) is Outcome.OK
            self.settle()

    def held(self, namespace):
        """Chunks in DRAM and on disk, each with those that are allowed; None where it has no pool."""
        pools = [tier.pools.get(namespace.digest) for tier in (self.dram, self.disk)]
        return [pool and (len(pool.pool), pool.allowed) for pool in pools]

    def close(self):
        self.store.close()


@pytest.fixture
def served(clock, tmp_path):
    served = Served(clock, tmp_path)
    yield served
    served.close()


def replaced(served, after_s=LENT_AFTER_S, chunks=CHUNKS):
    """Engines filled the store, others of another namespace came, and the first went."""
    first = served.join(OLD)
    served.fill(OLD, chunks)
    second = served.join(NEW)
    served.leave(first, after_s)
    return second


def slab_files(root):
    """Namespaces that have one."""
    return [path.name[:32] for path in root.glob("*.slab")]


# -- of namespaces that nobody uses


def test_an_unused_namespace_lends_its_share_after_an_hour(served):
    """Until then engines that only start anew would find it; its chunks leave as the others' come, the oldest first."""
    replaced(served, after_s=LENT_AFTER_S - 1)
    half = CHUNKS // 2
    assert served.held(OLD) == [(half, half)] * 2
    assert served.held(NEW) == [(0, half)] * 2
    served.clock.now += 2
    served.settle()
    assert served.held(OLD) == [(half, half)] * 2, "nobody needs its room yet"
    served.fill(NEW, half)
    for (kept, allowed), (mine, room) in zip(served.held(OLD), served.held(NEW), strict=True):
        assert (mine, kept) == (half, allowed), "nothing had to leave for what came"
        assert 0 < kept < half, "only as much as was needed"
        assert mine < room <= CHUNKS - kept
    assert served.dram.present(OLD.digest, chain(OLD.digest, CHUNKS)[-1:])[1] == 1
    served.fill(NEW, CHUNKS)
    assert served.held(NEW) == [(CHUNKS, CHUNKS)] * 2
    assert served.held(OLD) == [None, None]
    assert len(served.dram.pools[NEW.digest].segments) < 10, "not one for each chunk that left"


def test_what_leaves_dram_of_it_takes_no_room_on_disk(served):
    """Others have it all there: nothing is written behind for nobody."""
    replaced(served)
    for key in chain("new", CHUNKS):
        assert served.disk.write(NEW.digest, key, view(payload(key, PAGE)), NOBODY) is Outcome.OK
        served.settle()
    full = [(CHUNKS // 2, CHUNKS // 2), None]
    assert served.held(OLD) == full
    for _ in range(10):
        served.store.behind.clean_ahead()
        eventually(lambda: served.store.lanes["disk"].writers.queued() == 0)
        served.settle()
    assert served.held(OLD) == full
    assert served.held(NEW)[1] == (CHUNKS, CHUNKS)


def test_what_it_does_not_hold_is_lent_at_once(served):
    """It keeps its chunks, and no room beside them."""
    replaced(served, chunks=30)
    assert served.held(OLD) == [(30, 30)] * 2
    assert served.held(NEW) == [(0, CHUNKS - 30)] * 2


def test_engines_that_come_back_have_their_share_again(served):
    """With what is left of their chunks."""
    replaced(served)
    served.fill(NEW, 100)
    left = [kept for kept, _ in served.held(OLD)]
    assert all(0 < kept < CHUNKS // 2 for kept in left)
    served.join(OLD)
    assert served.held(OLD) == [(kept, CHUNKS // 2) for kept in left]
    assert [allowed for _, allowed in served.held(NEW)] == [CHUNKS // 2] * 2


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

    with running(home) as process, Http(process.address) as http, Engine(process.server.path, namespace=NEW) as engine:
        engine.find(chain("k", 3))
        with Engine(process.server.path, namespace=OLD) as other:
            other.find(chain("k", 3))
            both = {NEW.digest, OLD.digest}
            assert told() == (both, both)
        eventually(lambda: told() == ({NEW.digest}, {NEW.digest}))


def test_what_was_flushed_of_it_is_no_room_that_is_kept(served):
    """It holds nothing any more: others have all of its room."""
    replaced(served)
    for tier in (served.dram, served.disk):
        tier.flush()
    served.fill(NEW, CHUNKS)
    assert served.held(NEW) == [(CHUNKS, CHUNKS)] * 2
    assert served.held(OLD) == [None, None]


def test_a_smaller_tier_takes_first_from_what_is_lent(served):
    """Those who use theirs lose no chunk for one that nobody uses."""
    replaced(served)
    served.fill(NEW, 75)
    document = served.store.tuning.document()
    document["tiers"]["dram"]["capacity_bytes"] = 80 * PAGE
    served.store.retune(parse_tuning(document))
    served.settle()
    assert served.held(NEW)[0] == (75, 80)
    assert served.held(OLD)[0] is None


def test_a_capacity_of_its_own_is_not_lent(clock, tmp_path):
    """What the operator said of a pool holds, used or not."""
    served = Served(clock, tmp_path, own=40 * PAGE)
    first = served.join(OLD)
    served.fill(OLD, 20)
    served.join(NEW)
    served.leave(first, LENT_AFTER_S)
    served.fill(NEW, CHUNKS)
    assert served.held(OLD) == [(20, 40), (20, 20)]
    assert served.held(NEW) == [(CHUNKS - 40, CHUNKS - 40), (CHUNKS - 20, CHUNKS - 20)]
    served.close()


def test_where_nobody_is_nothing_changes(served):
    """However long: whoever comes first finds what was left."""
    first, second = served.join(OLD), served.join(NEW)
    served.fill(OLD, 30)
    before = served.held(OLD), served.held(NEW)
    served.leave(first)
    served.leave(second, 10 * LENT_AFTER_S)
    assert (served.held(OLD), served.held(NEW)) == before


def restarted(served):
    served.close()
    again = Served(served.clock, served.disk.root)
    again.settle()
    return again


def test_a_restart_takes_nothing_off_a_disk_that_has_room(served):
    """What had the room of one that nobody uses has it still: before its engines are back, and after."""
    replaced(served)
    served.fill(NEW, 125)
    (_, (old, _)), (_, (new, room)) = served.held(OLD), served.held(NEW)
    assert new == 125
    again = restarted(served)
    assert (again.held(OLD)[1], again.held(NEW)[1]) == ((old, old), (new, new))
    again.join(NEW)
    assert (again.held(OLD)[1], again.held(NEW)[1]) == ((old, old), (new, room))
    again.join(OLD)
    assert (again.held(OLD)[1], again.held(NEW)[1]) == ((old, CHUNKS // 2), (CHUNKS // 2, CHUNKS // 2))
    again.close()


def test_what_a_restart_found_makes_room_up_to_an_even_part(served):
    """For the engines that are there, as they need it; all of it after an hour."""
    replaced(served)
    served.fill(NEW, 125)
    again = restarted(served)
    again.join(OTHER)
    again.fill(OTHER, CHUNKS)
    third = CHUNKS // 3
    assert again.held(OTHER)[1] == (third + 1, third + 1), "bytes make one chunk more"
    assert again.held(NEW)[1][0] + again.held(OLD)[1][0] == CHUNKS - third - 1
    again.clock.now += LENT_AFTER_S
    again.fill(OTHER, CHUNKS, "more")
    assert again.held(OTHER)[1] == (CHUNKS, CHUNKS)
    assert again.held(OLD)[1] is None
    again.close()


@pytest.mark.parametrize("stays", ["a session", "a reservation"])
def test_a_namespace_in_use_keeps_its_share_though_it_is_empty(served, stays):
    """By an engine that has stored nothing, or by one that is gone and may still be writing."""
    first = served.join(OLD)
    served.join(NEW)
    if stays == "a reservation":
        served.store.storing.reserve(first, "r", [b"key"], b"")
        served.leave(first, LENT_AFTER_S)
        assert OLD.digest in served.dram.pools
        served.store.holdings.leave_quarantine(first)
        served.settle()
        assert served.held(OLD)[0] is None
    else:
        served.clock.now += 2 * LENT_AFTER_S
        served.settle()
        assert served.held(OLD) == [(0, CHUNKS // 2)] * 2


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
    assert served.store.loads.load(gone, chain("k", 2), 1.0).outcomes == ["miss", "miss"]
    assert served.dram.reserve(OLD.digest, b"key", NOBODY) is None


def test_a_namespace_that_comes_back_before_it_is_forgotten_stays(served):
    """While its memory goes, an engine comes: it has a pool, and its part."""
    first = served.join(OLD)
    served.join(NEW)
    served.store.holdings.end(first)
    assert served.store.pools.settle(), "the first step of several"
    assert served.held(OLD)[0] == (0, 0)
    served.join(OLD)
    assert served.held(OLD) == [(0, CHUNKS // 2)] * 2


def test_slabs_that_are_found_empty_do_not_outlive_their_restarts(home):
    """New weights with every start: the file of those that stored nothing goes when engines of others come."""
    for epoch in range(3):
        namespace = Namespace(model="llama", chunk_tokens=CHUNK_TOKENS, epoch=epoch)
        with running(home, **kept(home)) as process, Engine(process.server.path, namespace=namespace):
            pools = process.store.disk.pools
            eventually(lambda name=namespace.digest, pools=pools: list(pools) == [name])
            eventually(lambda pool=pools[namespace.digest]: pool.effective >= 64)
            eventually(lambda name=namespace.digest: slab_files(home / "disk") == [name])


# -- after a restart


def kept(home):
    """Settings of a store that keeps chunks over restarts."""
    (home / "remote").mkdir(exist_ok=True)
    remote = {"url": f"file://{home}/remote", "probe_every": 3600}
    return {"disk": {"path": home / "disk", "capacity": 100 * STRIDE}, "remote": remote}


def remote_chunks(home, namespace):
    return sum(path.is_file() for path in (home / "remote" / namespace.digest).rglob("*"))


def stored(home, namespace, count):
    """An engine's chunks are on disk and in the remote; its store has ended."""
    with (
        running(home, **kept(home)) as process,
        Engine(process.server.path, namespace=namespace) as engine,
        Http(process.address) as http,
    ):
        http.retune(tiers__disk__write="commit", tiers__remote__write="commit", admission__remote="always")
        eventually(lambda: process.store.dram.pools[namespace.digest].provisioned)
        assert engine.put(chain("k", count)) == [""] * count
        kept_on_disk = process.store.disk.pools[namespace.digest].pool
        eventually(lambda: (len(kept_on_disk), remote_chunks(home, namespace)) == (count, count))


def test_a_flush_by_epoch_reaches_what_was_stored_before_a_restart(home):
    """On disk and in the remote, though no engine of that epoch has come since."""
    stored(home, OLD, 5)
    with (
        running(home, **kept(home)) as process,
        Engine(process.server.path, namespace=NEW),
        Http(process.address) as http,
    ):
        assert http.post("/v1/flush", {"epoch": NEW.epoch}).json() == {"dram": 0, "disk": 0, "remote": 0}
        assert http.post("/v1/flush", {"epoch": OLD.epoch, "namespace": OLD.digest}).json()["disk"] == 5
        assert process.store.disk.present(OLD.digest, chain("k", 5)) == (Outcome.OK, 0)
        eventually(lambda: process.store.disk.usage().chunks == 0)  # one that is being scrubbed leaves after that
        assert remote_chunks(home, OLD) == 0


def test_a_flush_of_one_epoch_leaves_the_others(home):
    """In memory, on disk and in the remote; what was there of the other epoch is found as before."""
    stored(home, OLD, 5)
    stored(home, NEW, 3)
    with running(home, **kept(home)) as process, Http(process.address) as http:
        with Engine(process.server.path, namespace=OLD) as old, Engine(process.server.path, namespace=NEW) as new:
            assert (old.get(chain("k", 5)), new.get(chain("k", 3))) == (5, 3)
            assert http.post("/v1/flush", {"epoch": OLD.epoch}).json() == {"dram": 5, "disk": 5, "remote": 5}
            assert (old.find(chain("k", 5)), new.get(chain("k", 3))) == ([], 3)
        assert (remote_chunks(home, OLD), remote_chunks(home, NEW)) == (0, 3)


def test_an_epoch_of_which_nothing_is_known_is_told(home):
    """Nothing was dropped, and what to do instead, beside the counts: who adds them up meets numbers only."""
    stored(home, OLD, 1)
    with running(home, **kept(home)) as process, Http(process.address) as http:
        answer = http.post("/v1/flush", {"epoch": 9})
        assert (answer.status_code, answer.json()) == (200, {"dram": 0, "disk": 0, "remote": 0})
        told = "no namespace of epoch 9 is known here: flush by namespace (/v1/status tells them)"
        assert answer.headers[REMARK] == told
        assert REMARK in http.post("/v1/flush", {"epoch": OLD.epoch, "namespace": NEW.digest}).headers
        assert process.store.disk.usage().chunks == 1
        assert REMARK not in http.post("/v1/flush", {"epoch": OLD.epoch}).headers


def test_the_status_tells_what_only_the_disk_holds(home):
    """Of which model and epoch it is, too, and metrics have the model's name."""
    stored(home, OLD, 3)
    with running(home, **kept(home)) as process, Http(process.address) as http:
        pool = http.get("/v1/status")["pools"][OLD.digest]
        assert (pool["model"], pool["epoch"], pool["chunk_bytes"]) == ("llama", 1, CHUNK_BYTES)
        assert (pool["disk"]["chunks"], "dram" in pool) == (3, False)
        assert f'model="llama",namespace="{OLD.digest}",store="host-a",tier="disk"' in http.text("/metrics")
        with Engine(process.server.path, namespace=OLD) as engine:
            assert engine.get(chain("k", 3)) == 3
            assert {"dram", "disk"} <= http.get("/v1/status")["pools"][OLD.digest].keys()


def test_namespaces_that_cannot_be_kept_are_served_and_kept_later(clock, tmp_path, monkeypatch):
    """A full disk under the state directory refuses no engine; what was not kept is with the next that comes."""
    state = StateDir(tmp_path)
    known = Namespaces(threading.RLock(), clock, state)
    with monkeypatch.context() as patch:
        patch.setattr(StateDir, "write", Mock(side_effect=OSError(28, "No space left on device")))
        known.join(session_of(OLD))
        known.keep()
    assert (known.of(1), state.namespaces()) == ([OLD.digest], {})
    known.join(session_of(OLD))
    known.keep()
    assert list(state.namespaces()) == [OLD.digest]
    known.join(session_of(NEW))
    known.keep()
    again = Namespaces(threading.RLock(), clock, state)
    assert (again.of(1), again.of(2), again.of(2, OLD.digest)) == ([OLD.digest], [NEW.digest], [])
    assert [again.model(each.digest) for each in (OLD, NEW, OTHER)] == ["llama", "llama", ""]
    state.close()


def test_namespaces_are_written_once(clock, tmp_path, monkeypatch):
    """An engine that comes again costs no write."""
    state, writes = StateDir(tmp_path), []
    monkeypatch.setattr(StateDir, "write", lambda *told: writes.append(told))
    known = Namespaces(threading.RLock(), clock, state)
    for namespace in (OLD, OLD, NEW, OLD):
        known.join(session_of(namespace))
        known.keep()
    assert len(writes) == 2
    state.close()


def test_only_the_latest_namespaces_are_remembered(clock):
    """Those that came last, again too: the file stays small."""
    known = Namespaces(threading.RLock(), clock)
    for epoch in range(1500):
        known.join(session_of(Namespace(model="llama", epoch=epoch)))
        known.join(session_of(OTHER))
    assert len(known._served) == 1024
    assert (known.of(0), known.of(476), len(known.of(1499))) == ([], [], 1)
    assert known.served(OTHER.digest) is not None


def test_one_that_is_in_use_is_remembered_however_many_come(clock):
    """Its metrics have its model's name for as long as there are any."""
    known = Namespaces(threading.RLock(), clock)
    known.join(session_of(OTHER))
    for epoch in range(1500):
        session = session_of(Namespace(model="llama", epoch=epoch))
        known.join(session)
        session.ended = True
        known._look()
    assert len(known._served) == 1024
    assert known.model(OTHER.digest) == "llama"
