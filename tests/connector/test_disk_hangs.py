"""A local disk that hangs: its index answers, its room is nobody else's, and flushes end."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from connector.local_disk import NBYTES, SLOT, fill, intact, opened, taken, write
from connector.stores import PATIENCE_S, A, B, chain, eventually, view
from tiertune_connector.tiers import disk
from tiertune_connector.tiers import slab as module
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.slab import Slab


class Hanging:
    """A disk that, until it is let go, answers nothing of what a test names."""

    def __init__(self, monkeypatch) -> None:
        self.entered, self.free = threading.Semaphore(0), threading.Event()
        self._monkeypatch = monkeypatch
        self._threads = ThreadPoolExecutor(8)

    def at(self, owner, name) -> None:
        real = getattr(owner, name)

        def hung(*args, **more):
            self.entered.release()
            self.free.wait()
            return real(*args, **more)

        self._monkeypatch.setattr(owner, name, hung)

    def begin(self, call):
        """On a thread, up to where it hangs."""
        began = self.start(call)
        assert self.entered.acquire(timeout=PATIENCE_S)
        return began

    def start(self, call):
        return self._threads.submit(call)

    def does_not_stop(self, call):
        return self.start(call).result(PATIENCE_S)

    def go_on(self) -> None:
        self.free.set()
        self._threads.shutdown()


@pytest.fixture
def hanging(monkeypatch):
    hanging = Hanging(monkeypatch)
    yield hanging
    hanging.go_on()


@pytest.mark.parametrize("waits", ["to overwrite", "to make room", "to flush", "to drop what was read", "to open"])
def test_while_the_disk_hangs_its_index_answers(tier, hanging, waits):
    """Whoever waits for the disk holds up nobody who only asks, or changes, the index; and goes on when it does."""
    keys, small, calls = chain("k", 16), {A: (4 * SLOT, "")}, {}
    fill(tier, keys)
    pool, out = tier.pools[A], view(np.empty(NBYTES, np.uint8))
    if waits == "to drop what was read":
        real = pool.slab.read

        def read(slot, key, out, came):
            header = real(slot, key, out, came)
            pool.drop(key)
            return header

        pool.slab.read = read
    hanging.at(*{"to overwrite": (Slab, "_behead"), "to open": (Slab, "headers")}.get(waits, (module, "punch_hole")))
    calls = {
        "to overwrite": lambda: write(tier, b"one more") is Outcome.OK,
        "to make room": lambda: (tier.retune(16 * SLOT, small), tier.settle()),
        "to flush": lambda: tier.flush() == (Outcome.OK, 16),
        "to drop what was read": lambda: tier.read(A, keys[0], out)[0] is Outcome.OK,
        "to open": lambda: tier.attach(B, NBYTES) is Outcome.OK,
    }
    began = hanging.begin(calls[waits])
    hanging.does_not_stop(lambda: tier.present(A, keys))
    hanging.does_not_stop(tier.usage)
    hanging.does_not_stop(lambda: tier.retune(16 * SLOT, small))
    assert hanging.does_not_stop(lambda: tier.attach(A, NBYTES)) is Outcome.OK
    hanging.free.set()
    assert began.result(PATIENCE_S)
    while tier.settle():
        pass
    assert len(pool.pool) <= 4
    assert (pool.pool.pinned, pool.unsure) == (0, set())
    assert all(write(tier, key) is Outcome.OK for key in chain("after", 4))
    assert taken(tier.root) <= 4 * SLOT


def test_room_that_was_not_given_back_yet_is_no_others(tier, tmp_path, hanging):
    """Another namespace has it once it is wiped; the same one may take it over at once."""
    fill(tier, chain("k", 16))
    assert tier.attach(B, NBYTES) is Outcome.OK
    pool, other = tier.pools[A], tier.pools[B]
    hanging.at(module, "punch_hole")
    tier.retune(16 * SLOT, {A: (2 * SLOT, "")})
    began = hanging.begin(tier.settle)
    assert (len(pool.pool), pool.taken_bytes, other.pool.capacity) == (2, 8 * SLOT, 8)
    tier.retune(16 * SLOT, {A: (7 * SLOT, "")})
    assert (pool.pool.capacity, pool.taken_bytes, other.pool.capacity) == (7, 8 * SLOT, 8)
    taken_over = [pool.reserve(key) for key in chain("l", 5)]
    assert pool.unsure.issuperset(taken_over)
    assert len(pool.unsure) == 6, "and the one that is being wiped"
    assert pool.taken_bytes == 8 * SLOT
    hanging.free.set()
    began.result(PATIENCE_S)
    assert other.pool.capacity == 9
    assert taken(tmp_path) <= 16 * SLOT


def test_a_slot_that_is_being_wiped_is_not_written(tier, hanging):
    """A pool whose other slots are all in use is full for that moment: a wipe must not hit what is new."""
    fill(tier, chain("k", 16))
    pool = tier.pools[A]
    hanging.at(module, "punch_hole")
    with tier.lock:
        pool.drop(chain("k", 1)[0])
    began = hanging.begin(tier.settle)
    assert pool.reserve(b"new") is None
    hanging.free.set()
    began.result(PATIENCE_S)
    assert write(tier, b"new") is Outcome.OK


def test_a_flush_that_waits_for_others_is_a_time_out(tier, monkeypatch, hanging):
    """What somebody else was about to wipe, or to overwrite, a restart might still find."""
    monkeypatch.setattr(disk, "_PATIENCE_S", 0.01)
    fill(tier, chain("k", 16))
    hanging.at(Slab, "_behead")
    began = hanging.begin(lambda: write(tier, b"one more"))
    assert hanging.does_not_stop(tier.flush) == (Outcome.TIMEOUT, 15)
    hanging.free.set()
    assert began.result(PATIENCE_S) is Outcome.OK
    assert tier.flush() == (Outcome.OK, 1)


def test_a_flush_reaches_what_is_being_read(tier, tmp_path, hanging):
    """Nobody finds the chunk meanwhile; the reader finishes, and then, when the flush is over, no restart does."""
    fill(tier, chain("k", 16))
    (file,) = tmp_path.glob("*.slab")
    hanging.at(Slab, "read")
    reading = hanging.begin(lambda: intact(tier, chain("k", 1)[0]))
    flushing = hanging.start(tier.flush)
    eventually(lambda: tier.present(A, chain("k", 1)) == (Outcome.OK, 0))
    hanging.free.set()
    assert reading.result(PATIENCE_S)
    assert flushing.result(PATIENCE_S) == (Outcome.OK, 16)
    assert not file.read_bytes().strip(b"\0")


def test_a_flush_does_not_wait_for_a_read_for_ever(tier, monkeypatch, hanging):
    """Its header is still there: that is told."""
    monkeypatch.setattr(disk, "_PATIENCE_S", 0.01)
    write(tier, b"key")
    hanging.at(Slab, "read")
    reading = hanging.begin(lambda: intact(tier, b"key"))
    assert hanging.does_not_stop(tier.flush) == (Outcome.TIMEOUT, 1)
    hanging.free.set()
    assert reading.result(PATIENCE_S)
    assert tier.flush() == (Outcome.OK, 0)


def test_a_flush_waits_for_who_takes_up_what_it_could_not_wipe(tier, monkeypatch, hanging):
    """Until the new chunk is whole a restart may find the old one."""
    monkeypatch.setattr(disk, "_PATIENCE_S", PATIENCE_S)
    keys = chain("k", 2)
    fill(tier, keys)
    pool = tier.pools[A]
    kept = pool.pool.get(keys[1])
    monkeypatch.setattr(Slab, "wipe", lambda _, slot: slot != kept)
    hanging.at(Slab, "read")
    reading = hanging.begin(lambda: intact(tier, keys[0]))
    flushing = hanging.start(tier.flush)
    eventually(lambda: tier._wiped._waiters)
    with tier.lock:
        assert pool.reserve(b"new") == kept
    hanging.free.set()
    assert reading.result(PATIENCE_S)
    wait([flushing], 0.2)
    assert not flushing.done()
    with tier.lock:
        pool.abort(b"new", kept)
    tier.settle()
    assert flushing.result(PATIENCE_S) == (Outcome.ERROR, 2)


def test_a_flush_waits_for_a_removal_that_may_fail(tier, monkeypatch, hanging):
    """The file of a namespace that is over keeps what the disk refused to wipe: no success before it is gone."""
    write(tier, b"key")
    monkeypatch.setattr(Slab, "wipe", lambda *_: False)
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    assert tier.flush(A) == (Outcome.ERROR, 1)
    tier.pools[A].lends = True
    tier.retune(0, {})
    hanging.at(Path, "unlink")
    removing = hanging.begin(tier.settle)
    flushing = hanging.start(lambda: tier.flush(A))
    wait([flushing], 0.2)
    hanging.free.set()
    assert flushing.result(PATIENCE_S) == (Outcome.ERROR, 0)
    assert not removing.result(PATIENCE_S)


def test_a_flush_empties_the_index_while_somebody_opens(tier, hanging):
    """What a hanging disk does not let it wipe yet is found by nobody all the same."""
    write(tier, b"key")
    hanging.at(Slab, "headers")
    opening = hanging.begin(lambda: tier.attach(B, NBYTES))
    flushing = hanging.start(tier.flush)
    eventually(lambda: tier.present(A, [b"key"]) == (Outcome.OK, 0))
    hanging.free.set()
    assert flushing.result(PATIENCE_S) == (Outcome.OK, 1)
    assert opening.result(PATIENCE_S) is Outcome.OK


def test_a_flush_that_syncs_keeps_no_namespace_from_opening(tier, hanging):
    """A sync may take seconds where much was written: clients that come meanwhile would find the disk late."""
    write(tier, b"key")
    hanging.at(module.os, "fsync")
    flushing = hanging.begin(tier.flush)
    assert hanging.does_not_stop(lambda: tier.attach(B, NBYTES)) is Outcome.OK
    hanging.free.set()
    assert flushing.result(PATIENCE_S) == (Outcome.OK, 1)


def test_a_flush_that_the_end_cuts_off_is_no_success(tier, tmp_path, hanging):
    """A restart finds what was not wiped by then."""
    fill(tier, chain("k", 3))
    hanging.at(module, "punch_hole")
    flushing = hanging.begin(tier.flush)
    tier.close()
    hanging.free.set()
    assert flushing.result(PATIENCE_S) == (Outcome.ERROR, 3)
    again = opened(tmp_path)
    assert again.usage().chunks == 2
    again.close()


def test_a_file_system_that_does_not_answer_has_no_size(tier, monkeypatch, hanging):
    """Whoever asks is told so."""
    assert tier.room_bytes > 0
    monkeypatch.setattr(disk, "_SIZE_S", 0.01)
    hanging.at(disk.shutil, "disk_usage")
    with pytest.raises(OSError, match="timed out"):
        assert tier.room_bytes


def test_a_busy_disk_tells_its_size(tier, hanging):
    """Windows that wait their turn are no reason to refuse a larger disk, which may be what they need."""
    hanging.at(Slab, "read")
    reading = [tier._readers.submit(Slab.read) for _ in range(8)]
    assert tier.room_bytes > 0
    assert not any(each.done() for each in reading)
