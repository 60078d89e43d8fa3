"""Hits of the product's algorithms beside those of libcachesim."""

import pytest

from replay.files import external
from tiertune_agent.replay.curve import chunks_of
from tiertune_agent.replay.traces import builtin_trace, load_trace
from tiertune_connector.whatif.simulated import SimulatedPool

libcachesim = pytest.importorskip("libcachesim")
THEIRS = {"lru": libcachesim.LRU, "fifo": libcachesim.FIFO, "arc": libcachesim.ARC}
"""Its S3-FIFO promotes at another count; of single accesses, for it knows no chains."""


def ours(accesses, algorithm, chunks):
    pool, hits = SimulatedPool(chunks, algorithm), 0
    for key in accesses:
        hits += key in pool
        pool.write_through([key])
    return hits


def theirs(accesses, algorithm, chunks):
    cache = THEIRS[algorithm](cache_size=chunks, hashpower=16)
    return sum(cache.get(libcachesim.Request(obj_size=1, obj_id=key)) for key in accesses)


@pytest.mark.parametrize("size", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("algorithm", THEIRS)
@pytest.mark.parametrize("name", ["lmcache_agents", pytest.param("mooncake_conv", marks=pytest.mark.slow)])
def test_hits_are_those_of_another_implementation(name, algorithm, size):
    """Tail first, within 0.1 points: LRU and FIFO exactly."""
    trace = builtin_trace(name) if name == "lmcache_agents" else load_trace(external(name))
    chunks = chunks_of(trace, size)
    accesses = [int(block) for keys in trace.chains[:3000] for block in reversed(keys)]
    counts = [count(accesses, algorithm, chunks) for count in (ours, theirs)]
    assert min(counts) > 0
    assert 100 * abs(counts[0] - counts[1]) / len(accesses) <= (0.1 if algorithm == "arc" else 0.0)
