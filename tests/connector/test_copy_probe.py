"""A probe of copies: as many chunks and bytes as an engine would copy at a time, and the seconds that it takes."""

import itertools

import pytest

from tiertune_connector.client.probe import PART_BYTES, CopyProbe


@pytest.fixture
def ticking():
    """Every question is a second later."""
    return itertools.count().__next__


@pytest.mark.parametrize(
    ("helpers", "sizes", "copied"),
    [(0, [10, 10], 10), (2, [10, 20], 30), (2, [5, 6, 7, 8], 18), (1, [PART_BYTES + 5, 3], PART_BYTES + 3), (1, [], 0)],
)
def test_some_bytes_of_as_many_chunks_as_are_copied_at_a_time(ticking, helpers, sizes, copied):
    """Also the second time, into what the first has touched."""
    probe = CopyProbe(ticking, helpers=helpers)
    for _ in range(2):
        assert probe.copy([memoryview(bytes(size)) for size in sizes]) == (copied, 1)
    probe.close()


def test_longer_chunks_find_room(ticking):
    """Namespaces have chunks of sizes of their own."""
    probe = CopyProbe(ticking, helpers=0)
    assert [probe.copy([memoryview(bytes(size))])[0] for size in (4, 9, 4)] == [4, 9, 4]
    probe.close()
