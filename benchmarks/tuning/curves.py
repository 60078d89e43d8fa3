"""Sampled curves of LRU against exact ones, over five seeds: mean absolute error in percentage points, CPU time."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median
from time import process_time

import numpy as np

from benchmarks.goals import Goal
from benchmarks.tuning.figures import worst
from benchmarks.tuning.jobs import Job, Row, Summary
from benchmarks.tuning.worlds import Grid, short
from tiertune_agent.replay.curve import chunks_of, sampled
from tiertune_agent.replay.traces import Trace, open_trace

RATE = 0.01
SEEDS = 5
SHOWN = ("unique", "error_points", "us_per_access")
GOALS = {"curve_error_points_worst": Goal("at most", 1.5, 0.7), "curve_us_per_access_worst": Goal("at most", 1.2)}


def jobs(grid: Grid) -> Iterator[Job]:
    for trace in grid.traces:
        yield Job(curves, trace, {f"{short(trace)} {RATE:g}": RATE})


def curves(name: str, cases: Sequence[float]) -> Iterator[Row]:
    trace = open_trace(name)
    exact = exact_curve(trace)
    for rate in cases:
        errors, times = [], [process_time()]
        for seed in range(SEEDS):
            errors.append(accuracy(trace, rate, seed, exact))
            times.append(process_time())
        us = 1e6 * median(end - start for start, end in pairwise(times)) / trace.accesses
        told = {"unique": trace.unique, "rate": rate, "error_points": fmean(errors), "us_per_access": us}
        yield {"trace": trace.name, **told}


def accuracy(trace: Trace, rate: float, seed: int, exact: Sequence[float]) -> float:
    """Mean absolute error of the sampled curve of LRU, in percentage points, against ``exact``, of ``exact_curve``."""
    estimated = sampled(trace, "lru", _log_spaced(trace), rate, seed).hit_ratios
    return 100 * float(np.mean(np.abs(np.subtract(estimated, exact))))


def exact_curve(trace: Trace) -> list[float]:
    """Hit ratios of LRU at 64 log-spaced sizes from 0.1 to 100 % of the unique blocks."""
    return sampled(trace, "lru", _log_spaced(trace), 1.0, 0).hit_ratios


def _log_spaced(trace: Trace) -> list[int]:
    return [chunks_of(trace, float(size)) for size in np.geomspace(0.001, 1.0, 64)]


def summary(rows: Sequence[Row]) -> Summary:
    return {
        "curve_error_points_worst": worst(row["error_points"] for row in rows),
        "curve_us_per_access_worst": worst(row["us_per_access"] for row in rows),
    }
