"""What is known of namespaces after a restart: flushes by epoch, the status, the file in which they are kept."""

import threading
from unittest.mock import Mock

import pytest

from connector.small_store import NEW, OLD, OTHER, session_of, slab_files
from connector.stores import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    PATIENCE_S,
    STRIDE,
    Engine,
    Http,
    amid,
    chain,
    eventually,
    running,
)
from tiertune_connector.httpd.guarded import REMARK
from tiertune_connector.keys import Namespace
from tiertune_connector.sessions import namespaces as module
from tiertune_connector.sessions.namespaces import Namespaces
from tiertune_connector.state import StateDir
from tiertune_connector.tiers.base import Outcome

pytestmark = pytest.mark.slow


def test_slabs_that_are_found_empty_do_not_outlive_their_restarts(home):
    """New weights with every start: the file of those that stored nothing goes when engines of others come."""
    for epoch in range(3):
        namespace = Namespace(model="llama", chunk_tokens=CHUNK_TOKENS, epoch=epoch)
        with kept(home) as process, Engine(process, namespace=namespace):
            pools = process.store.disk.pools
            eventually(lambda name=namespace.digest, pools=pools: list(pools) == [name])
            eventually(lambda pool=pools[namespace.digest]: pool.effective >= 64)
            eventually(lambda name=namespace.digest: slab_files(home / "disk") == [name])


def kept(home):
    """A store that keeps chunks over restarts."""
    return running(home, disk=100 * STRIDE, remote={"probe_every": 3600})


def remote_chunks(home, namespace):
    return sum(path.is_file() for path in (home / "remote" / namespace.digest).rglob("*"))


def stored(home, namespace, count):
    """An engine's chunks are on disk and in the remote; its store has ended."""
    with (
        kept(home) as process,
        Engine(process, namespace=namespace) as engine,
        Http(process.address) as http,
    ):
        http.retune(tiers__disk__write="commit", tiers__remote__write="commit", admission__remote="always")
        eventually(lambda: process.store.dram.pools[namespace.digest].provisioned)
        engine.put_all(chain("k", count))
        kept_on_disk = process.store.disk.pools[namespace.digest].pool
        eventually(lambda: (len(kept_on_disk), remote_chunks(home, namespace)) == (count, count))


def test_a_flush_by_epoch_reaches_what_was_stored_before_a_restart(home):
    """On disk and in the remote, though no engine of that epoch has come since."""
    stored(home, OLD, 5)
    with (
        kept(home) as process,
        Engine(process, namespace=NEW),
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
    with kept(home) as process, Http(process.address) as http:
        with Engine(process, namespace=OLD) as old, Engine(process, namespace=NEW) as new:
            assert (old.get(chain("k", 5)), new.get(chain("k", 3))) == (5, 3)
            assert http.post("/v1/flush", {"epoch": OLD.epoch}).json() == {"dram": 5, "disk": 5, "remote": 5}
            assert (old.find(chain("k", 5)), new.get(chain("k", 3))) == ([], 3)
        assert (remote_chunks(home, OLD), remote_chunks(home, NEW)) == (0, 3)


def test_an_epoch_of_which_nothing_is_known_is_told(home):
    """Nothing was dropped, and what to do instead, beside the counts: who adds them up meets numbers only."""
    stored(home, OLD, 1)
    with kept(home) as process, Http(process.address) as http:
        answer = http.post("/v1/flush", {"epoch": 9})
        assert (answer.status_code, answer.json()) == (200, {"dram": 0, "disk": 0, "remote": 0})
        told = "no namespace of epoch 9 is known here: flush by namespace (/v1/status tells them)"
        assert answer.headers[REMARK] == told
        assert REMARK in http.post("/v1/flush", {"epoch": OLD.epoch, "namespace": NEW.digest}).headers
        assert process.store.disk.usage().chunks == 1
        assert REMARK not in http.post("/v1/flush", {"epoch": OLD.epoch}).headers


def test_a_flush_by_epoch_that_leaves_what_it_knows_nothing_of_is_no_success(home):
    """The state directory is lost, the disk is not: whether these chunks are of that epoch, nobody can say."""
    stored(home, OLD, 5)
    (home / "state" / "namespaces.json").unlink()
    with kept(home) as process, Http(process.address) as http:
        answer = http.post("/v1/flush", {"epoch": OLD.epoch})
        told = "chunks are left of which no epoch is known here: flush by namespace (/v1/status tells them)"
        dropped = {"dram": 0, "disk": 0, "remote": 0}
        assert (answer.status_code, answer.json()) == (503, {"message": told, "dropped": dropped})
        assert http.post("/v1/flush", {"epoch": OLD.epoch, "namespace": NEW.digest}).status_code == 200
        with Engine(process, namespace=NEW):
            assert http.post("/v1/flush", {"epoch": NEW.epoch}).status_code == 503
        assert http.post("/v1/flush", {"namespace": OLD.digest}).json()["disk"] == 5
        assert http.post("/v1/flush", {"epoch": OLD.epoch}).status_code == 200


def test_the_status_tells_what_only_the_disk_holds(home):
    """Of which model and epoch it is, too, and metrics have the model's name."""
    stored(home, OLD, 3)
    with kept(home) as process, Http(process.address) as http:
        pool = http.get("/v1/status")["pools"][OLD.digest]
        assert (pool["model"], pool["epoch"], pool["chunk_bytes"]) == ("llama", 1, CHUNK_BYTES)
        assert (pool["disk"]["chunks"], "dram" in pool) == (3, False)
        assert f'model="llama",namespace="{OLD.digest}",store="host-a",tier="disk"' in http.text("/metrics")
        with Engine(process, namespace=OLD) as engine:
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
    assert (known.of(1), state.kept("namespaces.json", dict)) == ([OLD.digest], {})
    known.join(session_of(OLD))
    known.keep()
    assert list(state.kept("namespaces.json", dict)) == [OLD.digest]
    known.join(session_of(NEW))
    known.keep()
    again = Namespaces(threading.RLock(), clock, state)
    assert (again.of(1), again.of(2), again.of(2, OLD.digest)) == ([OLD.digest], [NEW.digest], [])
    assert [again.model(each.digest) for each in (OLD, NEW, OTHER)] == ["llama", "llama", ""]
    state.close()


def test_a_state_directory_that_hangs_refuses_no_engine_but_the_first(clock, tmp_path, monkeypatch, caplog):
    """Those that come meanwhile wait a while, and are served; what is new of them is kept once it answers."""
    state, hangs = StateDir(tmp_path), threading.Event()
    known = Namespaces(threading.RLock(), clock, state)
    real = state.keep
    monkeypatch.setattr(state, "keep", lambda *told: hangs.wait(PATIENCE_S) and real(*told))
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)

    def come(*comers):
        for namespace in comers:
            known.join(session_of(namespace))
            known.keep()

    first, others = (threading.Thread(target=come, args=comers) for comers in ([OLD], [OLD, NEW]))
    first.start()
    eventually(known._saving.locked)
    others.start()
    others.join(PATIENCE_S)
    assert (first.is_alive(), others.is_alive()) == (True, False)
    assert "the state directory does not answer" in caplog.text
    hangs.set()
    first.join()
    assert list(state.kept("namespaces.json", dict)) == [OLD.digest, NEW.digest]
    state.close()


def test_a_namespace_that_could_not_be_kept_is_not_forgotten_for_one_that_joins_just_then(clock, tmp_path, monkeypatch):
    """An engine that is known needs no writing by itself: what failed meanwhile still does."""
    state = StateDir(tmp_path)
    known = Namespaces(threading.RLock(), clock, state)
    writing, joined = threading.Event(), threading.Event()

    def full(*_):
        writing.set()
        joined.wait(PATIENCE_S)
        raise OSError(28, "No space left on device")

    known.join(session_of(OLD))
    with monkeypatch.context() as patch:
        patch.setattr(StateDir, "write", full)
        with amid(lambda *_: known.keep(), 1):
            assert writing.wait(PATIENCE_S)
            known.join(session_of(OLD))
            joined.set()
    known.keep()
    assert list(state.kept("namespaces.json", dict)) == [OLD.digest]
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
