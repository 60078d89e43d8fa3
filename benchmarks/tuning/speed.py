"""What a replay of all runs takes with 64 engines: CPU seconds and memory of a process that does nothing else."""

import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter

from benchmarks.goals import Goal
from benchmarks.tuning.figures import worst
from benchmarks.tuning.jobs import Job, Row, Summary, follow_parent
from benchmarks.tuning.worlds import UNEVEN, Grid, scenario, short
from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.simulate import replay_document, runs_of
from tiertune_agent.replay.traces import open_trace

ENGINES = 64
HOURS = 4.0
"""Length of trace that the goal is for; CPU time of a longer one is scaled down to it."""
SHOWN = ("hours", "cpu_s", "max_rss_gib")
GOALS = {
    "speed_cpu_s_worst": Goal("at most", 600),
    "speed_max_rss_gib_worst": Goal("at most", 4),
}


def jobs(grid: Grid) -> Iterator[Job]:
    for trace in grid.traces:
        for queueing in (False, True):
            row = f"{short(trace)} {'with' if queueing else 'without'} queues{grid.under}"
            yield Job(speeds, trace, {row: (queueing, grid.policy)})


def speeds(name: str, cases: Sequence[tuple[bool, Policy | None]]) -> Iterator[Row]:
    for queueing, policy in cases:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=follow_parent) as fresh:
            yield fresh.submit(alone, name, policy, queueing=queueing).result()


def alone(name: str, policy: Policy | None, *, queueing: bool) -> Row:
    """All runs in this process, which has done nothing before."""
    trace, (dram, remote) = open_trace(name), UNEVEN
    world = scenario("8b", dram=dram, remote=remote, routing="random", engines=ENGINES, queueing=queueing)
    document = replay_document(trace, world, runs_of(world), perf_counter, policy)
    used = resource.getrusage(resource.RUSAGE_SELF)
    hours = float(trace.t[-1] - trace.t[0]) / 3600
    cpu_s = used.ru_utime + used.ru_stime
    return {
        "trace": trace.name,
        "queueing": queueing,
        "requests": len(trace),
        "hours": hours,
        "runs": list(document["runs"]),
        "cpu_s": cpu_s,
        "cpu_s_of_4_hours": cpu_s * HOURS / max(HOURS, hours),
        "wall_s": document["wall_s"],
        "max_rss_gib": used.ru_maxrss / 2**20,
    }


def summary(rows: Sequence[Row]) -> Summary:
    return {
        "speed_cpu_s_worst": worst(row["cpu_s_of_4_hours"] for row in rows),
        "speed_max_rss_gib_worst": worst(row["max_rss_gib"] for row in rows),
    }
