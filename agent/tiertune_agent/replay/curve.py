"""Miss-ratio curve of one cache: exact, one simulation per size; or from a sample of the blocks."""

from collections.abc import Sequence

from tiertune_agent.fields import JsonDict
from tiertune_agent.replay.exact import chunks_of, opt_hits, pool_hits
from tiertune_agent.replay.sampled import Sampled, sampled
from tiertune_agent.replay.traces import Trace
from tiertune_agent.terminal.progress import Step, unseen
from tiertune_connector.eviction import ALGORITHMS
from tiertune_connector.units import Clock


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
    chains = len(trace.keys)  # unpacked outside the measured time
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


def known_algorithms() -> list[str]:
    return [*ALGORITHMS, "opt"]


def _exact(trace: Trace, algorithm: str, chunks: Sequence[int], step: Step) -> Sampled:
    ratios = []
    for size in chunks:
        hits = opt_hits(trace, size) if algorithm == "opt" else pool_hits(trace, algorithm, size)
        ratios.append(hits / trace.accesses)
        step()
    return Sampled(ratios, [1.0] * len(ratios), len(ratios))
