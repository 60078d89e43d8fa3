"""Hit ratios of a fleet, isolated against shared: ``python -m benchmarks.fleet_hit_rate [TRACE...] [--json PATH]``.

1 to 32 engines, each with the same memory (so that a shared tier grows with the fleet), random and sticky routing,
tail-first LRU in production's pools. *1/N*: with random routing a cache has seen a prompt that comes for the second
time with probability 1/N, so this column is the hit ratio of one engine alone, divided by N. *Exact*: a block that is
asked for R times has N (1 - (1 - 1/N)^R) misses instead of one; caches that keep everything (memory 1) must show this.
*Even*: the same if all blocks were asked for equally often, as ``tiertune plan`` assumes: a lower bound, because the
blocks that are asked for most are soon in every cache.

The shipped traces: ``python -m benchmarks.fleet_hit_rate --json benchmarks/results/fleet_hit_rate.json``. Any other:
``python -m benchmarks.fleet_hit_rate shared/traces/*.parquet``.
"""

import argparse
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import document
from tiertune_agent.plan import isolated_hit_share
from tiertune_agent.replay.contents import stick
from tiertune_agent.replay.traces import BUILTIN, Trace, TraceError, open_trace
from tiertune_connector.whatif.simulated import SimulatedPool

ENGINES = (1, 2, 4, 8, 16, 32)
MEMORY = (0.01, 0.1, 1.0)
"""One engine's memory, as a share of the trace's unique blocks."""


def hit_ratio(trace: Trace, placed: Sequence[int], caches: int, chunks: int) -> float:
    """Share of accesses in cached prefixes; request r asks cache ``placed[r]`` of ``caches``, each of ``chunks``."""
    pools = [SimulatedPool(chunks) for _ in range(caches)]
    for chain, cache in zip(trace.chains, placed, strict=True):
        pools[cache].request(chain)
    return sum(pool.hits for pool in pools) / trace.accesses


def expected(trace: Trace, engines: int) -> float:
    """Hit ratio of caches that keep everything, under random routing."""
    asked = np.bincount(trace.ids)
    return float(1 - np.sum(engines * (1 - (1 - 1 / engines) ** asked)) / trace.accesses)


def rows(trace: Trace, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row per memory and number of engines."""
    nowhere = [0] * len(trace)
    for memory in MEMORY:
        chunks = max(1, int(memory * trace.unique))
        alone = hit_ratio(trace, nowhere, 1, chunks)
        for engines in ENGINES:
            spread = [np.random.default_rng(seed).integers(0, engines, len(trace)).tolist() for seed in seeds]
            shared = hit_ratio(trace, nowhere, 1, engines * chunks)
            yield {
                "memory": memory,
                "engines": engines,
                "shared": shared,
                "isolated_random": mean(hit_ratio(trace, placed, engines, chunks) for placed in spread),
                "isolated_sticky": hit_ratio(trace, stick(trace, engines), engines, chunks),
                "one_nth": alone / engines,
                "exact": expected(trace, engines),
                "even": isolated_hit_share(shared, engines),
            }


def table(name: str, measured: Sequence[dict[str, Any]]) -> str:
    columns = ("shared", "isolated_random", "isolated_sticky", "one_nth", "exact", "even")
    heads = ("shared", "random", "sticky", "1/N", "exact", "even")
    lines = [f"{name}: hits in % of block accesses; isolated but for the first column"]
    lines.append(f"{'memory':>7} {'engines':>8} " + " ".join(f"{head:>8}" for head in heads))
    for row in measured:
        figures = " ".join(f"{100 * row[column]:>8.2f}" for column in columns)
        lines.append(f"{row['memory']:>7g} {row['engines']:>8} {figures}")
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*", default=BUILTIN, help="parquet files; left out: the shipped ones")
    parser.add_argument("--seeds", type=_numbers, default="0,1,2", help="of random routing, with commas")
    parser.add_argument("--json", type=document.target)
    arguments = parser.parse_args()
    seeds, result = arguments.seeds, {}
    try:
        traces = [open_trace(name) for name in arguments.traces]
    except TraceError as error:
        parser.error(str(error))
    for trace in traces:
        result[trace.name] = list(rows(trace, seeds))
        print(table(trace.name, result[trace.name]), flush=True)
    if arguments.json:
        document.write(arguments.json, {"seeds": seeds, "traces": result})


if __name__ == "__main__":
    main()
