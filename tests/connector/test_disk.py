"""Local disk: restarts, damage, faults of the medium, capacity that changes under use."""

import errno
import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from connector.local_disk import NBYTES, SLOT, TENANT, A, B, data_bytes, fill, intact, opened, taken, write
from connector.stores import amid, chain, view
from tiertune_connector.chunk import HEADER_BYTES
from tiertune_connector.tiers import disk
from tiertune_connector.tiers import slab as module
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.linux import punch_hole
from tiertune_connector.tiers.segment import PAGE


def slab_file(root):
    (path,) = root.glob(f"{A}-*.slab")
    return path


def test_the_index_is_rebuilt_after_a_restart(tier, tmp_path):
    """Every chunk is there again, with its tenant; the last one, too, whose payload ends within its pages."""
    keys = chain("k", 5)
    fill(tier, keys)
    tier.close()
    again = opened(tmp_path)
    assert again.present(A, keys) == (Outcome.OK, 5)
    assert all(intact(again, key) for key in keys)
    assert again.flush(tenant=TENANT) == (Outcome.OK, 5)
    again.close()


def test_a_slab_is_its_users_alone(tmp_path, umask):
    """Its folder, too, where the store makes it: who could open the lock could hold it."""
    umask(0)
    tier = opened(tmp_path / "disk")
    write(tier, b"key")
    tier.close()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "disk", slab_file(tmp_path / "disk"))]
    assert modes == [0o700, 0o600]


def test_chunks_that_changed_places_are_damage(tier, tmp_path):
    """Each is whole, and not the one that was asked for."""
    keys = chain("k", 2)
    fill(tier, keys)
    slab = slab_file(tmp_path)
    bytes_ = slab.read_bytes().ljust(2 * SLOT, b"\0")
    slab.write_bytes(bytes_[SLOT:] + bytes_[:SLOT])
    assert [tier.read(A, key, view(np.empty(NBYTES, np.uint8)))[0] for key in keys] == [Outcome.CORRUPT] * 2


def test_what_leaves_tells_when_it_was_used(tmp_path, clock):
    """When it came, or was read for a request; of a chunk of an earlier run that nobody read, nothing is known.

    Of the others also whether anything read them at all.
    """
    tier, left, keys = DiskTier(tmp_path, clock), [], chain("k", 8)
    tier.retune(4 * SLOT, {})
    began, first = clock.now, keys[0]
    for key in keys[:4]:
        write(tier, key)
        clock.now += 1.0
    tier.close()
    tier = DiskTier(tmp_path, clock)
    tier.recover(4 * SLOT, "lru")
    tier.retune(4 * SLOT, {})
    tier.on_evicted = left.extend
    assert intact(tier, first)
    for key in keys[4:]:
        clock.now += 1.0
        write(tier, key)
    assert [chunk.used_at for chunk in left] == [None, None, None, began + 4.0]
    assert {chunk.reason for chunk in left} == {"room"}
    tier.read(A, keys[4], view(np.empty(NBYTES, np.uint8)), use=False)
    write(tier, b"one more")
    assert left[-1].used_at == began + 5.0, "to look at it is no use"
    assert [chunk.used for chunk in left] == [True] * 4 + [False]
    assert intact(tier, keys[5])
    for number in range(8):
        write(tier, b"more %d" % number)
    used = [chunk.used for chunk in left[-8:]]
    assert used == [False] * 3 + [True] + [False] * 4, "what takes the place of one that was read is new"
    tier.close()


def test_a_restart_after_a_crash_finds_whole_chunks_only(tier, tmp_path, monkeypatch):
    """A writer that died between payload and header leaves a slot that is nobody's."""
    keys = chain("k", 3)
    write(tier, keys[0])
    real = os.pwrite

    def dies(fd, data, offset):
        if len(data) == HEADER_BYTES and bytes(data[:4]) == b"TTKV":
            raise KeyboardInterrupt
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", dies)
        with pytest.raises(KeyboardInterrupt):
            write(tier, keys[1])
    tier._owner.close()  # as a killed process leaves it
    again = opened(tmp_path)
    assert again.present(A, keys) == (Outcome.OK, 1)
    assert again.usage().chunks == 1
    assert write(again, keys[1]) is Outcome.OK
    assert intact(again, keys[0])
    assert intact(again, keys[1])
    again.close()


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (lambda file: file.truncate(3 * SLOT), 3),
        (lambda file: file.truncate(3 * SLOT + HEADER_BYTES // 2), 3),
        (lambda file: (file.seek(2 * SLOT), file.write(os.urandom(PAGE))), 4),
        (lambda file: (file.seek(0), file.write(os.urandom(5 * SLOT))), 0),
        (lambda file: file.truncate(0), 0),
        (lambda file: (file.seek(0, 2), file.write(b"x" * 999)), 5),
    ],
    ids=["slots cut off", "a header cut short", "a header of garbage", "all garbage", "empty", "garbage at the end"],
)
def test_a_harmed_file_gives_what_is_whole_and_takes_new_chunks(tier, tmp_path, harm, left):
    """Nothing that is torn is found; what is left is intact; the room of the rest is used again."""
    keys = chain("k", 5)
    fill(tier, keys)
    tier.close()
    with slab_file(tmp_path).open("r+b") as file:
        harm(file)
    again = opened(tmp_path, chunks=8)
    found = [key for key in keys if again.present(A, [key])[1]]
    assert len(found) == left
    assert all(intact(again, key) for key in found)
    for key in chain("new", 8):
        assert write(again, key) is Outcome.OK
        assert intact(again, key)
    assert taken(tmp_path) <= 8 * SLOT
    again.close()


def test_damage_that_two_find_at_a_time_is_told_once(tier, tmp_path):
    """As when a chunk of an earlier run is asked for while it is looked at: to one of them it is gone already."""
    write(tier, b"key")
    with slab_file(tmp_path).open("r+b") as file:
        file.seek(PAGE)
        file.write(b"damage")
    slab = tier.pools[A].slab
    real, outcomes = slab.read, []

    def read(slot, key, out, came):
        slab.read = real
        another = tier.read(A, b"key", memoryview(bytearray(NBYTES)), use=False)  # it begins later, and is first
        outcomes.append(another[0])
        return real(slot, key, out, came)

    slab.read = read
    outcomes.append(tier.read(A, b"key", memoryview(bytearray(NBYTES)))[0])
    assert outcomes == [Outcome.CORRUPT, Outcome.MISS]
    assert tier.usage().chunks == 0
    assert write(tier, b"key") is Outcome.OK
    assert intact(tier, b"key")


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


def test_a_restart_with_less_room_keeps_within_it(tier, tmp_path):
    """Chunks beyond the new capacity are gone, from the disk too."""
    fill(tier, chain("k", 10))
    tier.close()
    again = opened(tmp_path, chunks=4)
    assert again.usage().chunks == 4
    assert taken(tmp_path) <= 4 * SLOT
    again.close()


def test_another_chunk_size_starts_anew(tier, tmp_path):
    """What a namespace held with another chunk size is removed; no write reaches into another slot."""
    write(tier, b"old")
    tier.close()
    again = opened(tmp_path)
    assert again.attach(A, 5 * PAGE, "lru") is Outcome.OK
    assert again.present(A, [b"old"]) == (Outcome.OK, 0)
    keys = chain("k", 3)
    for key in keys:
        assert write(again, key, nbytes=5 * PAGE) is Outcome.OK
    assert all(intact(again, key, nbytes=5 * PAGE) for key in keys)
    assert write(again, b"small") is Outcome.ERROR, "a payload of another size is refused"
    assert [path.name for path in tmp_path.glob("*.slab")] == [f"{A}-{5 * PAGE}.slab"]
    again.close()


def test_two_stores_cannot_use_one_directory(tier, tmp_path):
    """The second is told which directory it is."""
    with pytest.raises(OSError, match=f"{tmp_path}: another store"):
        DiskTier(tmp_path)


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
    assert tier.attach(A, NBYTES, "lru") is Outcome.OK
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
    assert tier.attach(B, NBYTES, "lru") is Outcome.OK
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
    assert all(write(tier, key) is Outcome.OK for key in keys)
    assert all(intact(tier, key) for key in keys)


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
    assert tier.attach(B, NBYTES, "lru") is outcome
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
    with tier._lock:
        for key in chain("k", 16):
            pool.drop(key)
    assert tier.attach(B, NBYTES, "lru") is Outcome.OK
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


def test_no_descriptor_is_left_after_close(tmp_path):
    """Slabs and the directory's lock are closed."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    tier = opened(tmp_path)
    write(tier, b"key")
    tier.close()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
