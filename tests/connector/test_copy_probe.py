"""A probe of copies: as many chunks and bytes as an engine would copy at a time, and the seconds that it takes."""

import itertools

import pytest

from connector.local_dram import resize
from tiertune_connector.chunk import NOBODY
from tiertune_connector.copying.probe import PART_BYTES, CopyProbe
from tiertune_connector.store.health import Health
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tuning import Tuning


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


def serving(sizes):
    """A tier with room for chunks of these sizes, by namespace, and what looks after its health."""
    dram = DramTier(segment_bytes=1 << 20, clock=itertools.count(10.0).__next__)
    for name, size in sizes.items():
        dram.attach(name, size, "lru")
    resize(dram, 4 << 20)
    return dram, Health(dram, None, {}, itertools.count(10.0).__next__, Tuning)


def hold(dram, name, key=b"k"):
    dram.commit(name, key, dram.reserve(name, key, NOBODY), 0)


def test_a_store_probes_the_largest_chunks_that_it_has(monkeypatch):
    """Whichever namespace came first: small ones would tell what threads and clocks take. No pin is left.

    A chunk or two that a processor's cache holds would tell how fast that is: they are probed where there is no more.
    """
    sizes = {"small": 512, "large": 65536, "empty": 1 << 17, "written": 1 << 17}
    dram, health = serving(sizes)
    for name in ("small", "large"):
        hold(dram, name)
    dram.reserve("written", b"k", NOBODY)
    copied = []
    monkeypatch.setattr(CopyProbe, "copy", lambda _, chunks: (copied.extend(map(len, chunks)), (1, 1.0))[1])
    for cache in (1 << 12, 1 << 12, 1 << 20):
        monkeypatch.setattr("tiertune_connector.store.health._CACHE_BYTES", cache)
        assert not health.remote_unwell
        assert not health.probe(), "there is no remote to be probed soon again"
    assert copied == [sizes["large"]] * 3
    monkeypatch.setattr("tiertune_connector.store.health._CACHE_BYTES", 1 << 17)
    for key in (b"%d" % number for number in range(300)):
        hold(dram, "small", key)
    health.probe()
    assert set(copied[3:]) == {sizes["small"]}
    assert not any(pool.pool.pinned for name, pool in dram.pools.items() if name != "written")
    health.close()
    dram.close()


def test_a_models_small_loads_tell_nothing_of_anothers_large_chunks():
    """What messages and threads take of them would be bytes that come many times slower; alone, they are all there is.

    A load of many small chunks is as good as one of a large one.
    """
    sizes = {"small": 512, "large": 65536}
    dram, health = serving(sizes)

    def learned(chunks):
        before = health.dram_cost().samples
        health.dram_took(chunks, chunks * sizes["small"], 0.001)
        return health.dram_cost().samples > before

    hold(dram, "small")
    assert learned(1)
    hold(dram, "large")
    assert [learned(chunks) for chunks in (1, 127, 128)] == [False, False, True]
    health.close()
    dram.close()
