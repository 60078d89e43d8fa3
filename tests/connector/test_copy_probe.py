"""A probe of copies: as many chunks and bytes as an engine would copy at a time, and the seconds that it takes."""

import itertools

import pytest

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


def test_a_store_probes_the_largest_chunks_that_it_has(monkeypatch):
    """Whichever namespace came first: small ones would tell what threads and clocks take. No pin is left.

    A chunk or two that a processor's cache holds would tell how fast that is: they are probed where there is no more.
    """
    monkeypatch.setattr("tiertune_connector.store.health._CACHE_BYTES", 1 << 12)
    dram = DramTier(segment_bytes=1 << 20, clock=itertools.count(10.0).__next__)
    health = Health(dram, {}, itertools.count(10.0).__next__, Tuning)
    sizes = {"small": 512, "large": 65536, "empty": 1 << 17, "written": 1 << 17}
    for name, size in sizes.items():
        dram.attach(name, size, "lru")
    dram.retune(4 << 20, dict.fromkeys(sizes, (1 << 20, "lru")))
    while dram.settle():
        pass
    for name in ("small", "large"):
        dram.commit(name, b"k", dram.reserve(name, b"k", NOBODY), 0)
    dram.reserve("written", b"k", NOBODY)
    copied = []
    monkeypatch.setattr(CopyProbe, "copy", lambda _, chunks: (copied.extend(map(len, chunks)), (1, 1.0))[1])
    for _ in range(3):
        health.probe()
    assert copied == [sizes["large"]] * 3
    monkeypatch.setattr("tiertune_connector.store.health._CACHE_BYTES", 1 << 17)
    for key in (b"%d" % number for number in range(300)):
        dram.commit("small", key, dram.reserve("small", key, NOBODY), 0)
    health.probe()
    assert set(copied[3:]) == {sizes["small"]}
    assert not any(pool.pool.pinned for name, pool in dram.pools.items() if name != "written")
    health.close()
    dram.close()


def test_a_models_small_loads_tell_nothing_of_anothers_large_chunks():
    """What messages and threads take of them would be bytes that come many times slower; alone, they are all there is.

    A load of many small chunks is as good as one of a large one.
    """
    dram, clock = DramTier(segment_bytes=1 << 20, clock=itertools.count(10.0).__next__), itertools.count(10.0)
    health = Health(dram, {}, clock.__next__, Tuning)
    sizes = {"small": 512, "large": 65536}
    for name, size in sizes.items():
        dram.attach(name, size, "lru")
    dram.retune(4 << 20, dict.fromkeys(sizes, (1 << 20, "lru")))
    while dram.settle():
        pass

    def learned(chunks):
        before = health.dram_cost().samples
        health.dram_took(chunks, chunks * sizes["small"], 0.001)
        return health.dram_cost().samples > before

    dram.commit("small", b"k", dram.reserve("small", b"k", NOBODY), 0)
    assert learned(1)
    dram.commit("large", b"k", dram.reserve("large", b"k", NOBODY), 0)
    assert [learned(chunks) for chunks in (1, 127, 128)] == [False, False, True]
    health.close()
    dram.close()
