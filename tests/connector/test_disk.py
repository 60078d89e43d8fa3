"""Local disk: whose it is, faults of the medium, capacity that changes under use."""

import errno
import gc
import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from connector.local_disk import NBYTES, SLOT, data_bytes, fill, intact, opened, slab_file, taken, write
from connector.stores import A, B, amid, at_once, chain, no_more_threads, view
from tiertune_connector.tiers import disk
from tiertune_connector.tiers import slab as module
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.linux import punch_hole
from tiertune_connector.tiers.segment import PAGE


def test_a_slab_is_its_users_alone(tmp_path, umask):
    """Its folder, too, where the store makes it: who could open the lock could hold it."""
    umask(0)
    tier = opened(tmp_path / "disk")
    write(tier, b"key")
    tier.close()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "disk", slab_file(tmp_path / "disk"))]
    assert modes == [0o700, 0o600]


def test_what_a_file_takes_is_told_without_the_file_systems_own(tmp_path):
    """Tests hold a slab to its bound by its data alone, however many pieces it is in; a hole takes nothing."""
    with (tmp_path / "pieces").open("wb") as file:
        for place in range(12):
            file.seek(2 * place * PAGE)
            file.write(bytes(PAGE))
            file.flush()
            os.fsync(file)
        assert data_bytes(Path(file.name)) == 12 * PAGE
        punch_hole(file.fileno(), 0, 22 * PAGE)
        assert data_bytes(Path(file.name)) == PAGE


def test_two_stores_cannot_use_one_directory(tier, tmp_path):
    """The second is told which directory it is."""
    with pytest.raises(OSError, match=f"{tmp_path}: another store"):
        DiskTier(tmp_path)


def test_a_disk_for_which_no_threads_can_be_had_leaves_nothing(tmp_path, monkeypatch):
    """Neither its folder nor a lock in it."""
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        with pytest.raises(OSError, match="not all threads"):
            DiskTier(tmp_path / "disk")
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_is_nothing_that_the_garbage_collector_goes_through(tier):
    """A disk may hold a million: a look at them all would stop the store."""
    keys = chain("k", 4)
    fill(tier, keys)
    held = [tier.pools[A].pool.get(key) for key in keys]
    assert None not in held
    assert not any(map(gc.is_tracked, held))


def test_capacity_falls_under_a_read(tier):
    """A chunk that is being read stays whole until then, and leaves afterwards."""
    keys = chain("k", 4)
    fill(tier, keys)
    pool = tier.pools[A]
    real, seen = pool.slab.read, []

    def read(slot, key, out, came):
        if not seen:
            seen.append(slot)
            tier.retune(0, {})
            assert pool.pool.get(key) == slot
        return real(slot, key, out, came)

    pool.slab.read = read
    assert intact(tier, keys[0])
    assert tier.usage().chunks == 0
    assert pool.slab.path.stat().st_blocks == 0


def test_capacity_falls_under_a_write(tier):
    """A chunk that is being written when there is no room for it any more leaves when it is whole."""
    assert tier.attach(A, NBYTES) is Outcome.OK
    slab = tier.pools[A].slab
    real = slab.write

    def shrinking(slot, header, data):
        tier.retune(0, {})
        real(slot, header, data)

    slab.write = shrinking
    write(tier, b"key")
    assert tier.usage().chunks == 0
    assert slab.path.stat().st_blocks == 0


def test_a_smaller_capacity_is_reached_in_steps(tmp_path):
    """However much is to leave, one step takes so many chunks; what grows has only what was given back."""
    tier, many = opened(tmp_path, chunks=200), 200
    fill(tier, chain("k", many))
    tier.retune(many * SLOT, {A: (20 * SLOT, ""), B: (180 * SLOT, "")})
    assert tier.attach(B, NBYTES) is Outcome.OK
    held, rooms, more = [many], [0], True
    while more:
        one, two = (tier.pools[name].pool for name in (A, B))
        assert (one.capacity + two.capacity) <= many
        assert taken(tmp_path) <= many * SLOT
        held.append(len(one))
        rooms.append(two.capacity)
        more = tier.settle()
    assert (held[-1], rooms[-1]) == (20, 180)
    assert len(held) > 4
    assert all(before - after <= 2 * disk.WIPED_AT_ONCE for before, after in pairwise(held))
    assert all(intact(tier, key) for key in list(tier.pools[A].pool))
    tier.close()


@pytest.mark.parametrize(("held", "free"), [(0, disk.WIPED_AT_ONCE), (180, 0)], ids=["empty", "full"])
def test_nobody_is_given_what_another_may_still_fill_or_has_not_given_back(tmp_path, held, free):
    """A step takes room from one at once; another has it when nothing can be there any more, nor is."""
    tier = opened(tmp_path, chunks=200)
    for namespace in (A, B):
        assert tier.attach(namespace, NBYTES) is Outcome.OK
    tier.retune(200 * SLOT, {A: (180 * SLOT, ""), B: (20 * SLOT, "")})
    while tier.settle():
        pass
    fill(tier, chain("k", held))
    tier.retune(200 * SLOT, {A: (20 * SLOT, ""), B: (180 * SLOT, "")})
    assert tier.pools[A].pool.capacity == 180 - disk.WIPED_AT_ONCE
    assert tier.pools[B].pool.capacity == 20 + free
    tier.close()


def test_slots_are_used_again(tier, tmp_path):
    """What was flushed and written anew, however often, makes no file longer: a start reads every slot's header."""
    for key in chain("k", 8):
        assert write(tier, key) is Outcome.OK
        assert tier.flush() == (Outcome.OK, 1)
    assert slab_file(tmp_path).stat().st_size <= SLOT


def test_pages_are_written_whole(tier, monkeypatch):
    """Of a page that it does not cache, the kernel would first read what is not overwritten."""
    real, written = os.pwrite, []
    monkeypatch.setattr(module.os, "pwrite", lambda fd, data, at: written.append((len(data), at)) or real(fd, data, at))
    monkeypatch.setattr(module, "punch_hole", lambda *_: False)
    for key in chain("k", 5):
        assert write(tier, key, nbytes=4 * PAGE) is Outcome.OK
        assert intact(tier, key, 4 * PAGE)
    assert tier.flush() == (Outcome.OK, 5)
    headers = [at // PAGE % 5 for nbytes, at in written if nbytes % PAGE == at % PAGE == 0]
    assert headers.count(0) == 3 * 5, "wiped, written, and wiped again"
    assert len(headers) == len(written)


@pytest.mark.parametrize(
    ("number", "outcome"), [(errno.ENOSPC, Outcome.FULL), (errno.EDQUOT, Outcome.FULL), (errno.EIO, Outcome.ERROR)]
)
def test_a_failing_disk_is_an_outcome_and_loses_no_slot(tier, monkeypatch, number, outcome):
    """A full disk is told from a broken one; afterwards all the capacity is there."""
    keys = chain("k", 16)
    fails = Mock(side_effect=OSError(number, "fault"))
    write(tier, keys[0])
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", fails)
        for key in keys[1:8]:
            assert write(tier, key) is outcome
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "preadv", fails)
        assert tier.read(A, keys[0], view(np.empty(NBYTES, np.uint8)))[0] is Outcome.ERROR
    assert intact(tier, keys[0])
    assert all(write(tier, key).kept for key in keys)
    assert all(intact(tier, key) for key in keys)


def test_a_chunk_that_cannot_be_read_any_more_is_written_anew(tier, monkeypatch):
    """A bad sector: kept, it would cost a failed load each time. Once is no proof, nor is a probe."""
    out = view(np.empty(NBYTES, np.uint8))
    fill(tier, [b"key", b"other"])
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "preadv", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        for key, use in ((b"key", True), (b"key", False), (b"other", True), (b"key", False)):
            assert tier.read(A, key, out, use=use)[0] is Outcome.ERROR
        assert tier.present(A, [b"key", b"other"]) == (Outcome.OK, 2)
    assert intact(tier, b"other")
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "preadv", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        for key in (b"key", b"other"):
            assert tier.read(A, key, out)[0] is Outcome.ERROR
    assert [tier.present(A, [key])[1] for key in (b"key", b"other")] == [0, 1]
    assert write(tier, b"key") is Outcome.OK
    assert intact(tier, b"key")


def test_evictions_on_a_failing_disk_do_not_raise(tier, monkeypatch):
    """Making room fails as an outcome, too, and the pool stays consistent."""
    fill(tier, chain("k", 16))
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", Mock(side_effect=OSError(errno.EIO, "fault")))
        assert write(tier, b"one more") is Outcome.ERROR
    assert all(write(tier, key) is Outcome.OK for key in chain("l", 16))
    assert tier.usage().chunks == 16


def test_a_flush_that_cannot_be_made_sure_of_is_no_success(tier, monkeypatch):
    """Where the header can neither be punched out nor overwritten, a restart could find the chunk again."""
    write(tier, b"key")
    with monkeypatch.context() as patch:
        patch.setattr(module, "punch_hole", lambda *_: False)
        patch.setattr(module.os, "pwrite", Mock(side_effect=OSError(errno.EIO, "fault")))
        assert tier.flush() == (Outcome.ERROR, 1)
    assert tier.present(A, [b"key"]) == (Outcome.OK, 0)


@pytest.mark.parametrize("left", ["flushed", "evicted"])
def test_a_flush_removes_what_the_disk_kept_before(tmp_path, monkeypatch, left):
    """Whoever flushes again, once the disk is well, is told the truth: no restart finds what is gone."""
    tier = opened(tmp_path, chunks=4)
    fill(tier, chain("k", 3))
    with monkeypatch.context() as patch:
        patch.setattr(module, "punch_hole", lambda *_: False)
        patch.setattr(module.os, "pwrite", Mock(side_effect=OSError(errno.EIO, "fault")))
        if left == "flushed":
            assert [tier.flush() for _ in range(2)] == [(Outcome.ERROR, 3), (Outcome.ERROR, 0)]
        else:
            tier.retune(0, {})
            tier.settle()
    assert tier.flush() == (Outcome.OK, 0)
    tier.close()
    again = opened(tmp_path, chunks=4)
    assert again.usage().chunks == 0
    again.close()


def test_a_flush_reaches_what_a_refusing_disk_kept_of_a_namespace_that_is_over(tmp_path, monkeypatch):
    """Its file could not be removed, either: a second flush is no success until the headers are gone."""
    tier = opened(tmp_path, chunks=4)
    fill(tier, chain("k", 3))
    with monkeypatch.context() as patch:
        patch.setattr(module, "punch_hole", lambda *_: False)
        patch.setattr(module.os, "pwrite", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        patch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        assert tier.flush(A) == (Outcome.ERROR, 3)
        tier.pools[A].lends = True
        tier.retune(0, {})
        tier.settle()
        assert tier.flush(A) == (Outcome.ERROR, 0)
        tier.settle()
    assert tier.flush(A) == (Outcome.OK, 0)
    tier.settle()
    assert (tier.pools, list(tmp_path.glob("*.slab"))) == ({}, [])
    tier.close()


def test_a_file_system_without_holes_is_served_all_the_same(tmp_path, monkeypatch):
    """Headers are overwritten instead; a restart finds none of what left."""
    monkeypatch.setattr(module, "punch_hole", lambda *_: False)
    tier = opened(tmp_path, chunks=4)
    assert all(write(tier, key) is Outcome.OK for key in chain("k", 9))
    tier.retune(2 * SLOT, {})
    tier.flush(tenant=b"x" * 16)
    tier.close()
    again = opened(tmp_path, chunks=9)
    assert again.usage().chunks == 2
    again.close()


@pytest.mark.parametrize(("number", "outcome"), [(errno.EROFS, Outcome.ERROR), (errno.ENOSPC, Outcome.FULL)])
def test_a_namespace_that_the_disk_refuses_is_an_outcome(tier, monkeypatch, number, outcome):
    """A slab that cannot be opened is no exception of the store; for want of room it is no error either."""
    monkeypatch.setattr(module.os, "open", Mock(side_effect=OSError(number, "fault")))
    assert tier.attach(B, NBYTES) is outcome
    assert write(tier, b"key", B) is outcome


def test_a_new_namespace_gets_its_share_at_once(tier):
    """The sum stays within the tier, whoever comes."""
    fill(tier, chain("k", 16))
    for key in chain("l", 16):
        assert write(tier, key, B) is Outcome.OK
        assert tier.usage().resident_bytes <= 16 * SLOT
    assert {name: pool.pool.capacity for name, pool in tier.pools.items()} == {A: 8, B: 8}


def test_a_namespace_that_comes_amid_a_flush_does_not_do_its_work(tier, monkeypatch):
    """However much is to be given back: an engine that is welcomed waits for a few chunks' room."""
    fill(tier, chain("k", 16))
    monkeypatch.setattr(disk, "WIPED_AT_ONCE", 4)
    pool, wiped = tier.pools[A], []
    real = pool.slab.wipe
    pool.slab.wipe = lambda slot: wiped.append(slot) or real(slot)
    with tier.lock:
        for key in chain("k", 16):
            pool.drop(key)
    assert tier.attach(B, NBYTES) is Outcome.OK
    assert len(wiped) == 4
    tier.settle()
    assert len(wiped) == 16


def test_a_namespace_that_comes_late_has_what_was_asked_for_it(tier):
    """It is opened by its first write: with its own room and algorithm, as if it had been there."""
    tier.retune(16 * SLOT, {B: (5 * SLOT, "arc")})
    assert write(tier, b"key", B) is Outcome.OK
    pool = tier.pools[B].pool
    assert (pool.capacity, pool.algorithm) == (5, "arc")


def test_many_threads_on_few_slots(tier):
    """Readers, writers and a resizer at once: no foreign byte, no exception, no slot lost."""

    def work(seed: int, stop: threading.Event) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            key = b"%d" % rng.integers(0, 40)
            write(tier, key)
            intact(tier, key)
            if seed == 0:
                tier.retune(int(rng.integers(0, 16)) * SLOT, {})

    with amid(work, 4):
        time.sleep(1.0)
    tier.retune(16 * SLOT, {})
    assert all(write(tier, key) is Outcome.OK for key in chain("after", 16))
    assert all(intact(tier, key) for key in chain("after", 16))
    assert tier.pools[A].pool.pinned == 0


def test_a_chunk_of_each_size_is_told(tier):
    """What probes read: with each number other ones; nothing of pools that hold none."""
    assert tier.one_of_each_size(0) == []
    for namespace, nbytes, count in ((A, NBYTES, 2), (B, 3 * NBYTES, 3)):
        for key in chain(namespace, count):
            assert write(tier, key, namespace, nbytes) is Outcome.OK
    told = [tier.one_of_each_size(number) for number in range(3)]
    assert [[(namespace, nbytes) for namespace, _, nbytes in each] for each in told] == [
        [(A, NBYTES), (B, 3 * NBYTES)]
    ] * 3
    assert {each[1][1] for each in told} == set(chain(B, 3))
    tier.flush(B)
    assert [namespace for namespace, *_ in tier.one_of_each_size(4)] == [A]


def test_nobody_takes_a_slot_to_wipe_as_its_slab_is_let_go(tier):
    """What left waits for others to wipe it: in between, a closed descriptor would be another file's by then."""
    alone = []

    def other():
        free = tier.lock.acquire(blocking=False)
        if free:
            tier.lock.release()
        alone.append(not free)

    class Left(list):
        def clear(self):
            at_once(lambda _: other(), 1)
            super().clear()

    fill(tier, chain("k", 2))
    tier.pools[A].left = Left()
    assert tier.attach(A, 3 * NBYTES) is Outcome.OK
    tier.pools[A].left = Left()
    tier.close()
    assert alone == [True, True]


def test_no_descriptor_is_left_after_close(tmp_path):
    """Slabs and the directory's lock are closed."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    tier = opened(tmp_path)
    write(tier, b"key")
    tier.close()
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_a_switch_of_algorithm_is_settled_step_by_step(tier, monkeypatch):
    """It is under way as long as chunks are left to be handed over, and whoever settles it is told so."""
    monkeypatch.setattr("tiertune_connector.tiers.disk.HANDED_OVER", 4)
    fill(tier, chain("k", 10))
    tier.retune(16 * SLOT, {A: (None, "arc")})
    assert [tier.settle() for _ in range(3)] == [True, False, False]
    assert tier.present(A, chain("k", 10)) == (Outcome.OK, 10)
