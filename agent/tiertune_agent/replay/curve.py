"""Miss-ratio curve of one cache, exact: the pool that production runs, once per size, tail first."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiertune_agent.replay.opt import opt_hits
from tiertune_agent.replay.traces import Trace
from tiertune_connector.eviction import ALGORITHMS
from tiertune_connector.pool import Pool

SMALLEST = 8
"""Chunks of the smallest cache, whatever its share."""


@dataclass(frozen=True)
class Point:
    """One size: its share of the unique blocks, its chunks, and the share of accesses within cached prefixes."""

    size: float
    chunks: int
    hit_ratio: float


def curve(trace: Trace, algorithm: str, sizes: Sequence[float]) -> list[Point]:
    """Hit ratios of a cache of max(8, int(size * unique)) chunks; ``algorithm`` is one of the pool's, or opt."""
    points = []
    for size in sizes:
        chunks = max(SMALLEST, int(size * trace.unique))
        hits = opt_hits(trace, chunks) if algorithm == "opt" else pool_hits(trace, algorithm, chunks)
        points.append(Point(size, chunks, hits / trace.accesses))
    return points


def pool_hits(trace: Trace, algorithm: str, chunks: int) -> int:
    """Accesses within the longest contiguous cached prefix of their request, counted before it touches the cache."""
    pool: Pool[bool] = Pool(chunks, algorithm)
    hits = 0
    for chain in trace.keys:
        hits += pool.prefix(chain)
        pool.write_through(chain, place=True)
    return hits


def curve_document(trace: Trace, algorithm: str, sizes: Sequence[float], clock: Callable[[], float]) -> dict[str, Any]:
    """The curve with its cost, as ``tiertune curve --json`` writes it; ``clock`` tells seconds."""
    chains = len(trace.keys)  # unpacked outside the measured time
    assert chains == len(trace)
    start = clock()
    points = curve(trace, algorithm, sizes)
    seconds = clock() - start
    return {
        "trace": trace.name,
        "algorithm": algorithm,
        "sampled": None,
        "accesses": trace.accesses,
        "unique": trace.unique,
        "points": [asdict(point) for point in points],
        "seconds": seconds,
        "us_per_access": 1e6 * seconds / (trace.accesses * len(points)),
    }


def known_algorithms() -> list[str]:
    return [*ALGORITHMS, "opt"]
