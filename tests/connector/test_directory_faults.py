"""A shared directory whose file system refuses, fails or changes amid its use."""

import errno
import os
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from connector.stores import A, B, chain, payload, running, view
from connector.test_directory import FILE, NBYTES, files, intact, opened, read, write
from extending.sqlite_tier import SqliteTier
from tiertune_connector.chunk import Origin
from tiertune_connector.serve import main
from tiertune_connector.tiers.base import Outcome, Usage
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.media import MEDIA


@pytest.mark.parametrize("amid_use", [False, True])
def test_a_directory_that_is_away_is_an_error_and_is_not_made(tmp_path, amid_use):
    """An unmounted file system is no miss, and its place is not filled; when it is back it works."""
    root = tmp_path / "mount"
    tier = opened(root)
    if amid_use:
        root.mkdir()
        write(tier, b"key")
        shutil.rmtree(root)
    assert tier.present(A, [b"key"]) == (Outcome.ERROR, 0)
    assert read(tier, b"key") is Outcome.ERROR
    assert write(tier, b"key") is Outcome.ERROR
    assert tier.flush() == (Outcome.ERROR, 0)
    assert amid_use or tier.usage() == Usage(None, None, None)
    assert tier.why == f"[Errno 2] there is no such directory: '{root}'"
    assert not root.exists()
    root.mkdir()
    assert write(tier, b"key") is Outcome.OK
    assert intact(tier, b"key")


def test_what_cannot_be_removed_still_counts(tmp_path, monkeypatch):
    """Neither when room is made nor by a flush is it forgotten: the bound holds, and other chunks make the room."""
    tier, keys = opened(tmp_path, 4), chain("k", 4)
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
    assert len(files(tmp_path)) <= 4
    assert tier.usage().resident_bytes == 4 * FILE
    assert tier.flush()[0] is Outcome.ERROR
    assert tier.usage().resident_bytes >= FILE
    monkeypatch.undo()
    assert tier.flush()[0] is Outcome.OK
    assert tier.usage() == Usage(0, 4 * FILE, 0)


def test_a_file_that_cannot_be_removed_keeps_no_other_from_a_flush(tmp_path, monkeypatch):
    """Such as another user's: it would be met again by every further flush, before the others."""
    tier, keys, unlink = opened(tmp_path), chain("k", 9), Path.unlink
    for key in keys:
        write(tier, key)
    (stuck,) = tmp_path.rglob(keys[4].hex())

    def refused(path, **options):
        if path == stuck:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    assert tier.flush() == (Outcome.ERROR, 8)
    assert files(tmp_path) == [stuck]
    assert "Permission denied" in tier.why


@pytest.mark.parametrize("look", ["usage", "flush"])
def test_a_folder_that_goes_while_it_is_looked_through_holds_no_files(tmp_path, monkeypatch, look):
    """Other stores evict meanwhile; all else that fails is an error."""
    root = tmp_path / "remote"
    root.mkdir()
    for namespace in (A, B):
        assert write(opened(root), b"key", namespace) is Outcome.OK
    tier, scan = opened(root), os.scandir

    def scanned(folder):
        if Path(folder) == root / A:
            Path(folder).rename(tmp_path / "gone")
        return scan(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scanned)
        told = getattr(tier, look)()
    assert told == (Usage(FILE, None, 1) if look == "usage" else (Outcome.OK, 1))
    monkeypatch.setattr(os, "scandir", Mock(side_effect=OSError(errno.EIO, "fault")))
    assert opened(root).flush() == (Outcome.ERROR, 0)


def test_a_folder_that_goes_before_a_chunk_is_in_it_is_made_again(tmp_path, monkeypatch):
    """As when another store evicts its last chunk there."""
    tier, make = opened(tmp_path), Path.mkdir
    with monkeypatch.context() as patch:
        removed = []

        def made(folder, *given, **more):
            make(folder, *given, **more)
            if folder.parent.parent == tmp_path and not removed:
                removed.append(folder)
                folder.rmdir()
                folder.parent.rmdir()

        patch.setattr(Path, "mkdir", made)
        assert write(tier, b"key") is Outcome.OK
    assert removed
    assert intact(tier, b"key")


@pytest.mark.parametrize(("number", "outcome"), [(errno.ENOSPC, Outcome.FULL), (errno.EIO, Outcome.ERROR)])
def test_a_failing_file_system_is_an_outcome_and_leaves_nothing(tmp_path, monkeypatch, number, outcome):
    """The room that the write had taken is free again."""
    tier = opened(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=OSError(number, "fault")))
        for key in chain("k", 5):
            assert write(tier, key) is outcome
    assert files(tmp_path) == []
    for key in chain("k", 2):
        assert write(tier, key) is Outcome.OK
    assert tier.usage().resident_bytes == 2 * FILE


@pytest.mark.parametrize("method", ["exists", "is_dir", "stat", "open"])
def test_a_file_system_that_refuses_is_an_error(tmp_path, monkeypatch, method):
    """No exception leaves the tier, whichever call it is that fails."""
    tier = opened(tmp_path)
    write(tier, b"key")
    monkeypatch.setattr(Path, method, Mock(side_effect=PermissionError(errno.EACCES, "fault")))
    assert tier.present(A, [b"key"])[0] in (Outcome.ERROR, Outcome.OK)
    assert read(tier, b"key") in (Outcome.ERROR, Outcome.OK)
    assert write(tier, b"other") in (Outcome.ERROR, Outcome.OK)
    assert tier.flush()[0] in (Outcome.ERROR, Outcome.OK)
    assert tier.usage().capacity_bytes is None
    monkeypatch.undo()
    assert write(tier, b"after") is Outcome.OK
    assert intact(tier, b"after")


def test_what_cannot_be_looked_at_is_an_error_and_not_taken_for_absent(tmp_path, monkeypatch):
    """From 3.14 on Python's own questions answer no: a flush would pass over what is there, and be told as done."""
    tier, look = opened(tmp_path), os.stat
    write(tier, b"key")
    (chunk,) = files(tmp_path)

    def refused(path, **options):
        if str(path) == str(chunk):
            raise OSError(errno.EIO, "fault", str(path))
        return look(path, **options)

    for question, answer in (("exists", os.path.exists), ("is_dir", os.path.isdir), ("is_file", os.path.isfile)):
        monkeypatch.setattr(Path, question, answer)
    monkeypatch.setattr(os, "stat", refused)
    assert tier.present(A, [b"key"]) == (Outcome.ERROR, 0)
    assert write(tier, b"key") is Outcome.ERROR
    assert tier.flush() == (Outcome.ERROR, 0)
    assert tier.usage() == Usage(FILE, None, 1)
    assert opened(tmp_path).usage() == Usage(None, None, None)


def test_own_files_that_cannot_be_read_at_the_start_count_once_they_can_be(tmp_path, monkeypatch):
    """As when descriptors have run out for a moment: the bound holds again a few writes later."""
    for key in chain("k", 3):
        write(opened(tmp_path), key)
    tier = opened(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert tier.usage().chunks == 0
    assert all(write(tier, key) is Outcome.OK for key in chain("n", 6))
    assert len(files(tmp_path)) == 3
    assert tier.usage() == Usage(3 * FILE, 3 * FILE, 3)


def test_a_loss_of_power_brings_back_nothing_that_was_flushed(tmp_path, monkeypatch):
    """A folder comes back as it was last synced; a flush that could not sync is no success, and the next one does."""
    tier, synced, sync = opened(tmp_path), dict[str, list[str]](), os.fsync
    for namespace in (A, B):
        assert write(tier, b"key", namespace) is Outcome.OK
        assert tier.write(namespace, b"another key", view(payload(b"k", NBYTES)), Origin(tenant=b"t" * 16)).kept
    (folder,) = {path.parent for path in files(tmp_path / A)}

    def noted(descriptor):
        sync(descriptor)
        folder = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced[str(folder)] = [path.name for path in folder.iterdir()]

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "fault")))
        assert tier.flush(A, b"t" * 16) == (Outcome.ERROR, 1)
        assert "fault" in tier.why
    monkeypatch.setattr(os, "fsync", noted)
    assert tier.flush(A, b"t" * 16) == (Outcome.OK, 0)
    assert synced[str(folder)] == [b"key".hex()]
    assert tier.flush(A) == (Outcome.OK, 1)
    assert synced[str(tmp_path)] == [B]
    assert tier.flush() == (Outcome.OK, 2)
    assert synced[str(tmp_path)] == []


def test_a_file_system_that_syncs_no_folders_is_flushed_all_the_same(tmp_path, monkeypatch):
    """Nobody could do better there."""
    tier = opened(tmp_path)
    write(tier, b"key")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    assert tier.flush() == (Outcome.OK, 1)


@pytest.mark.parametrize("medium", [DirectoryTier, SqliteTier])
def test_a_medium_without_time_outs_that_hangs_is_left_alone(home, monkeypatch, medium):
    """Whoever made it: a flush that does not return is answered all the same, as it is of a server."""
    go_on = threading.Event()
    monkeypatch.setattr(main, "HUNG_S", 0.05)
    monkeypatch.setitem(MEDIA, "own", medium)
    monkeypatch.setattr(medium, "flush", lambda *_: (Outcome.OK, int(go_on.wait())))
    (home / "remote").mkdir(parents=True)
    url = f"own://{home}/remote" + "/chunks" * (medium is SqliteTier)
    with running(home, remote={"url": url, "probe_every": 3600}) as process:
        assert process.store.lanes["remote"].flush(None, None) == (Outcome.TIMEOUT, 0)
        go_on.set()
