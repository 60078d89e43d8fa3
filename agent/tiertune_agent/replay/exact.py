"""One cache over a whole trace: the pool that production runs, written tail first."""

from tiertune_agent.replay.traces import Trace
from tiertune_connector.whatif.simulated import SimulatedPool

SMALLEST = 8
"""Chunks that a cache has at least, whatever its share."""


def chunks_of(trace: Trace, size: float) -> int:
    """Chunks of a cache that holds the share ``size`` of the unique blocks."""
    return max(SMALLEST, int(size * trace.unique))


def pool_hits(trace: Trace, algorithm: str, chunks: int) -> int:
    """Accesses within the longest cached prefix of their request, counted before the request touches the cache."""
    pool = SimulatedPool(chunks, algorithm)
    for chain in trace.keys:
        pool.request(chain)
    return pool.hits
