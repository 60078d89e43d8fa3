"""Sampled curves of LRU against exact ones: mean absolute error in percentage points, over five seeds."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from benchmarks.goals import Goal
from benchmarks.tuning.figures import worst
from benchmarks.tuning.jobs import Job, Row, Summary
from benchmarks.tuning.worlds import Grid, short
from tiertune_agent.replay.sampled import accuracy, exact_curve
from tiertune_agent.replay.traces import open_trace

RATE = 0.01
SEEDS = 5
SHOWN = ("unique", "error_points")
GOALS = {"curve_error_points_worst": Goal("at most", 1.5, 0.7)}


def jobs(grid: Grid) -> Iterator[Job]:
    for trace in grid.traces:
        yield Job(curves, trace, {f"{short(trace)} {RATE:g}": RATE})


def curves(name: str, cases: Sequence[float]) -> Iterator[Row]:
    trace = open_trace(name)
    exact = exact_curve(trace)
    for rate in cases:
        errors = [accuracy(trace, rate, seed, exact) for seed in range(SEEDS)]
        yield {"trace": trace.name, "unique": trace.unique, "rate": rate, "error_points": fmean(errors)}


def summary(rows: Sequence[Row]) -> Summary:
    return {"curve_error_points_worst": worst(row["error_points"] for row in rows)}
