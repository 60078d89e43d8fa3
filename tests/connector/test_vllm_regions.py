"""Which files of staging a dead engine left, and only those, are removed."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiertune_connector import locks
from tiertune_connector.vllm import regions

ENGINE = """
import os, sys
from tiertune_connector.vllm import regions
regions.hold(os.open(sys.argv[1], os.O_RDWR), 0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(regions, "SHARED_MEMORY", tmp_path)


@pytest.fixture
def region(tmp_path):
    """Makes the file of an engine's region, as vLLM names it."""

    def make(engine: str = "a", name: str = "") -> Path:
        path = tmp_path / f"vllm_offload_{name or regions.engine_id(engine, 4096)}.mmap"
        path.touch(mode=0o600)
        return path

    return make


def test_where_nothing_can_be_locked_an_engine_starts_all_the_same(tmp_path, region, monkeypatch):
    """It removes nothing, as it cannot tell whose it is."""

    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = region()
    monkeypatch.setattr(fcntl, "flock", refused)
    assert regions.sweep() == []
    with regions.making():
        assert path.exists()


def test_where_nothing_may_be_opened_an_engine_starts_all_the_same(tmp_path, region, monkeypatch):
    """Whoever else's folder or file it is: who may write there need not be able to read it."""
    path, opened = region(), os.open

    def refused(path, *arguments, **named):
        if Path(path).is_relative_to(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refused)
    assert regions.sweep() == []
    assert regions.held("a") == [path]
    with regions.making():
        assert path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_file_beside_a_dead_engines_region_stays(tmp_path):
    """Its name makes it look like a part of the region; in /dev/shm nobody may remove it but who made it."""
    tmp_path.chmod(0o1777)
    path = tmp_path / f"vllm_offload_{regions.engine_id('a', 4096)}.mmap"
    others = Path(f"{path}.1")
    others.touch()
    code = "import os, sys; from pathlib import Path; from tiertune_connector.vllm import regions\n"
    code += "folder, path = map(Path, sys.argv[1:]); descriptor = os.open(folder, os.O_RDONLY); os.fchdir(descriptor)\n"
    code += "os.setgid(65534); os.setuid(65534); Path(path.name).touch()\n"
    code += "regions.SHARED_MEMORY = Path(); print(regions.sweep())"
    command = [sys.executable, "-c", code, str(tmp_path), str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.stdout == f"[PosixPath('{path.name}')]\n", told.stderr
    assert list(tmp_path.iterdir()) == [others]


def test_a_dead_engines_region_is_removed_and_a_live_ones_stays(tmp_path, region):
    """It is held until its process is gone, however that ends; the region may have several files."""
    path = region()
    segment = Path(f"{path}.1")
    segment.touch()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout.readline() == "held\n"
    assert regions.sweep() == []
    engine.kill()
    engine.communicate()
    assert regions.sweep() == [path]
    assert list(tmp_path.iterdir()) == []


def test_other_files_stay(tmp_path, region):
    """Those of vLLM's own offloading, which holds no lock, and anything else."""
    others = [region(name="someone"), tmp_path / "tiertune-x.mmap"]
    others[-1].touch()
    assert regions.sweep() == []
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_another_users_region_is_not_used(region, monkeypatch):
    """Who knows an engine's id could make the file first; vLLM takes the one that is there."""
    path = region()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with path.open() as file, pytest.raises(PermissionError, match=f"{path}, .* is another user's: remove it"):
        regions.hold(file.fileno(), 0)


def test_another_users_region_is_not_taken_for_this_engines_and_stays(tmp_path, region, monkeypatch):
    """An engine with two is refused, so anybody who knows its id could keep it from starting.

    It is not removed, also where we could.
    """
    path = region()
    with path.open() as file:
        regions.hold(file.fileno(), 0)
        assert regions.held("a") == [path]
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
        assert regions.held("a") == []
    assert regions.sweep() == []


def test_nothing_is_removed_while_an_engine_makes_its_region(tmp_path, region):
    """It may be about to open, and then hold, a file of its name that lies there."""
    stale = region("dead")
    with regions.making():
        assert regions.sweep() == []
    assert regions.sweep() == [stale]


def test_engines_make_their_regions_side_by_side(tmp_path, monkeypatch):
    """They wait for a sweep alone, and not for ever."""
    waits = []
    monkeypatch.setattr(locks.time, "sleep", waits.append)
    with regions.making(), regions.making():
        assert waits == []
    monkeypatch.setattr(regions, "MAKING_S", 0.01)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with regions.making():
        assert waits
        os.close(folder)


def test_ranks_leave_word_to_the_scheduler(tmp_path, region):
    """The same word is the same wherever it is left; of ranks without one, and without a region, nothing is known."""
    assert regions.notes("a", 3) == []

    def left(engine: str) -> list[str]:
        with region(engine).open("r+b") as file:
            file.truncate(4096)
            regions.hold(file.fileno(), 0)
            regions.note(file.fileno(), 1, f"of {engine}")
            regions.note(file.fileno(), 2, "alike")
            return regions.notes(engine, 3)

    (none, of_a, alike), (_, of_b, same) = left("a"), left("b")
    assert none == ""
    assert alike == same
    assert len({none, alike, of_a, of_b}) == 4
