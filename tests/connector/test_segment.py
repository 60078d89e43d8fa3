"""Shared memory: what is handed out, given back and taken again."""

import fcntl
import os
import resource
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from connector.stores import NAMESPACE
from tiertune_connector.tiers.index import SharedIndex
from tiertune_connector.tiers.linux import memory_bytes
from tiertune_connector.tiers.segment import PAGE, Geometry, Segment
from tiertune_connector.vllm.joining import join
from tiertune_connector.vllm.settings import EngineSettings

F_SEAL_FUTURE_WRITE = 0x10
GEOMETRY = Geometry(slots=8, chunk_bytes=3 * PAGE + 5)


def taken(fd: int) -> int:
    """Bytes of memory behind a memfd."""
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def segment():
    segment = Segment.create(1, GEOMETRY)
    yield segment
    segment.close()


def test_slots_are_page_aligned_and_do_not_overlap():
    """Every slot begins on a page behind the table and ends before the next."""
    starts = [GEOMETRY.offset(slot) for slot in range(GEOMETRY.slots)]
    assert all(start % PAGE == 0 for start in starts)
    assert starts[0] >= GEOMETRY.slots * 8
    assert {b - a for a, b in pairwise(starts)} == {GEOMETRY.stride}
    assert starts[-1] + GEOMETRY.chunk_bytes <= GEOMETRY.total_bytes


def test_a_new_segment_has_all_its_memory(segment):
    """Memory is taken when a segment is made, not when it is first written."""
    assert taken(segment.fd) >= GEOMETRY.total_bytes


def test_a_slot_given_back_returns_exactly_its_memory(segment):
    """The others keep theirs; what is taken again reads as zeros."""
    full = taken(segment.fd)
    for slot in range(GEOMETRY.slots):
        segment.slot(slot)[:] = slot + 1
    segment.give_back(3)
    assert full - taken(segment.fd) == GEOMETRY.stride
    segment.take_again([3])
    assert taken(segment.fd) == full
    assert [int(segment.slot(slot)[7]) for slot in range(GEOMETRY.slots)] == [1, 2, 3, 0, 5, 6, 7, 8]


def test_an_engine_may_map_as_many_segments_as_its_system_allows(home):
    """Else its connection ends whenever a thousand are mapped: the usual limit is 1024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        join(
            EngineSettings(socket=str(home / "s.sock"), connect_timeout=0.0), NAMESPACE, chunk_bytes=1, engine="e"
        ).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 1 << 20), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("error", [ValueError("not allowed to raise maximum limit"), PermissionError()])
def test_a_limit_that_may_not_be_raised_stays(home, monkeypatch, error):
    """A hard limit above the kernel's `fs.nr_open`, which was lowered since, or a sandbox: the engine starts."""
    monkeypatch.setattr(resource, "setrlimit", Mock(side_effect=error))
    join(EngineSettings(socket=str(home / "s.sock"), connect_timeout=0.0), NAMESPACE, chunk_bytes=1, engine="e").close()


@pytest.mark.parametrize("make", [partial(Segment.create, 1, GEOMETRY), partial(SharedIndex.create, 100)])
def test_nobody_who_has_a_descriptor_can_cut_the_memory(make):
    """Nor make it longer, nor forbid that it is written or given back: the store would be killed, or get none back."""
    shared = make()
    client = os.dup(shared.fd)
    for size in (0, PAGE, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(client, size)
    for seal in (fcntl.F_SEAL_WRITE, F_SEAL_FUTURE_WRITE):
        with pytest.raises(PermissionError):
            fcntl.fcntl(client, fcntl.F_ADD_SEALS, seal)
    os.close(client)
    shared.close()


def test_both_sides_see_the_same_bytes_and_generations(segment):
    """What one side writes the other reads, without a copy in between."""
    client = Segment(1, GEOMETRY, os.dup(segment.fd))
    client.slot(2)[:] = 7
    assert segment.slot(2).tobytes() == b"\7" * GEOMETRY.chunk_bytes
    assert segment.renew(2) == 1
    assert client.generations[2] == 1
    client.close()


def test_attaching_and_copying_takes_no_memory_of_slots_that_were_given_back(segment):
    """A client that comes after a shrink, and fills its page tables, undoes nothing of it."""
    for slot in range(1, GEOMETRY.slots):
        segment.give_back(slot)
    before = taken(segment.fd)
    client = Segment(1, GEOMETRY, os.dup(segment.fd))
    client.warm(0)
    np.copyto(client.slot(0), np.uint8(1))
    assert taken(segment.fd) == before
    client.close()


def test_attaching_keeps_no_descriptor_of_the_callers(segment):
    """The descriptor that came over the socket is closed, also where the mapping fails."""
    fd = os.dup(segment.fd)
    Segment(1, GEOMETRY, fd).close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    small = os.memfd_create("small")
    with pytest.raises(ValueError, match="mmap"):
        Segment(1, GEOMETRY, small)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(small)


def test_a_view_outlives_the_segment(segment):
    """A copy that is under way when the segment is dropped reads on; nothing crashes."""
    client = Segment(1, GEOMETRY, os.dup(segment.fd))
    view = client.slot(1)
    client.close()
    assert view.sum() == 0


def test_memory_that_the_machine_lacks_is_an_error_and_leaves_nothing():
    """No descriptor stays behind."""
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="memory"):
        Segment.create(1, Geometry(slots=1, chunk_bytes=memory_bytes()))
    assert set(Path("/proc/self/fd").iterdir()) <= before
