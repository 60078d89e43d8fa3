"""What-if's cost in a store: CPU nanoseconds per chunk that requests look up, medians of passes over a trace."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from statistics import median
from time import process_time_ns
from typing import ParamSpec

import numpy as np

from benchmarks.goals import Goal
from benchmarks.tuning.figures import worst
from benchmarks.tuning.jobs import Job, Row, Summary
from benchmarks.tuning.worlds import Grid, short
from tiertune_agent.replay.curve import chunks_of
from tiertune_agent.replay.traces import Trace, open_trace
from tiertune_connector.keys import Namespace
from tiertune_connector.sampling.observer import Observer, Room
from tiertune_connector.sessions.session import Session
from tiertune_connector.whatif.pool_ghosts import PoolGhosts
from tiertune_connector.whatif.sampler import Hashes, mix

SIZES = (0.001, 0.01, 0.1)
"""Sizes of the pool, as shares of the unique blocks."""
PASSES = 3
MOST_CHUNKS = 1_000_000
"""Most chunks of a pass: later ones of a long trace cost no less and no more."""
TOGETHER = 20
"""Requests between two looks at the queue, as in a busy store."""
BLOCK_BYTES = 1 << 20
NAMESPACE = Namespace(model="model", chunk_tokens=16)
SHOWN = ("ghosts_ns", "sampler_ns", "store_ns")
GOALS = {"store_ns_per_chunk_worst": Goal("at most", 1200)}

Chain = Sequence[bytes]
P = ParamSpec("P")


def jobs(grid: Grid) -> Iterator[Job]:
    for trace in grid.traces:
        yield Job(costs, trace, {f"{short(trace)} {size:g}": size for size in SIZES})


def costs(name: str, cases: Sequence[float]) -> Iterator[Row]:
    """``ghosts``: of all algorithms, with the curve; ``sampler``: with queue and ring; ``store``: all of it."""
    trace = open_trace(name)
    count = max(1, int(np.searchsorted(trace.offsets, MOST_CHUNKS, side="right")) - 1)
    chains, accesses = stored(trace, count), int(trace.offsets[count])
    hashed = _hashes(trace, count)
    for size in cases:
        chunks = chunks_of(trace, size)
        room = Room(chunks, BLOCK_BYTES)
        told = {
            "ghosts_ns": _ns(_ghosts, chunks, chains, hashed),
            "sampler_ns": _ns(observe, chains, trace.block_tokens, None),
            "store_ns": _ns(observe, chains, trace.block_tokens, room),
        }
        told = {figure: nanoseconds / accesses for figure, nanoseconds in told.items()}
        yield {"trace": trace.name, "size": size, "chunks": chunks, "chain_mean": accesses / count, **told}


def stored(trace: Trace, count: int) -> list[Chain]:
    """The first chains with keys such as a store has: digests of 32 bytes."""
    digests = {block: sha256(block.to_bytes(8, "little")).digest() for block in set(trace.ids.tolist())}
    return [[digests[block] for block in chain] for chain in trace.chains[:count]]


def observe(chains: Sequence[Chain], chunk_tokens: int, room: Room | None) -> None:
    """Leave all lookups with a store's observer, and have it study them."""
    session = Session("client", "engine", "all", NAMESPACE, BLOCK_BYTES, chunk_tokens)
    observer = Observer(lambda _: room, lambda: 0.0)
    observer.attach(session)
    for number, chain in enumerate(chains, 1):
        observer.seen(session, chain, len(chain) * chunk_tokens)
        if number % TOGETHER == 0:
            observer.settle()
    observer.settle()


def _ghosts(chunks: int, chains: Sequence[Chain], hashed: Sequence[Hashes]) -> None:
    ghosts = PoolGhosts(chunks)
    for keys, values in zip(chains, hashed, strict=True):
        ghosts.requests([keys], values)
    ghosts.counts()


def _hashes(trace: Trace, count: int) -> list[Hashes]:
    hashed = mix(trace.ids.astype(np.uint64), 0)
    return [hashed[start:end] for start, end in pairwise(trace.offsets[: count + 1].tolist())]


def _ns(once: Callable[P, None], *args: P.args, **more: P.kwargs) -> float:
    """CPU nanoseconds: the median of ``PASSES``."""
    taken = []
    for _ in range(PASSES):
        start = process_time_ns()
        once(*args, **more)
        taken.append(process_time_ns() - start)
    return median(taken)


def summary(rows: Sequence[Row]) -> Summary:
    return {f"{figure}_per_chunk_worst": worst(row[figure] for row in rows) for figure in SHOWN}
