"""A shared directory: several stores, a file system that goes away, bounds."""

import errno
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from connector.stores import (
    CHUNK_BYTES,
    PATIENCE_S,
    Engine,
    Http,
    chain,
    eventually,
    payload,
    read_chunk,
    running,
    short_folder,
    view,
)
from tiertune_connector import chunk
from tiertune_connector.chunk import HEADER_BYTES, NOBODY
from tiertune_connector.tiers.base import Outcome, Usage
from tiertune_connector.tiers.directory import DirectoryTier

A, B = "a" * 32, "b" * 32
NBYTES = 3000
FILE = NBYTES + HEADER_BYTES


def write(tier, key):
    return tier.write(A, key, view(payload(key, NBYTES)), NOBODY)


def intact(tier, key):
    return read_chunk(tier, A, key, NBYTES)[0] is Outcome.OK


def test_stores_read_what_others_wrote(tmp_path):
    """A chunk tells which store wrote it."""
    one, two = DirectoryTier(tmp_path, writer="host-a"), DirectoryTier(tmp_path, writer="host-b")
    write(one, b"key")
    outcome, origin = read_chunk(two, A, b"key", NBYTES)
    assert (outcome, origin.writer) == (Outcome.OK, "host-a")


def test_nobody_else_reads_what_stores_wrote(tmp_path, umask):
    """Prompts can be computed back from it; stores of one group may share, where the umask lets them."""
    for usual, folder, file in ((0o022, 0o750, 0o640), (0o002, 0o770, 0o660), (0, 0o770, 0o660)):
        umask(usual)
        root = tmp_path / f"{usual:o}"
        root.mkdir()
        write(DirectoryTier(root, writer="host-a"), b"one")
        (path,) = root.rglob(b"one".hex())
        modes = [part.stat().st_mode & 0o777 for part in (path.parent.parent, path.parent, path)]
        assert modes == [folder, folder, file]


@pytest.mark.parametrize("names", [("host-a", "host-b"), ("gpu-a-eu-west-1-node-01", "gpu-a-eu-west-1-node-02")])
def test_a_store_bounds_only_what_it_wrote(tmp_path, names):
    """Names that begin alike, and are longer than a header's field, are told apart."""
    theirs = DirectoryTier(tmp_path, writer=names[0])
    for key in chain("theirs", 5):
        write(theirs, key)
    mine = DirectoryTier(tmp_path, writer=names[1], capacity_bytes=2 * FILE)
    for key in chain("mine", 6):
        assert write(mine, key) is Outcome.OK
    assert all(intact(mine, key) for key in chain("theirs", 5))
    assert mine.usage().chunks == 2
    again = DirectoryTier(tmp_path, writer=names[1], capacity_bytes=2 * FILE)
    assert again.usage().chunks == 2, "found again after a restart"
    assert write(again, b"one more") is Outcome.OK
    assert again.usage().resident_bytes == 2 * FILE
    assert len(list(tmp_path.rglob("*/*/*"))) == 7


def test_the_least_used_chunk_leaves(tmp_path):
    """A read counts as a use."""
    tier = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=3 * FILE)
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
    tier = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=3 * FILE)
    assert tier.known is None
    write(tier, b"key")
    with tier._lock:
        assert tier.known == Usage(FILE, 3 * FILE, 1)


def test_a_store_tells_what_it_holds_and_evicted(tmp_path):
    """Of its own part; a Redis is the agent's to tell of."""
    (tmp_path / "shared").mkdir()
    remote = {"url": f"file://{tmp_path}/shared", "capacity": 2 * (CHUNK_BYTES + HEADER_BYTES), "probe_every": 3600}
    with short_folder() as home, running(home, remote=remote) as process, Http(process.address) as http:
        eventually(lambda: http.total("probes_total") == 1)  # a later one would be as large as a chunk, and find room
        with Engine(process.server.path) as engine:
            engine.put(chain("k", 5))
        eventually(lambda: http.total("tier_evictions_total", tier="remote", reason="room") == 3)
        eventually(lambda: http.total("tier_resident_bytes", tier="remote") == 2 * (CHUNK_BYTES + HEADER_BYTES))
        assert http.total("tier_capacity_bytes", tier="remote", state="effective") == remote["capacity"]


def test_a_file_under_another_name_is_damage_and_leaves(tmp_path):
    """It is whole, and not the chunk that is asked for."""
    tier = DirectoryTier(tmp_path, writer="host-a")
    assert write(tier, b"one") is Outcome.OK
    (one,) = tmp_path.rglob(b"one".hex())
    for namespace, key in ((A, b"the other one"), (B, b"one")):
        other = tmp_path / namespace / one.parent.name / key.hex()
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(one, other)
        assert tier.read(namespace, key, view(np.empty(NBYTES, np.uint8)))[0] is Outcome.CORRUPT
        assert not other.exists()
    assert intact(tier, b"one")


def test_a_chunk_larger_than_the_bound_is_refused(tmp_path):
    """Full, and nothing is written; smaller chunks, of another model, do not leave for it."""
    tier = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=FILE - 1)
    assert write(tier, b"key") is Outcome.FULL
    assert list(tmp_path.rglob("*")) == []
    assert tier.write(B, b"small", view(payload(b"small", NBYTES // 2)), NOBODY) is Outcome.OK
    assert write(tier, b"key") is Outcome.FULL
    assert tier.present(B, [b"small"]) == (Outcome.OK, 1)


def test_a_directory_that_is_away_is_an_error_and_is_not_made(tmp_path):
    """An unmounted file system is no miss, and its place is not filled; when it is back it works."""
    root = tmp_path / "mount"
    tier = DirectoryTier(root, writer="host-a")
    assert tier.present(A, [b"key"]) == (Outcome.ERROR, 0)
    assert tier.read(A, b"key", view(np.empty(NBYTES, np.uint8)))[0] is Outcome.ERROR
    assert write(tier, b"key") is Outcome.ERROR
    assert tier.flush() == (Outcome.ERROR, 0)
    assert tier.usage() == Usage(None, None, None)
    assert tier.why == f"[Errno 2] there is no such directory: '{root}'"
    assert not root.exists()
    root.mkdir()
    assert write(tier, b"key") is Outcome.OK
    assert intact(tier, b"key")


def test_a_directory_that_vanishes_amid_use_is_an_error(tmp_path):
    """Not a miss: a breaker must notice."""
    root = tmp_path / "mount"
    root.mkdir()
    tier = DirectoryTier(root, writer="host-a", capacity_bytes=10 * FILE)
    write(tier, b"key")
    shutil.rmtree(root)
    assert tier.read(A, b"key", view(np.empty(NBYTES, np.uint8)))[0] is Outcome.ERROR
    assert write(tier, b"other") is Outcome.ERROR


def test_a_file_that_another_store_removed_is_a_miss(tmp_path):
    """Also for the store that wrote it; it may write it again, and its account stays right."""
    tier = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=3 * FILE)
    keys = chain("k", 3)
    for key in keys:
        write(tier, key)
    DirectoryTier(tmp_path, writer="host-b").flush(A)
    assert not intact(tier, keys[0])
    for key in keys:
        assert write(tier, key) is Outcome.OK
    assert tier.usage().resident_bytes == 3 * FILE


@pytest.mark.parametrize("known", ["flush", "read"])
def test_what_another_store_removed_does_not_count(tmp_path, known):
    """A flush that goes to all stores is one of nothing for the last; what is read and not there is known, too."""
    mine, theirs = DirectoryTier(tmp_path, writer="host-a"), DirectoryTier(tmp_path, writer="host-b")
    keys = chain("k", 10)
    for key in keys:
        write(mine, key)
    other = "b" * 32
    assert mine.write(other, b"key", view(payload(b"key", NBYTES)), NOBODY) is Outcome.OK
    assert theirs.flush(A) == (Outcome.OK, 10)
    if known == "flush":
        assert mine.flush(A, b"tenant".ljust(16)) == (Outcome.OK, 0)
    else:
        assert not any(intact(mine, key) for key in keys)
    assert mine.usage() == mine.known == Usage(FILE, None, 1)
    assert write(mine, keys[0]) is Outcome.OK
    assert mine.usage().chunks == 2


def test_what_cannot_be_removed_still_counts(tmp_path, monkeypatch):
    """Neither when room is made nor by a flush is it forgotten: the bound holds, and other chunks make the room."""
    tier, keys = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=4 * FILE), chain("k", 4)
    for key in keys:
        write(tier, key)
    (stuck,) = tmp_path.rglob(keys[0].hex())
    unlink = Path.unlink

    def refused(path, **options):
        if path == stuck:
            raise PermissionError(errno.EPERM, "fault", str(path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    outcomes = [write(tier, key) for key in chain("n", 9)]
    assert outcomes.count(Outcome.OK) >= 6
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 4
    assert tier.usage().resident_bytes == 4 * FILE
    assert tier.flush()[0] is Outcome.ERROR
    assert tier.usage().resident_bytes >= FILE
    monkeypatch.undo()
    assert tier.flush()[0] is Outcome.OK
    assert tier.usage() == Usage(0, 4 * FILE, 0)


def test_room_that_takes_long_to_make_holds_up_no_reader(tmp_path, monkeypatch):
    """Nor does it count as made before the file has gone."""
    tier, keys = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=2 * FILE), chain("k", 2)
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
    mine, theirs = (DirectoryTier(tmp_path, writer=name, capacity_bytes=3 * FILE) for name in ("host-a", "host-b"))
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
    """An own file beside the real ones is removed; another store's, who may be writing it now, is not."""
    for name in ("host-a", "host-b"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                write(DirectoryTier(tmp_path, writer=name), b"key-of-" + name.encode())
    again = DirectoryTier(tmp_path, writer="host-a")
    assert again.present(A, [b"key-of-host-a"]) == (Outcome.OK, 0)
    assert again.usage().chunks == 0
    left = [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert [path.name.split(".")[1] for path in left] == [b"key-of-host-b".hex()]


@pytest.mark.parametrize(("number", "outcome"), [(errno.ENOSPC, Outcome.FULL), (errno.EIO, Outcome.ERROR)])
def test_a_failing_file_system_is_an_outcome_and_leaves_nothing(tmp_path, monkeypatch, number, outcome):
    """The room that the write had taken is free again."""
    tier = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=2 * FILE)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=OSError(number, "fault")))
        for key in chain("k", 5):
            assert write(tier, key) is outcome
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    for key in chain("k", 2):
        assert write(tier, key) is Outcome.OK
    assert tier.usage().resident_bytes == 2 * FILE


@pytest.mark.parametrize("method", ["exists", "is_dir", "stat", "open"])
def test_a_file_system_that_refuses_is_an_error(tmp_path, monkeypatch, method):
    """No exception leaves the tier, whichever call it is that fails."""
    tier = DirectoryTier(tmp_path, writer="host-a")
    write(tier, b"key")
    monkeypatch.setattr(Path, method, Mock(side_effect=PermissionError(errno.EACCES, "fault")))
    assert tier.present(A, [b"key"])[0] in (Outcome.ERROR, Outcome.OK)
    assert tier.read(A, b"key", view(np.empty(NBYTES, np.uint8)))[0] in (Outcome.ERROR, Outcome.OK)
    assert write(tier, b"other") in (Outcome.ERROR, Outcome.OK)
    assert tier.flush()[0] in (Outcome.ERROR, Outcome.OK)
    assert tier.usage().capacity_bytes is None
    monkeypatch.undo()
    assert write(tier, b"after") is Outcome.OK
    assert intact(tier, b"after")


def test_what_another_format_version_left_counts_and_leaves(tmp_path, monkeypatch):
    """After an upgrade or a rollback nobody reads it: it is this store's own all the same, and bounded."""
    for number in range(2):
        write(DirectoryTier(tmp_path, writer="host-a"), b"old-%d" % number)
    monkeypatch.setattr(chunk, "FORMAT_VERSION", chunk.FORMAT_VERSION + 1)
    tier = DirectoryTier(tmp_path, writer="host-a", capacity_bytes=2 * FILE)
    assert tier.usage() == Usage(2 * FILE, 2 * FILE, 2)
    assert write(tier, b"new") is Outcome.OK
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 2 * FILE
    assert intact(tier, b"new")
