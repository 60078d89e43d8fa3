"""``tuned`` beside the other runs of a replay, in every cell of trace, routing, total, link, fleet and seed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.goals import Goal
from benchmarks.tuning.figures import mean, worst
from benchmarks.tuning.jobs import Job, Row, Summary
from benchmarks.tuning.worlds import Grid, scenario, short
from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.contents import ReplayedRequest, Sizes
from tiertune_agent.replay.play import Play, Tally
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.replay.traces import open_trace
from tiertune_agent.replay.tuned import START, conduct

OTHERS = ("baseline", "rule", "best_static", "best_split")
LEAST_GAIN = 0.01
"""Cells in which even the best split gains less tell nothing of ``share_of_best_splits_gain``: they are left out."""
SHOWN = ("best_gain", "tuned_gain", "against_rule", "regret", "worst_hour", "decisions")
GOALS = {
    "share_of_best_splits_gain": Goal("at least", 0.8, 1),
    "against_rule": Goal("at most", -0.06, -0.10),
    "against_best_static": Goal("at most", -0.08, -0.15),
    "regret_mean": Goal("at most", 0.03, 0.015),
    "regret_p90": Goal("at most", 0.08, 0.05),
    "worst_hour": Goal("at most", 0.02),
    "most_changes_in_a_period": Goal("at most", 1),
}
"""Changes are counted per tier."""


class Contents(NamedTuple):
    """What decides what caches hold; cells that differ only in link and model share it."""

    trace: str
    routing: str
    total: float
    seed: int


def jobs(grid: Grid) -> Iterator[Job]:
    for shared in map(Contents._make, product(grid.traces, grid.routings, grid.totals, range(grid.seeds))):
        where = f"{short(shared.trace)} {shared.routing} {shared.total:g} seed {shared.seed}"
        cases = {
            f"{where} {fleet} {gbps:g}g{grid.under}": (fleet, gbps, grid.policy)
            for fleet, gbps in product(grid.fleets, grid.links)
        }
        yield Job(cells, shared, cases)


def cells(shared: Contents, cases: Sequence[tuple[str, float, Policy | None]]) -> Iterator[Row]:
    trace, kept = open_trace(shared.trace), dict[Sizes, list[ReplayedRequest]]()
    half = shared.total / 2
    for fleet, gbps, policy in cases:
        world = scenario(fleet, dram=half, remote=half, gbps=gbps, routing=shared.routing, seed=shared.seed)
        replay = Replay(trace, world, kept=kept)
        yield {**shared._asdict(), "trace": trace.name, "fleet": fleet, "gbps": gbps, **_cell(replay, kept, policy)}


def _cell(replay: Replay, kept: dict[Sizes, list[ReplayedRequest]], policy: Policy | None) -> Row:
    runs = {name: replay.run(name) for name in OTHERS}
    agent, tally = conduct(replay, policy)
    runs["tuned"] = replay.report(tally, split=agent.split)
    baseline = Play(replay, "always").all(kept[replay.split(START)])
    period_s = replay.scenario.period_s
    periods = Counter((int(change.at_s // period_s), change.target.tier) for change in agent.changes)
    return {
        **_compared(runs),
        "best_split": runs["best_split"]["split"][0][1],
        "split": agent.split,
        "decisions": len(agent.changes),
        "rollbacks": sum(change.state == "rolled_back" for change in agent.changes),
        "worst_hour": _worst_hour(replay, tally, baseline),
        "most_changes_in_a_period": max(periods.values(), default=0),
    }


def _compared(runs: dict[str, dict[str, Any]]) -> Row:
    ttft = {name: run["ttft_mean_s"] for name, run in runs.items()}
    late = {name: run["ttft_mean_after_3_periods_s"] for name, run in runs.items()}
    return {
        "ttft_mean_s": ttft,
        "best_gain": 1 - ttft["best_split"] / ttft["baseline"],
        "tuned_gain": 1 - ttft["tuned"] / ttft["baseline"],
        "against_rule": ttft["tuned"] / ttft["rule"] - 1,
        "against_best_static": ttft["tuned"] / ttft["best_static"] - 1,
        "regret": late["tuned"] / late["best_split"] - 1 if late["tuned"] else None,
    }


def _worst_hour(replay: Replay, tuned: Tally, baseline: Tally) -> float:
    hours = (np.array(replay.times) // 3600).astype(int)
    mine, theirs = (np.bincount(hours, weights=np.array(run.ttft_s)) for run in (tuned, baseline))
    return max(float(a / b - 1) for a, b in zip(mine, theirs, strict=True) if b)


def summary(rows: Sequence[Row]) -> Summary:
    regrets = [row["regret"] for row in rows if row["regret"] is not None]
    return {
        "cells": len(rows) or None,
        "share_of_best_splits_gain": mean(
            row["tuned_gain"] / row["best_gain"] for row in rows if row["best_gain"] >= LEAST_GAIN
        ),
        "against_rule": mean(row["against_rule"] for row in rows),
        "against_best_static": mean(row["against_best_static"] for row in rows),
        "regret_mean": mean(regrets),
        "regret_p90": float(np.percentile(regrets, 90)) if regrets else None,
        "worst_hour": worst(row["worst_hour"] for row in rows),
        "most_changes_in_a_period": worst(row["most_changes_in_a_period"] for row in rows),
    }
