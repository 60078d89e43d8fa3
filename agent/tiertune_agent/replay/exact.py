"""One cache over a whole trace: the pool that production runs, written tail first; and Belady's optimum."""

from heapq import heappop, heappush

import numpy as np

from tiertune_agent.replay.traces import Ints, Trace
from tiertune_connector.whatif.simulated import SimulatedPool

SMALLEST = 8
"""Chunks that a cache has at least, whatever its share."""
NEVER = np.iinfo(np.int64).max


def chunks_of(trace: Trace, size: float) -> int:
    """Chunks of a cache that holds the share ``size`` of the unique blocks."""
    return max(SMALLEST, int(size * trace.unique))


def pool_hits(trace: Trace, algorithm: str, chunks: int) -> int:
    """Accesses within the longest cached prefix of their request, counted before the request touches the cache."""
    pool = SimulatedPool(chunks, algorithm)
    for chain in trace.keys:
        pool.request(chain)
    return pool.hits


def opt_hits(trace: Trace, chunks: int) -> int:
    """Accesses within cached prefixes when the victim is the block whose next request is the furthest (Belady 1966).

    No online algorithm can beat that by much. On ties deeper blocks leave first; a block that is not used again is not
    kept.
    """
    following = next_requests(trace).tolist()
    resident: dict[int, int] = {}  # block: index of its next request
    furthest: list[tuple[int, int, int]] = []  # -next request, -depth, block; outdated entries stay until they surface
    place = hits = 0
    for chain in trace.chains:
        cached = True
        for depth, block in enumerate(chain):
            cached = cached and block in resident
            hits += cached
            following_request = following[place + depth]
            if following_request == NEVER:
                resident.pop(block, None)
                continue
            resident[block] = following_request
            heappush(furthest, (-following_request, -depth, block))
        place += len(chain)
        while len(resident) > chunks:
            negative, _, block = heappop(furthest)
            if resident.get(block) == -negative:
                del resident[block]
    return hits


def next_requests(trace: Trace) -> Ints:
    """For every access the index of the next request with its block, or NEVER."""
    requests = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    order = np.argsort(trace.ids, kind="stable")
    again = trace.ids[order[:-1]] == trace.ids[order[1:]]
    following = np.full(trace.accesses, NEVER, dtype=np.int64)
    following[order[:-1][again]] = requests[order[1:][again]]
    return following
