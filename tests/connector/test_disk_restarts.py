"""Local disk after a restart, a crash or damage: what is found is whole, and where it belongs."""

import errno
import os
from contextlib import suppress
from unittest.mock import Mock

import numpy as np
import pytest

from connector.local_disk import NBYTES, SLOT, fill, intact, opened, slab_file, taken, write
from connector.stores import A, B, chain, view
from tiertune_connector.chunk import HEADER_BYTES
from tiertune_connector.tiers import slab as module
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE


def test_chunks_that_changed_places_are_damage(tier, tmp_path):
    """Each is whole, and not the one that was asked for."""
    keys = chain("k", 2)
    fill(tier, keys)
    slab = slab_file(tmp_path)
    bytes_ = slab.read_bytes().ljust(2 * SLOT, b"\0")
    slab.write_bytes(bytes_[SLOT:] + bytes_[:SLOT])
    assert [tier.read(A, key, view(np.empty(NBYTES, np.uint8)))[0] for key in keys] == [Outcome.CORRUPT] * 2


def test_a_file_under_the_name_of_another_namespace_has_nothing_for_it(tier, tmp_path):
    """As from a copy that went wrong: the chunks are whole, and of other weights."""
    keys = chain("k", 2)
    fill(tier, keys)
    tier.close()
    slab = slab_file(tmp_path)
    slab.rename(slab.with_name(slab.name.replace(A, B)))
    again = opened(tmp_path)
    assert again.attach(B, NBYTES) is Outcome.OK
    assert again.present(B, keys) == (Outcome.OK, 0)
    again.close()


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
        if bytes(data[:4]) == b"TTKV":
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


def test_a_restart_over_a_place_that_cannot_be_read_finds_the_rest(tier, tmp_path, monkeypatch, caplog):
    """A bad sector under a header: what else fails is no matter of one place, and is told."""
    keys, real = chain("k", 3), os.pread
    fill(tier, keys)
    tier.close()

    def pread(fd, count, offset):
        if offset == SLOT:
            raise OSError(number, os.strerror(number))
        return real(fd, count, offset)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pread", pread)
        number, failing = errno.ESTALE, DiskTier(tmp_path)
        with pytest.raises(OSError, match="Stale"):
            failing.recover(16 * SLOT, "lru")
        failing.close()
        number = errno.EIO
        again = opened(tmp_path)
    assert [again.present(A, [key])[1] for key in keys] == [1, 0, 1]
    assert "1 of 3 chunks cannot be read any more, and are lost" in caplog.text
    assert write(again, keys[1]) is Outcome.OK
    assert all(intact(again, key) for key in keys)
    assert taken(tmp_path) <= 3 * SLOT
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


@pytest.mark.parametrize("removed", [False, True])
def test_a_loss_of_power_brings_back_nothing_that_was_flushed(tier, tmp_path, monkeypatch, removed):
    """Nor in a file that was removed. It brings back all that was not synced, at worst."""
    fill(tier, chain("k", 3))
    file, real = slab_file(tmp_path), os.fsync
    synced = [file.read_bytes()]
    monkeypatch.setattr(module.os, "fsync", lambda fd: real(fd) or synced.append(file.read_bytes()))
    if removed:
        tier.pools[A].lends = True
        tier.retune(0, {})
        tier.settle()
    assert file.exists() is not removed
    assert tier.flush() == (Outcome.OK, 0 if removed else 3)
    tier.close()
    file.write_bytes(synced[-1])
    again = opened(tmp_path)
    assert again.usage().chunks == 0
    again.close()


def test_a_loss_of_power_brings_back_nothing_that_a_refusing_disk_kept_either(tier, tmp_path, monkeypatch):
    """The file of a namespace that is over may come back as it was last synced."""
    write(tier, b"key")
    file, real = slab_file(tmp_path), os.fsync
    synced = list[bytes]()
    with monkeypatch.context() as patch:
        patch.setattr(module.Slab, "wipe", lambda *_: False)
        assert tier.flush() == (Outcome.ERROR, 1)
    monkeypatch.setattr(module.os, "fsync", lambda fd: real(fd) or synced.append(file.read_bytes()))
    tier.pools[A].lends = True
    tier.retune(0, {})
    tier.settle()
    assert not file.exists()
    assert tier.flush() == (Outcome.OK, 0)
    tier.close()
    file.write_bytes(synced[-1])
    again = opened(tmp_path)
    assert again.usage().chunks == 0
    again.close()


def test_a_file_that_fails_as_it_is_closed_is_used_no_more(tier, tmp_path, monkeypatch):
    """Its descriptor, closed all the same, may be another file's a moment later."""
    write(tier, b"key")
    assert tier.flush() == (Outcome.OK, 1)
    tier.pools[A].lends = True
    tier.retune(0, {})
    with monkeypatch.context() as patch:
        patch.setattr(module.Slab, "close", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        with suppress(OSError):
            tier.settle()
    assert A not in tier.pools
    assert not list(tmp_path.glob("*.slab"))


def test_a_flush_that_cannot_be_synced_is_no_success(tier, monkeypatch):
    """A loss of power could undo it; the next one tries again."""
    write(tier, b"key")
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        assert tier.flush() == (Outcome.ERROR, 1)
    assert "Input/output error" in tier.why
    assert tier.flush() == (Outcome.OK, 0)


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
    assert again.attach(A, 5 * PAGE) is Outcome.OK
    assert again.present(A, [b"old"]) == (Outcome.OK, 0)
    keys = chain("k", 3)
    for key in keys:
        assert write(again, key, nbytes=5 * PAGE) is Outcome.OK
    assert all(intact(again, key, nbytes=5 * PAGE) for key in keys)
    assert write(again, b"small") is Outcome.ERROR, "a payload of another size is refused"
    assert [path.name for path in tmp_path.glob("*.slab")] == [f"{A}-{5 * PAGE}.slab"]
    again.close()
