"""The gate against one that knows the true bandwidth, and against always and never; means of seeds."""

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.goals import Goal
from benchmarks.tuning.figures import mean, means_of_seeds, worst
from benchmarks.tuning.jobs import Job, Row, Summary
from benchmarks.tuning.worlds import FLEETS, UNEVEN, Grid, scenario, short
from tiertune_agent.replay.contents import ReplayedRequest, Sizes
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.replay.traces import open_trace

SEEDS = 5
"""Least number of seeds: with one alone, the link's fluctuation matters more than the gate."""
RUNS = ("rule", "rule_oracle", "best_static")
SHOWN = ("over_oracle", "over_best_static")
GOALS = {
    "rule_over_oracle_worst": Goal("at most", 0.05, 0.03),
    "rule_over_best_static_worst": Goal("at most", 0.02),
}


def jobs(grid: Grid) -> Iterator[Job]:
    """All fleets, whichever were asked for: the goal is over models."""
    for trace, seed in product(grid.traces, range(max(SEEDS, grid.seeds))):
        cases = {
            f"{short(trace)} {fleet} {gbps:g}g seed {seed}": (fleet, gbps)
            for fleet, gbps in product(FLEETS, grid.links)
        }
        yield Job(gates, (trace, seed), cases)


def gates(shared: tuple[str, int], cases: Sequence[tuple[str, float]]) -> Iterator[Row]:
    (name, seed), kept = shared, dict[Sizes, list[ReplayedRequest]]()
    trace, (dram, remote) = open_trace(name), UNEVEN
    for fleet, gbps in cases:
        world = scenario(fleet, dram=dram, remote=remote, gbps=gbps, routing="random", seed=seed)
        replay = Replay(trace, world, kept=kept)
        ttft = {run: replay.run(run)["ttft_mean_s"] for run in RUNS}
        yield {
            "trace": trace.name,
            "fleet": fleet,
            "gbps": gbps,
            "seed": seed,
            "ttft_mean_s": ttft,
            "over_oracle": ttft["rule"] / ttft["rule_oracle"] - 1,
            "over_best_static": ttft["rule"] / ttft["best_static"] - 1,
        }


def summary(rows: Sequence[Row]) -> Summary:
    told = list(means_of_seeds(rows, ("trace", "fleet", "gbps")))
    oracle = [cell["rule"] / cell["rule_oracle"] - 1 for cell in told]
    return {
        "gate_cells": len(told) or None,
        "rule_over_oracle_mean": mean(oracle),
        "rule_over_oracle_worst": worst(oracle),
        "rule_over_best_static_worst": worst(cell["rule"] / cell["best_static"] - 1 for cell in told),
    }
