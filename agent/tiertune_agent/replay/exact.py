"""One cache over a whole trace: the pool that production runs, tail first."""

from tiertune_agent.replay.traces import Trace
from tiertune_connector.whatif.simulated import SimulatedPool

SMALLEST = 8
"""Chunks of the smallest cache, whatever its share."""


def chunks_of(trace: Trace, size: float) -> int:
    """Chunks of a cache for this share of the unique blocks."""
    return max(SMALLEST, int(size * trace.unique))


def pool_hits(trace: Trace, algorithm: str, chunks: int) -> int:
    """Accesses within the longest contiguous cached prefix of their request, counted before it touches the cache."""
    pool = SimulatedPool(chunks, algorithm)
    hits = 0
    for chain in trace.keys:
        hits += pool.prefix(chain)
        pool.write_through(chain)
    return hits
