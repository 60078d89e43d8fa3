"""Connections: greeting, loss, quarantine, and everything that must not be left behind."""

import gc
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from connector.peers import dial, hello, raw
from connector.stores import (
    CHUNK_BYTES,
    NAMESPACE,
    STRIDE,
    Engine,
    Http,
    at_once,
    chain,
    eventually,
    no_more_threads,
    payload,
    pinned,
    pool,
    running,
    settings,
)
from tiertune_connector.documents import DocumentError
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.messages import Own, Reply, Report, Reserve
from tiertune_connector.serve.main import StartError, StoreProcess
from tiertune_connector.tiers.segment import whole_pages

pytestmark = pytest.mark.slow

DIGEST = NAMESPACE.digest


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- greeting


def test_a_client_learns_whom_it_speaks_to(store, http):
    """Boot id and clients are told on both sides."""
    with Engine(store, name="engine-7") as engine:
        assert engine.connected
        assert engine.client.boot_id == http.get("/v1/status")["boot_id"] == store.server.boot_id
        (told,) = http.get("/v1/status")["clients"]
        assert (told["engine"], told["namespace"], told["pid"]) == ("engine-7", DIGEST, os.getpid())
    eventually(lambda: http.get("/v1/status")["clients"] == [])


def test_a_refused_client_answers_at_once_and_knows_why(store):
    """Everything is nothing found; no call waits."""
    with (
        Engine(store),
        Engine(store, chunk_bytes=CHUNK_BYTES * 2, connect_s=0) as other,
    ):
        eventually(lambda: "another chunk size" in other.client.refusal)
        assert not other.connected
        assert other.find(chain("k", 2), timeout_s=0.1) == []


def test_without_a_store_everything_is_nothing_found(home):
    """Every future resolves at once; nothing raises."""
    with Engine(home / "none.sock", connect_s=0.01) as engine:
        client = engine.client
        assert not engine.connected
        reply = client.lookup("r", chain("k", 2), prompt_tokens=32).result(0)
        assert (reply.tiers, reply.reason) == ([], "unreachable")
        assert client.load(chain("k", 2), deadline_s=1).result(0).outcomes == ["error", "error"]
        reserved = client.reserve(chain("k", 2)).result(0)
        assert (reserved.slots, reserved.reasons) == ([None, None], ["unreachable"] * 2)
        assert client.commit([]).result(0) == []
        client.abort([])
        client.tell(Own("r", 1, 1))
        client.tell(Report([]))
        client.release(client.load(chain("k", 1), deadline_s=1).result(0))


def test_a_client_that_came_first_connects_when_the_store_comes(home):
    """It goes on trying."""
    with Engine(home / "s.sock", connect_s=0.01) as engine:
        assert not engine.connected
        with running(home):
            eventually(lambda: engine.client.connected)
            eventually(lambda: engine.put(chain("k", 2)) == ["", ""])


# -- loss


def lose(store: StoreProcess, name: str) -> None:
    """End one client's connection from the store's side; its process goes on."""
    with store.server._lock:
        for connection in store.server._connections:
            if connection.session and connection.session.engine == name:
                connection.shutdown()


def test_a_restarted_store_is_another_boot(home):
    """Pending answers resolve with nothing; the client is back by itself, and knows that it must store again."""
    with running(home, dram=8 * STRIDE) as store:
        engine = Engine(store)
        boot = engine.client.boot_id
        engine.put(chain("k", 3))
        loaded = engine.load(chain("k", 3))
    eventually(lambda: not engine.client.connected)
    assert engine.find(chain("k", 3)) == []
    assert engine.read(loaded) == 0
    eventually(lambda: not engine.client._copying)  # a store has new segments for ever
    with running(home, dram=8 * STRIDE):
        eventually(lambda: engine.client.connected)
        assert engine.client.boot_id not in ("", boot)
        assert engine.find(chain("k", 3)) == []
        assert engine.read(loaded) == 0, "slots of before mean nothing now"
        engine.put_all(chain("k", 3))
        assert engine.get(chain("k", 3)) == 3
    engine.client.close()


def test_slots_of_a_lost_connection_are_in_quarantine_until_it_is_back(store, http):
    """Its process lives and may still be copying: nobody gets them before it has said that it does not."""
    engine = Engine(store, name="lost")
    slots = engine.reserve(chain("k", 4)).slots
    copying = engine.client.mapped(slots[0].ref, slots[0].connection)
    segment = copying.__enter__()
    lose(store, "lost")
    eventually(lambda: len(pool(store).quarantined) == 4 and not engine.client.connected)
    assert http.total("quarantined_slots") == 4
    with Engine(store, name="other") as other:
        eventually(lambda: pool(store).provisioned == 64)
        assert other.put(chain("o", 64)).count("") == 60
        segment.slot(slots[0].ref.index)[:] = 0xEE  # the copy that was under way ends only now
        assert other.get(chain("o", 60)) == 60
        assert not engine.client.connected, "it comes back when its copies have ended"
        copying.__exit__(None, None, None)
        eventually(lambda: pool(store).quarantined == [])
        assert eventually(lambda: other.put(chain("o", 64)).count("present") == 60)
    assert engine.commit(slots) == [False] * 4
    assert not engine.client.write(slots[0], payload(slots[0].key))
    engine.client.close()


def test_of_a_client_that_is_lost_nothing_is_kept_but_its_slots(store):
    """They may be in quarantine for ever, where nobody sees its process end: its prompts would take tens of MiB."""
    with Engine(store) as engine:
        engine.client.lookup("r", chain("k", 4), prompt_tokens=64, defer=True).result(10)
        engine.reserve(chain("k", 2))
        (session,) = store.server.sessions()
        assert session.chains.get("r")
    eventually(lambda: store.server._lost)
    assert store.server._lost[0].session is session
    assert len(session.quarantined) == 2
    assert session.chains.get("r") is None


def test_long_chunks_that_were_damaged_or_renewed_are_refused(home):
    """Of several windows, damaged in the last: none of the four is used."""
    long = 5 << 20
    segment = whole_pages(long)
    with running(home, dram=4 * segment) as store, Engine(store, chunk_bytes=long) as engine:
        eventually(lambda: pool(store).provisioned == 4)
        engine.put_all(chain("k", 4))
        assert [engine.get(chain("k", 4)) for _ in range(3)] == [4] * 3
        asked = engine.client.load(chain("k", 4), deadline_s=5)
        kept, out = asked.result(15), np.empty(long, np.uint8)
        for slot in kept.slots:
            pool(store).pool.get(slot.key).view()[long - 1] ^= 1
        assert [engine.client.read(slot, out) for slot in kept.slots] == [False] * 4
        assert [slot.damaged for slot in kept.slots] == [True] * 4
        for slot in kept.slots:
            place = pool(store).pool.get(slot.key)
            place.view()[long - 1] ^= 1
            place.segment.renew(place.index)
        assert [engine.client.read(slot, out) for slot in kept.slots] == [False] * 4
        assert [slot.damaged for slot in kept.slots] == [False] * 4, "another chunk is there, perhaps"


def test_a_client_that_is_back_before_its_loss_was_noticed(store):
    """Its old connection ends, and its slots are free."""
    first, frames, _ = raw(store.server.path, hello(client="same"))
    frames.send(Reserve(1, "r", chain("k", 3), b""))
    eventually(lambda: pinned(store) == 3)
    second, _, welcome = raw(store.server.path, hello(client="same"))
    assert welcome.refusal == ""
    eventually(lambda: pinned(store) == 0 and pool(store).quarantined == [])
    eventually(lambda: len(store.server.sessions()) == 1)
    first.close()
    second.close()


def test_a_client_that_was_welcomed_too_late_does_not_end_its_next_connection(store, monkeypatch):
    """It had given up, and was back, while room was made for it: what it does since goes on."""
    asked, keep, go_on = [], store.store.namespaces.keep, threading.Event()

    def kept() -> None:
        asked.append(None)
        if len(asked) == 1:
            go_on.wait(30)
        keep()

    monkeypatch.setattr(store.store.namespaces, "keep", kept)
    late = dial(store.server.path)
    Frames(late, Reply).send(hello(client="same"))
    eventually(lambda: asked)
    late.close()
    again, frames, _ = raw(store.server.path, hello(client="same"))
    frames.send(Reserve(1, "r", chain("k", 3), b""))
    eventually(lambda: pinned(store) == 3)
    go_on.set()
    eventually(lambda: len(store.server._connections) == 1)
    frames.send(Reserve(2, "r", chain("k", 5), b""))
    eventually(lambda: pinned(store) == 5)
    again.close()


def test_a_release_of_before_does_not_hit_a_lease_of_now(store):
    """Pins of a lost connection go at once, and lease numbers begin anew with every connection."""
    with Engine(store, name="lost") as engine:
        engine.put(chain("k", 2))
        before = engine.load(chain("k", 2))
        lose(store, "lost")
        eventually(lambda: pinned(store) == 0)
        eventually(lambda: engine.client._connection > before.connection and engine.client.connected)
        now = engine.load(chain("k", 2))
        assert now.lease == before.lease
        engine.client.release(before)
        engine.client.lookup("r", [], prompt_tokens=0).result(5)
        assert pinned(store) == 2
        engine.client.release(now)
        eventually(lambda: pinned(store) == 0)


def test_a_future_cannot_be_cancelled(store):
    """Its reply may bring slots to give back; cancelling it does not harm the connection either."""
    with Engine(store) as engine:
        engine.put(chain("k", 1))
        future = engine.client.load(chain("k", 1), deadline_s=1)
        assert not future.cancel()
        engine.client.release(future.result(5))
        assert engine.get(chain("k", 1)) == 1
        assert engine.client.errors == 0


# -- nothing is left


@pytest.mark.parametrize("fails", ["a thread for it", "to make room for it"])
def test_a_client_that_cannot_be_greeted_leaves_nothing_and_the_next_one_is_welcome(store, http, monkeypatch, fails):
    """As where the process may have no more threads; it is counted."""

    def failing(*_):
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    place = (store.server, "_spawn") if fails == "a thread for it" else (store.store.pools, "open_on_disk")
    monkeypatch.setattr(*place, failing)
    with Engine(store, connect_s=10) as engine:
        assert engine.connected
        assert len(store.server._connections) == 1
    eventually(lambda: store.store.namespaces._sessions == [])
    assert http.total("internal_errors_total", place="converse") == 1


@pytest.mark.parametrize("thread", ["disk-write", "upkeep", "http"])
def test_a_store_for_which_no_thread_can_be_had_says_so_and_leaves_nothing(home, monkeypatch, thread):
    """As where a container may have few: an error that its command tells, and no traceback."""
    threads = threading.active_count()
    with monkeypatch.context() as patch:
        no_more_threads(patch, named=thread)
        with pytest.raises((OSError, StartError), match="not all threads"), running(home, disk="1MiB"):
            raise AssertionError
    assert [*home.iterdir()] == []
    gc.collect()  # the error's frames, in which idle threads are held
    eventually(lambda: threading.active_count() <= threads)


def test_clients_and_stores_leave_no_descriptors_threads_or_files(home):
    """After many rounds of everything."""

    def round_(number: int) -> None:
        with running(home, disk="1MiB") as store:
            for turn in range(3):
                with Engine(store, name=f"{number}-{turn}") as engine:
                    engine.put(chain(f"k{turn}", 10))
                    assert engine.get(chain(f"k{turn}", 10)) == 10
                    engine.reserve(chain("unwritten", 2))

    threads = threading.active_count()  # other tests' libraries may keep some
    round_(0)
    eventually(lambda: threading.active_count() <= threads)
    before = descriptors()
    for number in range(1, 4):
        round_(number)
    eventually(lambda: descriptors() <= before)
    eventually(lambda: threading.active_count() <= threads)
    assert not (home / "s.sock").exists()


def test_the_end_waits_for_every_thread_however_many_begin_at_once(store, monkeypatch):
    """A client that comes as the store starts is greeted while others still begin."""
    stop, server = threading.Event(), store.server
    alive = threading.Thread.is_alive

    def slow(thread):
        time.sleep(0)  # others begin as well
        return alive(thread)

    monkeypatch.setattr(threading.Thread, "is_alive", slow)
    begun = []
    at_once(lambda _: begun.extend(server._spawn(stop.wait) for _ in range(8)), 4)
    left_out = set(begun) - set(server._threads)
    stop.set()
    assert not left_out


# -- starting


def test_two_stores_cannot_share_a_socket(home, store):
    """The second says which; the first goes on, and so does its socket."""
    second = StoreProcess(settings(home, state_dir=home / "other"))
    with pytest.raises(OSError, match="another store listens here"):
        second.start()
    second.stop()
    with Engine(store) as engine:
        assert engine.connected


def test_a_socket_left_by_a_crash_is_taken_over(home):
    """It answers nobody."""
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(home / "s.sock"))
    stale.close()
    with running(home) as store, Engine(store) as engine:
        assert engine.connected


def test_a_file_in_the_sockets_place_is_left_alone(home):
    """A wrong path in the configuration deletes nothing."""
    (home / "s.sock").write_text("precious")
    process = StoreProcess(settings(home))
    with pytest.raises(OSError, match="is not a socket"):
        process.start()
    process.stop()
    assert (home / "s.sock").read_text() == "precious"


def test_a_socket_may_lie_in_a_folder_that_the_store_makes(home):
    """Its state's, at the first start."""
    with running(home, state_dir=home / "new", socket=home / "new" / "s.sock") as store:
        assert store.server.path.is_socket()


def test_a_place_where_no_socket_can_be_is_told(home, monkeypatch):
    """The kernel's own words name no path."""
    process = StoreProcess(settings(home))
    with monkeypatch.context() as refusing:
        refusing.setattr(process.server, "path", Path("/proc/s.sock"))
        with pytest.raises(OSError, match=r"^/proc/s\.sock: (?!\[Errno)"):
            process.start()
    process.stop()


def test_the_socket_is_its_owners_alone(store):
    """Whoever may connect may read every chunk."""
    assert store.server.path.stat().st_mode & 0o777 == 0o600


def test_a_store_that_cannot_start_leaves_nothing(home, store):
    """Neither descriptors nor threads nor the lock of its state, whatever it was that failed."""
    port = int(store.address.rsplit(":", 1)[1])
    http = Http(store.address)
    http.text("/healthz")  # what the first store opens late is open now
    before, threads = descriptors(), threading.active_count()
    other = {"state_dir": home / "other", "disk": "1MiB"}
    for more in (
        {"http": {"port": port}},
        {"remote": {"url": "redis://h/0", "password_file": home / "none"}},
        {"disk": {"path": home / "s.sock" / "x", "capacity": 0}},
    ):
        with pytest.raises((OSError, DocumentError), match=r"http|remote\.password_file|directory"):
            StoreProcess(settings(home, **(other | more)))
    eventually(lambda: descriptors() <= before)
    eventually(lambda: threading.active_count() <= threads)
    http.close()
