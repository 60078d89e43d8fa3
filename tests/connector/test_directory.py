"""A shared directory: several stores, a file system that goes away, bounds."""

import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from connector.stores import (
    CHUNK_BYTES,
    PATIENCE_S,
    A,
    B,
    Engine,
    Http,
    chain,
    eventually,
    payload,
    read_chunk,
    running,
    view,
)
from tiertune_connector import chunk
from tiertune_connector.chunk import HEADER_BYTES, NOBODY
from tiertune_connector.tiers.base import Outcome, Usage
from tiertune_connector.tiers.directory import DirectoryTier

NBYTES = 3000
FILE = NBYTES + HEADER_BYTES


def write(tier, key, namespace=A, nbytes=NBYTES):
    return tier.write(namespace, key, view(payload(key, nbytes)), NOBODY)


def read(tier, key, namespace=A):
    return read_chunk(tier, namespace, key, NBYTES)[0]


def intact(tier, key):
    return read(tier, key) is Outcome.OK


def opened(root, chunks=None, writer="host-a"):
    """One with room for so many chunks of its own."""
    return DirectoryTier(root, writer=writer, capacity_bytes=chunks and chunks * FILE)


def files(root):
    return [path for path in root.rglob("*") if path.is_file()]


def test_nobody_else_reads_what_stores_wrote(tmp_path, umask):
    """Prompts can be computed back from it; stores of one group may share, where the umask lets them."""
    for usual, folder, file in ((0o022, 0o750, 0o640), (0o002, 0o770, 0o660), (0, 0o770, 0o660)):
        umask(usual)
        root = tmp_path / f"{usual:o}"
        root.mkdir()
        write(opened(root), b"one")
        (path,) = root.rglob(b"one".hex())
        modes = [part.stat().st_mode & 0o777 for part in (path.parent.parent, path.parent, path)]
        assert modes == [folder, folder, file]


@pytest.mark.parametrize("names", [("host-a", "host-b"), ("gpu-a-eu-west-1-node-01", "gpu-a-eu-west-1-node-02")])
def test_a_store_bounds_only_what_it_wrote(tmp_path, names):
    """Names that begin alike, and are longer than a header's field, are told apart."""
    theirs = opened(tmp_path, writer=names[0])
    for key in chain("theirs", 5):
        write(theirs, key)
    mine = opened(tmp_path, 2, names[1])
    for key in chain("mine", 6):
        assert write(mine, key) is Outcome.OK
    assert all(intact(mine, key) for key in chain("theirs", 5))
    assert mine.usage().chunks == 2
    again = opened(tmp_path, 2, names[1])
    assert again.usage().chunks == 2, "found again after a restart"
    assert write(again, b"one more") is Outcome.OK
    assert again.usage().resident_bytes == 2 * FILE
    assert len(list(tmp_path.rglob("*/*/*"))) == 7


def test_the_least_used_chunk_leaves(tmp_path):
    """A read counts as a use."""
    tier = opened(tmp_path, 3)
    keys = chain("k", 4)
    for key in keys[:3]:
        write(tier, key)
    assert intact(tier, keys[0])
    left = []
    tier.on_evicted = left.extend
    write(tier, keys[3])
    assert [(one.namespace, one.reason) for one in left] == [(A, "room")]
    assert [intact(tier, key) for key in keys] == [True, False, True, True]


def test_what_is_told_of_it_waits_for_no_file(tmp_path):
    """A file system that hangs, and holds up whoever writes, holds up nobody who asks for metrics."""
    tier = opened(tmp_path, 3)
    assert tier.known is None
    write(tier, b"key")
    with tier._lock:
        assert tier.known == Usage(FILE, 3 * FILE, 1)


def test_a_store_tells_what_it_holds_and_evicted(home):
    """Of its own part; a Redis is the agent's to tell of."""
    remote = {"capacity": 2 * (CHUNK_BYTES + HEADER_BYTES), "probe_every": 3600}
    with running(home, remote=remote) as process, Http(process.address) as http:
        eventually(lambda: http.total("probes_total") == 1)  # a later one would be as large as a chunk, and find room
        with Engine(process) as engine:
            engine.put(chain("k", 5))
        eventually(lambda: http.total("tier_evictions_total", tier="remote", reason="room") == 3)
        eventually(lambda: http.total("tier_resident_bytes", tier="remote") == 2 * (CHUNK_BYTES + HEADER_BYTES))
        assert http.total("tier_capacity_bytes", tier="remote", state="effective") == remote["capacity"]


def test_a_file_under_another_name_is_damage_and_leaves(tmp_path):
    """It is whole, and not the chunk that is asked for."""
    tier = opened(tmp_path)
    assert write(tier, b"one") is Outcome.OK
    (one,) = tmp_path.rglob(b"one".hex())
    for namespace, key in ((A, b"the other one"), (B, b"one")):
        other = tmp_path / namespace / one.parent.name / key.hex()
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(one, other)
        assert read(tier, key, namespace) is Outcome.CORRUPT
        assert not other.exists()
    assert intact(tier, b"one")


def test_a_chunk_larger_than_the_bound_is_refused(tmp_path):
    """Full, and nothing is written; smaller chunks, of another model, do not leave for it."""
    tier = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=FILE - 1)
    assert write(tier, b"key") is Outcome.FULL
    assert list(tmp_path.rglob("*")) == []
    assert write(tier, b"small", B, NBYTES // 2) is Outcome.OK
    assert write(tier, b"key") is Outcome.FULL
    assert tier.present(B, [b"small"]) == (Outcome.OK, 1)


def test_a_file_that_another_store_removed_is_a_miss(tmp_path):
    """Also for the store that wrote it; it may write it again, and its account stays right."""
    tier, keys = opened(tmp_path, 3), chain("k", 3)
    for key in keys:
        write(tier, key)
    opened(tmp_path, writer="host-b").flush(A)
    assert not intact(tier, keys[0])
    for key in keys:
        assert write(tier, key) is Outcome.OK
    assert tier.usage().resident_bytes == 3 * FILE


def test_without_a_bound_what_others_remove_is_forgotten(tmp_path):
    """Old files that a job deletes would be remembered for ever: a store that only writes looks for some of its own."""
    tier, keys = opened(tmp_path), chain("k", 60)
    for number, key in enumerate(keys):
        write(tier, key)
        if number > 6:  # the first three stay, as others read them often
            for path in tmp_path.rglob(keys[number - 4].hex()):
                path.unlink()
    assert tier.usage().chunks < 20
    assert tier.usage().resident_bytes == tier.usage().chunks * FILE


@pytest.mark.parametrize("known", ["flush", "read"])
def test_what_another_store_removed_does_not_count(tmp_path, known):
    """A flush that goes to all stores is one of nothing for the last; what is read and not there is known, too."""
    mine, theirs = opened(tmp_path), opened(tmp_path, writer="host-b")
    keys = chain("k", 10)
    for key in keys:
        write(mine, key)
    assert write(mine, b"key", B) is Outcome.OK
    assert theirs.flush(A) == (Outcome.OK, 10)
    if known == "flush":
        assert mine.flush(A, b"tenant".ljust(16)) == (Outcome.OK, 0)
    else:
        assert not any(intact(mine, key) for key in keys)
    assert mine.usage() == mine.known == Usage(FILE, None, 1)
    assert write(mine, keys[0]) is Outcome.OK
    assert mine.usage().chunks == 2


def test_room_that_takes_long_to_make_holds_up_no_reader(tmp_path, monkeypatch):
    """Nor does it count as made before the file has gone."""
    tier, keys = opened(tmp_path, 2), chain("k", 2)
    for key in keys:
        write(tier, key)
    unlink, removing, leave = Path.unlink, threading.Event(), threading.Event()

    def slow(path, **options):
        removing.set()
        assert leave.wait(PATIENCE_S)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", slow)
    with ThreadPoolExecutor(2) as threads:
        written = threads.submit(write, tier, b"new")
        assert removing.wait(PATIENCE_S)
        try:
            assert threads.submit(intact, tier, keys[1]).result(1) is True
            assert tier.usage().resident_bytes == 2 * FILE
        finally:
            leave.set()
        assert written.result() is Outcome.OK
    assert tier.usage() == Usage(2 * FILE, 2 * FILE, 2)


@pytest.mark.parametrize("read", [False, True])
def test_what_another_store_wrote_again_is_that_stores(tmp_path, read):
    """After its flush it holds keys that were ours: they are not evicted for room of ours, nor counted once read."""
    mine, theirs = (opened(tmp_path, 3, name) for name in ("host-a", "host-b"))
    keys = chain("k", 3)
    for key in keys:
        write(mine, key)
    theirs.flush()
    assert all(write(theirs, key) is Outcome.OK for key in keys)
    left = []
    mine.on_evicted = left.extend
    if read:
        assert all(intact(mine, key) for key in keys)
        assert mine.usage().chunks == 0
    for key in chain("n", 3):
        assert write(mine, key) is Outcome.OK
    assert all(intact(theirs, key) for key in keys)
    assert (left, mine.usage(), theirs.usage()) == ([], Usage(3 * FILE, 3 * FILE, 3), Usage(3 * FILE, 3 * FILE, 3))


def test_what_a_crash_left_half_written_is_never_seen_and_goes_with_the_next_start(tmp_path, monkeypatch):
    """An own file beside the real ones. Another store may be writing its own now: a flush an hour later removes it."""
    for name in ("host-a", "host-b"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                write(opened(tmp_path, writer=name), b"key-of-" + name.encode())
    again = opened(tmp_path)
    assert again.present(A, [b"key-of-host-a"]) == (Outcome.OK, 0)
    assert again.usage().chunks == 0
    (left,) = [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert left.name.split(".")[1] == b"key-of-host-b".hex()
    assert again.flush() == (Outcome.OK, 0)
    assert left.exists()
    os.utime(left, (0, time.time() - 3601))
    assert again.flush(tenant=b"t" * 16) == (Outcome.OK, 0)
    assert left.exists()
    assert again.flush() == (Outcome.OK, 0)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_left_of_a_namespace_whose_chunks_have_left(tmp_path):
    """However they left: new weights come a few times a day, and each leaves some hundred folders. The root stays."""
    tier = opened(tmp_path, 8)
    for namespace in (A, B):
        for key in chain(namespace, 8):
            assert write(tier, key, namespace) is Outcome.OK
    assert [path.name for path in tmp_path.iterdir()] == [B]
    assert tier.flush() == (Outcome.OK, 8)
    assert list(tmp_path.iterdir()) == []
    assert write(tier, b"key") is Outcome.OK


def test_what_is_not_a_stores_stays_unread(tmp_path, monkeypatch):
    """A file system's own folder, which nobody but root may read, and what others leave, also beside chunks."""
    tier, scan = opened(tmp_path), os.scandir
    assert write(tier, b"key") is Outcome.OK
    (chunk,) = tier._files()
    others = [tmp_path / name for name in ("lost+found/0.0", "b" * 31 + "/aa/aa", ".mounted", "note")]
    others += [chunk.with_name(".nfs0001"), chunk.parent.parent / "note"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (0, 0))

    def scanned(folder):
        if Path(folder).name in ("lost+found", B):
            raise PermissionError(errno.EACCES, "denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scanned)
    assert opened(tmp_path).usage().chunks == 1
    assert tier.flush() == (Outcome.OK, 1)
    assert all(path.exists() for path in others)
    (tmp_path / B).mkdir()
    again = opened(tmp_path)
    assert write(again, b"another") is Outcome.OK
    assert again.flush() == (Outcome.ERROR, 0)


def test_what_another_format_version_left_counts_and_leaves(tmp_path, monkeypatch):
    """After an upgrade or a rollback nobody reads it: it is this store's own all the same, and bounded."""
    for number in range(2):
        write(opened(tmp_path), b"old-%d" % number)
    monkeypatch.setattr(chunk, "FORMAT_VERSION", chunk.FORMAT_VERSION + 1)
    tier = opened(tmp_path, 2)
    assert tier.usage() == Usage(2 * FILE, 2 * FILE, 2)
    assert write(tier, b"new") is Outcome.OK
    assert sum(path.stat().st_size for path in files(tmp_path)) == 2 * FILE
    assert intact(tier, b"new")
