"""Miss-ratio curves from a sample of the blocks, with the classes that watch a running fleet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tiertune_agent.replay.exact import pool_hits
from tiertune_agent.replay.traces import Trace
from tiertune_connector.eviction import Key
from tiertune_connector.whatif.curve import Curve
from tiertune_connector.whatif.known import KnownKeys
from tiertune_connector.whatif.mini import Miniatures
from tiertune_connector.whatif.sampler import Frequent, Hashes, HotSet, mix

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
        yield trace.keys[start:end], values, values[known.before(values)]
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
