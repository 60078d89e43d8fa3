"""With queues, the gate that sees them against the one that does not; means of seeds, as in ``gate``."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from benchmarks.goals import Goal
from benchmarks.tuning.figures import mean, means_of_seeds, worst
from benchmarks.tuning.gate import SEEDS
from benchmarks.tuning.jobs import Job, Row, Summary
from benchmarks.tuning.worlds import UNEVEN, Grid, scenario, short
from tiertune_agent.replay.contents import ReplayedRequest, Sizes, arrivals
from tiertune_agent.replay.engine import prefill_cost
from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.replay.traces import Trace, open_trace

LOADS = (0.5, 1.0, 2.0)
"""Load of the engines if every prompt were computed whole: seconds of prefill that come per second and engine."""
RUNS = ("rule", "rule_blind")
SHOWN = ("ratio",)
GOALS = {
    "queue_aware_over_blind_mean": Goal("below", 1),
    "queue_aware_over_blind_worst": Goal("at most", 1),
}


class Contents(NamedTuple):
    """What cells share: all but the link."""

    trace: str
    routing: str
    fleet: str
    load: float
    seed: int


def jobs(grid: Grid) -> Iterator[Job]:
    seeds = range(max(SEEDS, grid.seeds))
    for shared in map(Contents._make, product(grid.traces, grid.routings, grid.fleets, LOADS, seeds)):
        where = f"{short(shared.trace)} {shared.routing} {shared.fleet} load {shared.load:g} seed {shared.seed}"
        yield Job(queues, shared, {f"{where} {gbps:g}g": gbps for gbps in grid.links})


def queues(shared: Contents, cases: Sequence[float]) -> Iterator[Row]:
    trace, kept, (dram, remote) = open_trace(shared.trace), dict[Sizes, list[ReplayedRequest]](), UNEVEN
    for gbps in cases:
        plain = scenario(shared.fleet, dram=dram, remote=remote, gbps=gbps, routing=shared.routing, seed=shared.seed)
        factor = (load(trace, plain) or shared.load) / shared.load
        loaded = plain.model_copy(update={"queueing": True, "time_factor": factor})
        replay = Replay(trace, loaded, kept=kept)
        ttft = {run: replay.run(run)["ttft_mean_s"] for run in RUNS}
        yield {
            **shared._asdict(),
            "trace": trace.name,
            "gbps": gbps,
            "time_factor": factor,
            "ttft_mean_s": ttft,
            "ratio": ttft["rule"] / ttft["rule_blind"],
        }


def load(trace: Trace, world: Scenario) -> float | None:
    """The engines' load by the trace's own times, if every prompt were computed whole; None: all come at once."""
    prefill, span_s = prefill_cost(world), arrivals(trace, world)[-1]
    seconds = sum(prefill.seconds(0, tokens) or 0.0 for tokens in trace.input_len.tolist())
    return seconds / (world.engines * span_s) if span_s else None


def summary(rows: Sequence[Row]) -> Summary:
    told = means_of_seeds(rows, ("trace", "routing", "fleet", "load", "gbps"))
    ratios = [cell["rule"] / cell["rule_blind"] for cell in told]
    return {
        "queue_cells": len(ratios) or None,
        "queue_aware_over_blind_mean": mean(ratios),
        "queue_aware_over_blind_worst": worst(ratios),
    }
