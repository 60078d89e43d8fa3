"""Miss-ratio curve of one cache: exact, one simulation per size; or from a sample of the blocks.

Exact curves are of the pool that production runs, written tail first, and of Belady's optimum; sampled ones of the
classes that watch a running fleet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from tiertune_agent.fields import JsonDict
from tiertune_agent.replay.traces import Ints, Trace
from tiertune_agent.terminal.progress import Step, unseen
from tiertune_connector.eviction import ALGORITHMS, Key
from tiertune_connector.units import Clock
from tiertune_connector.whatif.curve import Curve
from tiertune_connector.whatif.known import KnownKeys
from tiertune_connector.whatif.mini import Miniatures
from tiertune_connector.whatif.sampler import Frequent, Hashes, HotSet, mix
from tiertune_connector.whatif.simulated import SimulatedPool

KNOWN = (*ALGORITHMS, "opt")
"""Algorithms that there are curves of."""
SMALLEST = 8
"""Chunks that a cache has at least, whatever its share."""
NEVER = np.iinfo(np.int64).max
EXACT_BELOW = 100_000
"""A trace with fewer different blocks is small enough to be simulated whole."""
HOT = 1024
"""At most this many keys are followed one by one: system prompts in small blocks have more than a store affords."""
HALF_LIFE = 8192
"""Requests after which key counts are halved; all requests are counted, so that hot keys are known early."""
BATCH = 2048
"""Blocks that are studied at once, in whole requests: a vector for each would cost more than it saves."""
FEWEST = 16
"""Blocks that the miniature of a cache should hold at least."""


@dataclass(frozen=True)
class Sampled:
    """Hit ratios at some capacities, with the rate at which each was sampled, and how often the trace was read."""

    hit_ratios: list[float]
    rates: list[float]
    passes: int


def curve_document(
    trace: Trace,
    algorithm: str,
    sizes: Sequence[float],
    clock: Clock,
    *,
    rate: float | None = None,
    seed: int = 1,
    step: Step = unseen,
) -> JsonDict:
    """The curve with its cost, as ``tiertune curve --json`` writes it; ``clock`` returns seconds.

    There is a point for each of ``sizes``, shares of the unique blocks; ``algorithm`` is one of the pool's, or opt. In
    the document, ``sampled`` is the ``rate`` asked for, and ``rates`` has the rate of each point (1: all blocks). The
    cost is per access and pass over the trace; a sampled LRU takes one pass for all but its smallest sizes. ``step`` is
    called after each size of an exact curve.
    """
    chains = len(trace.chains)  # unpacked outside the measured time
    assert chains == len(trace)
    chunks = [chunks_of(trace, size) for size in sizes]
    start = clock()
    found = _exact(trace, algorithm, chunks, step) if rate is None else sampled(trace, algorithm, chunks, rate, seed)
    seconds = clock() - start
    return {
        "trace": trace.name,
        "algorithm": algorithm,
        "sampled": rate,
        **({} if rate is None else {"rates": found.rates, "seed": seed}),
        "accesses": trace.accesses,
        "unique": trace.unique,
        "points": [
            {"size": size, "chunks": cached, "hit_ratio": ratio}
            for size, cached, ratio in zip(sizes, chunks, found.hit_ratios, strict=True)
        ],
        "seconds": seconds,
        "us_per_access": 1e6 * seconds / (trace.accesses * found.passes),
    }


def _exact(trace: Trace, algorithm: str, chunks: Sequence[int], step: Step) -> Sampled:
    ratios = []
    for size in chunks:
        hits = opt_hits(trace, size) if algorithm == "opt" else pool_hits(trace, algorithm, size)
        ratios.append(hits / trace.accesses)
        step()
    return Sampled(ratios, [1.0] * len(ratios), len(ratios))


def chunks_of(trace: Trace, size: float) -> int:
    """Chunks of a cache that holds the share ``size`` of the unique blocks."""
    return max(SMALLEST, int(size * trace.unique))


def pool_hits(trace: Trace, algorithm: str, chunks: int) -> int:
    """Accesses within the longest cached prefix of their request, counted before the request touches the cache."""
    pool = SimulatedPool(chunks, algorithm)
    for chain in trace.chains:
        pool.request(chain)
    return pool.hits


def opt_hits(trace: Trace, chunks: int) -> int:
    """Accesses within cached prefixes when the victim is the block whose next request is the furthest (Belady 1966).

    No online algorithm can beat that by much. On ties deeper blocks leave first; a block that is not used again is not
    kept.
    """
    following = next_requests(trace).tolist()
    resident: dict[Key, int] = {}  # block: index of its next request
    furthest: list[tuple[int, int, Key]] = []  # -next request, -depth, block; outdated entries stay until they surface
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


def sampled(trace: Trace, algorithm: str, chunks: Sequence[int], rate: float, seed: int) -> Sampled:
    """Sample at ``rate``, but take all blocks if they are few, and a higher rate if a cache would be too small."""
    rate = rate if trace.unique >= EXACT_BELOW else 1.0
    return _lru(trace, chunks, rate, seed) if algorithm == "lru" else _miniatures(trace, algorithm, chunks, rate, seed)


def batches(trace: Trace, seed: int) -> Iterator[tuple[list[list[Key]], Hashes, Hashes]]:
    """Some chains at a time, the hashes of all their blocks, and the hashes of only the blocks that came before."""
    hashed, known, offsets = mix(trace.ids.astype(np.uint64), seed), KnownKeys(), trace.offsets
    start = 0
    while start < len(trace):
        end = max(start + 1, int(np.searchsorted(offsets, offsets[start] + BATCH, side="right")) - 1)
        values = hashed[offsets[start] : offsets[end]]
        yield trace.chains[start:end], values, values[known.before(values)]
        start = end


def _lru(trace: Trace, chunks: Sequence[int], rate: float, seed: int) -> Sampled:
    """All sizes in one pass; those of less than one sampled block exactly, one by one."""
    small = [size for size in chunks if size * rate < 1]
    large = [size for size in chunks if size * rate >= 1]
    ratios = {size: pool_hits(trace, "lru", size) / trace.accesses for size in small}
    if large:
        largest, hot = (None, HotSet(HOT, Frequent(every=1, half_life=HALF_LIFE))) if rate < 1 else (trace.unique, None)
        curve = Curve(rate, largest=largest, hot=hot, most_tracked=2 * trace.unique)  # never lowers the rate
        for batch in batches(trace, seed):
            curve.requests(*batch)
        curve.settle()
        ratios.update(zip(large, curve.hit_ratios(large), strict=True))
    rates = [curve.rate if size * rate >= 1 else 1.0 for size in chunks]
    return Sampled([ratios[size] for size in chunks], rates, len(small) + bool(large))


def _miniatures(trace: Trace, algorithm: str, chunks: Sequence[int], rate: float, seed: int) -> Sampled:
    """One simulation per size; if it would hold few blocks, more are sampled, or all."""
    rates = [_rate(rate, min(size, trace.unique)) for size in chunks]
    caches = [Miniatures(size, [algorithm], own) for size, own in zip(chunks, rates, strict=True)]
    hot = HotSet()
    for chains, hashed, again in batches(trace, seed):
        refreshed = hot.requests(chains)
        for cache in caches:
            cache.requests(chains, hashed, again)
            if refreshed:
                cache.warm(hot)
    taken = [cache.take(whole=True) for cache in caches]
    return Sampled([hits / keys for each in taken for hits, keys in each.values()], rates, len(chunks))


def _rate(asked: float, chunks: int) -> float:
    """The higher of ``asked`` and what gives a miniature ``FEWEST`` blocks; all if that is more than half of them."""
    needed = FEWEST / chunks
    return max(asked, needed if needed <= 0.5 else 1.0)
