"""Local disk: restarts, damage, faults of the medium, capacity that changes under use."""

import errno
import os
import threading

import numpy as np
import pytest

from connector.stores import chain, payload, view
from tiertune_connector.chunk import HEADER_BYTES, Origin
from tiertune_connector.tiers import disk as module
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.segment import PAGE

A, B = "a" * 32, "b" * 32
NBYTES = 2 * PAGE + 7
SLOT = 4 * PAGE
TENANT = b"t" * 16


def opened(root, chunks: int = 16) -> DiskTier:
    tier = DiskTier(root)
    tier.recover(chunks * SLOT, "lru")
    tier.retune(chunks * SLOT, {})
    return tier


@pytest.fixture
def tier(tmp_path):
    tier = opened(tmp_path)
    yield tier
    tier.close()


def write(tier, key, namespace=A, nbytes=NBYTES):
    return tier.write(namespace, key, view(payload(key, nbytes)), Origin("host-a", TENANT))


def intact(tier, key, namespace=A, nbytes=NBYTES):
    out = np.empty(nbytes, np.uint8)
    outcome, origin = tier.read(namespace, key, view(out))
    assert outcome is not Outcome.OK or np.array_equal(out, payload(key, nbytes))
    return outcome is Outcome.OK and origin.tenant == TENANT


def slab_file(root, namespace=A):
    (path,) = root.glob(f"{namespace}-*.slab")
    return path


def test_the_index_is_rebuilt_after_a_restart(tier, tmp_path):
    """Every chunk is there again, with its tenant; the last one, too, whose payload ends within its pages."""
    keys = chain("k", 5)
    for key in keys:
        write(tier, key)
    tier.close()
    again = opened(tmp_path)
    assert again.present(A, keys) == (Outcome.OK, 5)
    assert all(intact(again, key) for key in keys)
    assert again.flush(tenant=TENANT) == (Outcome.OK, 5)
    again.close()


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
    for key in keys:
        write(tier, key)
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
    assert slab_file(tmp_path).stat().st_blocks * 512 <= 8 * SLOT
    again.close()


def test_a_payload_cut_off_is_found_when_it_is_read(tier, tmp_path):
    """The index trusts headers; the first read does not."""
    keys = chain("k", 2)
    for key in keys:
        write(tier, key)
    tier.close()
    os.truncate(slab_file(tmp_path), SLOT + PAGE + 10)
    again = opened(tmp_path)
    assert again.present(A, keys) == (Outcome.OK, 2)
    assert not intact(again, keys[1])
    assert again.present(A, keys) == (Outcome.OK, 1)
    again.close()


def test_a_restart_with_less_room_keeps_within_it(tier, tmp_path):
    """Chunks beyond the new capacity are gone, from the disk too."""
    for key in chain("k", 10):
        write(tier, key)
    tier.close()
    again = opened(tmp_path, chunks=4)
    assert again.usage().chunks == 4
    assert slab_file(tmp_path).stat().st_blocks * 512 <= 4 * SLOT
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
    for key in keys:
        write(tier, key)
    slab = tier.slabs[A]
    real, seen = slab.read, []

    def read(slot, key, out):
        if not seen:
            seen.append(slot)
            tier.retune(0, {})
            assert slab.pool.get(key) == slot
        return real(slot, key, out)

    slab.read = read
    assert intact(tier, keys[0])
    assert tier.usage().chunks == 0
    assert slab.path.stat().st_blocks == 0


def test_capacity_falls_under_a_write(tier):
    """A chunk that is being written when there is no room for it any more leaves when it is whole."""
    assert tier.attach(A, NBYTES, "lru") is Outcome.OK
    slab = tier.slabs[A]
    real = slab.write

    def shrinking(slot, header, data):
        tier.retune(0, {})
        real(slot, header, data)

    slab.write = shrinking
    write(tier, b"key")
    assert tier.usage().chunks == 0
    assert slab.path.stat().st_blocks == 0


def test_a_flush_reaches_what_is_being_read(tier, tmp_path):
    """The reader finishes; nobody else finds the chunk, nor does a restart."""
    write(tier, b"key")
    slab = tier.slabs[A]
    real = slab.read

    def read(slot, key, out):
        header = real(slot, key, out)
        assert tier.flush() == (Outcome.OK, 1)
        assert tier.present(A, [b"key"]) == (Outcome.OK, 0)
        return header

    slab.read = read
    assert intact(tier, b"key")
    assert tier.usage().chunks == 0
    tier.close()
    again = opened(tmp_path)
    assert again.present(A, [b"key"]) == (Outcome.OK, 0)
    again.close()


@pytest.mark.parametrize(
    ("number", "outcome"), [(errno.ENOSPC, Outcome.FULL), (errno.EDQUOT, Outcome.FULL), (errno.EIO, Outcome.ERROR)]
)
def test_a_failing_disk_is_an_outcome_and_loses_no_slot(tier, monkeypatch, number, outcome):
    """A full disk is told from a broken one; afterwards all the capacity is there."""
    keys = chain("k", 16)

    def fails(*_):
        raise OSError(number, "fault")

    write(tier, keys[0])
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", fails)
        for key in keys[1:8]:
            assert write(tier, key) is outcome
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "preadv", fails)
        assert tier.read(A, keys[0], view(np.empty(NBYTES, np.uint8)))[0] is Outcome.ERROR
    assert intact(tier, keys[0])
    for key in keys:
        assert write(tier, key) is Outcome.OK
    assert all(intact(tier, key) for key in keys)


def test_evictions_on_a_failing_disk_do_not_raise(tier, monkeypatch):
    """Making room fails as an outcome, too, and the pool stays consistent."""
    for key in chain("k", 16):
        write(tier, key)

    def fails(*_):
        raise OSError(errno.EIO, "fault")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", fails)
        assert write(tier, b"one more") is Outcome.ERROR
    for key in chain("l", 16):
        assert write(tier, key) is Outcome.OK
    assert tier.usage().chunks == 16


def test_a_flush_that_cannot_be_made_sure_of_is_no_success(tier, monkeypatch):
    """Where the header can neither be punched out nor overwritten, a restart could find the chunk again."""
    write(tier, b"key")

    def fails(*_):
        raise OSError(errno.EIO, "fault")

    with monkeypatch.context() as patch:
        patch.setattr(module, "punch_hole", lambda *_: False)
        patch.setattr(module.os, "pwrite", fails)
        assert tier.flush() == (Outcome.ERROR, 1)
    assert tier.present(A, [b"key"]) == (Outcome.OK, 0)


def test_a_file_system_without_holes_is_served_all_the_same(tmp_path, monkeypatch):
    """Headers are overwritten instead; a restart finds none of what left."""
    monkeypatch.setattr(module, "punch_hole", lambda *_: False)
    tier = opened(tmp_path, chunks=4)
    for key in chain("k", 9):
        assert write(tier, key) is Outcome.OK
    tier.retune(2 * SLOT, {})
    tier.flush(tenant=b"x" * 16)
    tier.close()
    again = opened(tmp_path, chunks=9)
    assert again.usage().chunks == 2
    again.close()


def test_a_namespace_that_the_disk_refuses_is_an_outcome(tier, monkeypatch):
    """A slab that cannot be opened is an error of the tier, not an exception of the store."""

    def fails(*_, **__):
        raise OSError(errno.EROFS, "fault")

    monkeypatch.setattr(module.os, "open", fails)
    assert tier.attach(B, NBYTES, "lru") is Outcome.ERROR
    assert write(tier, b"key", B) is Outcome.ERROR


def test_a_new_namespace_gets_its_share_at_once(tier):
    """The sum stays within the tier, whoever comes."""
    for key in chain("k", 16):
        write(tier, key)
    for key in chain("l", 16):
        assert write(tier, key, B) is Outcome.OK
        assert tier.usage().resident_bytes <= 16 * SLOT
    assert {name: slab.pool.capacity for name, slab in tier.slabs.items()} == {A: 8, B: 8}


def test_many_threads_on_few_slots(tier):
    """Readers, writers and a resizer at once: no foreign byte, no exception, no slot lost."""
    stop, errors = threading.Event(), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            key = b"%d" % rng.integers(0, 40)
            try:
                write(tier, key)
                intact(tier, key)
                if seed == 0:
                    tier.retune(int(rng.integers(0, 16)) * SLOT, {})
            except BaseException as error:  # noqa: BLE001 (any is the finding)
                errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    tier.retune(16 * SLOT, {})
    for key in chain("after", 16):
        assert write(tier, key) is Outcome.OK
    assert all(intact(tier, key) for key in chain("after", 16))
    assert tier.slabs[A].pool.pinned == 0


def test_no_descriptor_is_left_after_close(tmp_path):
    """Slabs and the directory's lock are closed."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    tier = opened(tmp_path)
    write(tier, b"key")
    tier.close()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
