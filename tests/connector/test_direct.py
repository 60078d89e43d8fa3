"""Payloads past the page cache: any size at any place, and where that way does not exist."""

import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.stores import A, no_more_threads
from tiertune_connector.chunk import checksum
from tiertune_connector.threads import Threads
from tiertune_connector.tiers import slab as module
from tiertune_connector.tiers.base import unheard
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tiers.slab import Slab

SIZES = st.sampled_from([1, 500, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 77, 9 * PAGE])


@pytest.fixture(scope="module")
def readers():
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def file(readers, tmp_path_factory):
    file = slab(tmp_path_factory.mktemp("direct") / "file", readers)
    yield file
    file.close()


@pytest.fixture(autouse=True, scope="module")
def small_windows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_BYTES", 2 * PAGE)
        yield


def slab(path, readers):
    return Slab(path, A, 1, readers)


def paged(nbytes: int, shift: int = 0) -> memoryview:
    """Memory of our own, ``shift`` bytes after the start of a page."""
    return memoryview(mmap.mmap(-1, nbytes + shift + 1))[shift : shift + nbytes]


def random(nbytes: int, shift: int = 0) -> memoryview:
    view = paged(nbytes, shift)
    view[:] = os.urandom(nbytes)
    return view


@settings(deadline=None, max_examples=60)
@given(size=SIZES, offset=st.sampled_from([0, PAGE, 5 * PAGE, 100]), shifts=st.tuples(*2 * [st.sampled_from([0, 8])]))
def test_what_is_written_anywhere_is_read_with_its_sum(file, size, offset, shifts):
    """Aligned or not, on either side, and seen alike by who goes through the cache."""
    data, out = random(size, shifts[0]), paged(size, shifts[1])
    file.write_at(data, offset)
    assert os.pread(file.fd, size, offset) == data
    heard = list[int]()
    assert file.read_at(out, offset, heard.append) == checksum(data)
    assert out == data
    assert heard == [*range(2 * PAGE, size, 2 * PAGE), size]


def test_what_changes_through_the_cache_is_seen(file):
    """Headers are written that way."""
    data, out = random(4 * PAGE), paged(4 * PAGE)
    file.write_at(data, 0)
    os.pwrite(file.fd, b"changed", PAGE)
    assert file.read_at(out, 0, unheard) == checksum(out) != checksum(data)
    assert out[PAGE : PAGE + 7] == b"changed"


@pytest.mark.parametrize("left", [0, 1, PAGE, 3 * PAGE + 5, 6 * PAGE - 1])
def test_a_file_that_ends_before_is_told(readers, tmp_path, left):
    """At any place of the payload."""
    file = slab(tmp_path / "short", readers)
    file.write_at(random(6 * PAGE), 0)
    os.truncate(file.fd, left)
    assert file.read_at(paged(6 * PAGE), 0, unheard) is None
    file.close()


@pytest.mark.parametrize("refused", ["open", "move"])
def test_a_file_system_that_refuses_is_served_through_the_cache(readers, tmp_path, monkeypatch, refused):
    """When the file is opened, or when something is moved."""
    real = os.open, os.preadv, os.pwritev
    asked = []

    def opens(path, flags, *more):
        if flags & os.O_DIRECT:
            asked.append(path)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real[0](path, flags, *more)

    def moves(move):
        def moved(fd, buffers, offset):
            if fd == file._direct:
                asked.append(fd)
                raise OSError(errno.EINVAL, "wants larger blocks")
            return move(fd, buffers, offset)

        return moved

    if refused == "open":
        monkeypatch.setattr(module.os, "open", opens)
    file = slab(tmp_path / "refused", readers)
    if refused == "move":
        monkeypatch.setattr(module.os, "preadv", moves(real[1]))
        monkeypatch.setattr(module.os, "pwritev", moves(real[2]))
    data, out = random(5 * PAGE), paged(5 * PAGE)
    file.write_at(data, 0)
    assert file.read_at(out, 0, unheard) == checksum(data)
    assert asked
    file.close()


def test_nobody_reads_into_memory_that_was_given_back(readers, tmp_path, monkeypatch):
    """A failing window ends the read when the others have ended."""
    file = slab(tmp_path / "broken", readers)
    file.write_at(random(6 * PAGE), 0)
    real, late, held = os.preadv, threading.Event(), []

    def preadv(fd, buffers, offset):
        if offset == 0:
            assert late.wait(5)
            raise OSError(errno.EIO, "fault")
        late.set()
        held.append(offset)
        count = real(fd, buffers, offset)
        held.remove(offset)
        return count

    monkeypatch.setattr(module.os, "preadv", preadv)
    with pytest.raises(OSError, match="fault"):
        file.read_at(paged(6 * PAGE), 0, unheard)
    assert not held
    file.close()


def test_windows_cover_the_payload_once(readers, tmp_path, monkeypatch):
    """Each byte is asked for once, whole windows at a time, past the cache."""
    file = slab(tmp_path / "windows", readers)
    file.write_at(random(7 * PAGE), PAGE)
    real, asked = os.preadv, []

    def preadv(fd, buffers, offset):
        asked.append((offset, len(buffers[0]), fd == file._direct))
        return real(fd, buffers, offset)

    monkeypatch.setattr(module.os, "preadv", preadv)
    file.read_at(np.frombuffer(paged(7 * PAGE), np.uint8).data, PAGE, unheard)
    if file._direct < 0:
        pytest.skip("this file system has no O_DIRECT")
    assert sum(length for _, length, _ in asked) == 7 * PAGE
    assert all(past for *_, past in asked)
    assert all(here[0] + here[1] == there[0] for here, there in pairwise(sorted(asked)))
    file.close()


def test_a_lack_of_descriptors_is_no_file_system_without_that_way(readers, tmp_path, monkeypatch):
    """It passes; the file would go through the cache until the store ends. None is kept."""
    real = os.open

    def opens(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, *more)

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "open", opens)
        with pytest.raises(OSError, match="Too many open files"):
            slab(tmp_path / "file", readers)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_readers_of_a_file_need_no_threads_later(tmp_path, monkeypatch):
    """Else a window that none could be had for would be read all the same, when its memory is another's."""
    readers = Threads(3, "disk-window", ready=3)
    no_more_threads(monkeypatch)
    file, data, out = slab(tmp_path / "file", readers), random(9 * PAGE), paged(9 * PAGE)
    file.write_at(data, 0)
    assert file.read_at(out, 0, unheard) == checksum(data)
    assert out == data
    file.close()
    readers.shutdown()
