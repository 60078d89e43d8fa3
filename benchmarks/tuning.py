"""The tuners' goals, measured: ``python -m benchmarks.tuning --traces DIR --json tuning.json`` (``make bench-tuning``).

Every run of a cell is made by the replay on the same requests and the same link, so all figures are ratios within one
run. Without ``--traces`` the traces that come along are used; they are small, so the goals are not theirs.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tiertune_agent.replay.contents import Found, contents
from tiertune_agent.replay.exact import chunks_of, pool_hits
from tiertune_agent.replay.sampled import accuracy, exact_curve
from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.replay.sizes import Sizes
from tiertune_agent.replay.traces import BUILTIN, open_trace
from tiertune_agent.replay.tuned import DEFAULT_POLICY, START, Agent, conduct, tuned

FLEETS = {"70b": ("llama-3-70b", "h100x8"), "8b": ("llama-3-8b", "h100"), "a10": ("llama-3-8b", "a10")}
ROUTINGS = ("random", "sticky")
TOTALS = (0.01, 0.03, 0.1, 0.3)
LINKS = (10, 25, 100)
SIZES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
ALGORITHMS = ("lru", "arc", "s3fifo")
PARTS = ("cells", "eviction", "phases", "curves", "harm")
SHOWN = (
    "trace",
    "fleet",
    "gbps",
    "routing",
    "total",
    "best_gain",
    "tuned_gain",
    "against_rule",
    "regret",
    "size",
    "against_best",
    "against_lru",
    "cell",
    "worst_hour",
    "error_points",
    "forced",
    "reported_after_s",
    "undone_after_s",
)
CURVE_RATE = 0.01
LEAST_GAIN = 0.01
"""Cells in which even the best split gains less tell nothing of the share that is realised."""


@dataclass(frozen=True)
class Job:
    """Cells of one trace that share their contents: all links and fleets of one routing, total and seed."""

    trace: str
    routing: str
    total: float
    seed: int
    fleets: tuple[str, ...]


def scenario(fleet: str, *, routing: str, total: float, gbps: float, seed: int, **more: Any) -> Scenario:  # noqa: ANN401
    """One cell: four nodes, half of the total in DRAM, a link that fluctuates as in reference runs."""
    model, gpu = FLEETS[fleet]
    noise = {"kind": "ar1", "sigma": 0.9, "phi": 0.9, "step_s": 30}
    return Scenario.model_validate(
        {
            "name": f"{fleet}-{gbps:g}g-{routing}-{total:g}",
            "engines": 4,
            "nodes": 4,
            "routing": routing,
            "model": model,
            "gpu": gpu,
            "tiers": {"dram": {"share": total / 2}, "remote": {"share": total / 2}},
            "link": {"gbps": gbps, "fluctuation": noise},
            "seed": seed,
            **more,
        }
    )


def cells(job: Job) -> list[dict[str, Any]]:
    """``tuned`` beside the other runs in every cell of a job."""
    rows: list[dict[str, Any]] = []
    kept: dict[Sizes, list[Found]] = {}
    for fleet, gbps in product(job.fleets, LINKS):
        replay = Replay(
            open_trace(job.trace),
            scenario(fleet, routing=job.routing, total=job.total, gbps=gbps, seed=job.seed),
            kept=kept,
        )
        runs = {name: replay.run(name) for name in ("baseline", "rule", "rule_oracle", "best_static", "best_split")}
        runs["tuned"] = tuned(replay)
        rows.append({**vars(job), "fleet": fleet, "gbps": gbps, "fleets": None, **_cell(runs)})
    return rows


def _cell(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    mean = {name: run["ttft_mean_s"] for name, run in runs.items()}
    late = {name: run["ttft_mean_after_3_periods_s"] for name, run in runs.items()}
    gain = 1 - mean["best_split"] / mean["baseline"]
    return {
        "ttft_mean_s": mean,
        "best_split": runs["best_split"]["split"][0][1],
        "split": runs["tuned"]["split"],
        "best_gain": gain,
        "tuned_gain": 1 - mean["tuned"] / mean["baseline"],
        "against_rule": mean["tuned"] / mean["rule"] - 1,
        "against_best_static": mean["tuned"] / mean["best_static"] - 1,
        "rule_over_oracle": mean["rule"] / mean["rule_oracle"] - 1,
        "rule_over_best_static": mean["rule"] / mean["best_static"] - 1,
        "regret": late["tuned"] / late["best_split"] - 1 if late["tuned"] else None,
        "decisions": runs["tuned"]["decisions"],
        "rollbacks": runs["tuned"]["rollbacks"],
    }


def eviction(trace_name: str, size: float) -> dict[str, Any]:
    """Prefix hits of one cache under the eviction tuner against each algorithm by itself."""
    trace = open_trace(trace_name)
    chunks = chunks_of(trace, size)
    one = scenario("70b", routing="sticky", total=1.0, gbps=25, seed=0, engines=1, nodes=1)
    replay = Replay(trace, one)
    policy = DEFAULT_POLICY.tuners.tier_size.model_copy(update={"mode": "observe"})
    only_eviction = DEFAULT_POLICY.model_copy(
        update={"tuners": DEFAULT_POLICY.tuners.model_copy(update={"tier_size": policy})}
    )
    start = Sizes(dram=chunks, disk=0, remote=0)
    agent = Agent(replay, only_eviction, start)
    found = contents(trace, one, [0] * len(trace), start, agent)
    mine = sum(len(request.tiers) for request in found) / trace.accesses
    hits = {name: pool_hits(trace, name, chunks) / trace.accesses for name in ALGORITHMS}
    best = max(hits, key=lambda name: hits[name])
    return {
        "trace": trace.name,
        "size": size,
        "chunks": chunks,
        "hit_ratio": {**hits, "tuned": mine},
        "best": best,
        "against_best": mine / hits[best] if hits[best] else 1.0,
        "against_lru": mine / hits["lru"] if hits["lru"] else 1.0,
        "switches": [(change.at_s, change.after) for change in agent.changes],
    }


def phases(trace_name: str, fleet: str, gbps: float, routing: str, total: float) -> dict[str, Any]:
    """``tuned`` against ``baseline`` hour by hour, and how often it changed something in one period."""
    replay = Replay(open_trace(trace_name), scenario(fleet, routing=routing, total=total, gbps=gbps, seed=0))
    agent, tally = conduct(replay)
    base = replay.play(replay.split(START), "always")
    hours = (np.array(replay.times) // 3600).astype(int)
    mine, theirs = (np.bincount(hours, weights=np.array(run.ttft_s)) for run in (tally, base))
    periods = [int(change.at_s // replay.scenario.period_s) for change in agent.changes]
    return {
        "trace": replay.trace.name,
        "cell": replay.scenario.name,
        "worst_hour": max(float(a / b - 1) for a, b in zip(mine, theirs, strict=True) if b),
        "most_changes_in_a_period": max((periods.count(period) for period in periods), default=0),
        "changes": len(periods),
    }


def harm(trace_name: str, forced: dict[str, Any]) -> dict[str, Any]:
    """A harmful change by hand in the middle of the trace: reported as drift, and undone."""
    trace = open_trace(trace_name)
    middle = float(trace.t[-1] - trace.t[0]) / 2
    event = {"at_s": middle, "for_s": 1.0, "by_hand": forced}
    replay = Replay(trace, scenario("8b", routing="sticky", total=0.02, gbps=100, seed=0, events=[event]))
    agent, _ = conduct(replay)
    after = [change for change in agent.changes if change.at_s > middle]
    reported = [incident["at_s"] - middle for incident in agent.incidents if incident["at_s"] > middle]
    return {
        "trace": trace.name,
        "forced": forced,
        "reported_after_s": min(reported, default=None),
        "undone_after_s": min((change.at_s - middle for change in after), default=None),
        "first_change": after[0].document() if after else None,
    }


def curves(trace_name: str) -> dict[str, Any]:
    """Mean absolute error of sampled curves, in percentage points, over five seeds."""
    trace = open_trace(trace_name)
    exact = exact_curve(trace)
    errors = [accuracy(trace, CURVE_RATE, seed, exact) for seed in range(5)]
    return {"trace": trace.name, "unique": trace.unique, "rate": CURVE_RATE, "error_points": fmean(errors)}


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """The goals' figures over all cells."""
    rows, evictions = document["cells"], document["eviction"]
    told = [row for row in rows if row["best_gain"] >= LEAST_GAIN]
    regrets = [row["regret"] for row in rows if row["regret"] is not None]
    return {
        "cells": len(rows),
        "share_of_best_splits_gain": _mean(row["tuned_gain"] / row["best_gain"] for row in told),
        "against_rule": _mean(row["against_rule"] for row in rows),
        "against_best_static": _mean(row["against_best_static"] for row in rows),
        "regret_mean": _mean(regrets),
        "regret_p90": float(np.percentile(regrets, 90)) if regrets else None,
        "rule_over_oracle_worst": max((row["rule_over_oracle"] for row in rows), default=None),
        "rule_over_best_static_worst": max((row["rule_over_best_static"] for row in rows), default=None),
        "eviction_against_best": _mean(row["against_best"] for row in evictions),
        "eviction_against_lru_worst": min((row["against_lru"] for row in evictions), default=None),
        "curve_error_points_worst": max((row["error_points"] for row in document["curves"]), default=None),
        "worst_hour": max((row["worst_hour"] for row in document["phases"]), default=None),
        "most_changes_in_a_period": max((row["most_changes_in_a_period"] for row in document["phases"]), default=0),
    }


GOALS: dict[str, tuple[Callable[[float], bool], str]] = {
    "share_of_best_splits_gain": (lambda x: x >= 0.8, "at least 0.8, aim 1"),
    "against_rule": (lambda x: x <= -0.06, "at most -0.06, aim -0.10"),
    "against_best_static": (lambda x: x <= -0.08, "at most -0.08, aim -0.15"),
    "regret_mean": (lambda x: x <= 0.03, "at most 0.03, aim 0.015"),
    "regret_p90": (lambda x: x <= 0.08, "at most 0.08, aim 0.05"),
    "eviction_against_best": (lambda x: x >= 0.98, "at least 0.98"),
    "eviction_against_lru_worst": (lambda x: x >= 0.99, "at least 0.99"),
    "curve_error_points_worst": (lambda x: x <= 1.5, "at most 1.5, aim 0.7"),
    "rule_over_oracle_worst": (lambda x: x <= 0.05, "at most 0.05, aim 0.03 (means of seeds)"),
    "rule_over_best_static_worst": (lambda x: x <= 0.02, "at most 0.02"),
    "worst_hour": (lambda x: x <= 0.02, "at most 0.02"),
    "most_changes_in_a_period": (lambda x: x <= 1, "at most 1"),
}


HARMS: tuple[dict[str, Any], ...] = ({"eviction": "fifo"}, {"dram_factor": 0.1})


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Which part of the document, the function that makes it, and its arguments."""
    names = traces(options.traces)
    fleets = tuple(options.fleets)
    for name, routing, total, seed in product(names, ROUTINGS, options.totals, range(options.seeds)):
        yield "cells", cells, (Job(name, routing, total, seed, fleets),)
    for name, size in product(names, SIZES):
        yield "eviction", eviction, (name, size)
    for name, fleet, routing, total in product(names, fleets, ROUTINGS, options.totals):
        yield "phases", phases, (name, fleet, 100, routing, total)
    for name in names:
        yield "curves", curves, (name,)
    for name, forced in product(names, HARMS):
        yield "harm", harm, (name, forced)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All parts asked for, over processes."""
    document: dict[str, Any] = {part: [] for part in PARTS}
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        running = [
            (part, pool.submit(function, *arguments))
            for part, function, arguments in jobs(options)
            if part in options.parts
        ]
        for part, job in running:
            answer = job.result()
            rows = answer if isinstance(answer, list) else [answer]
            document[part] += rows
            for row in rows:
                print(part, json.dumps({name: value for name, value in row.items() if name in SHOWN}), flush=True)
    return {"summary": summary(document), **document}


def traces(folder: Path | None) -> list[str]:
    """The parquet files of a folder; without one, the names of the traces that come along."""
    return [str(path) for path in sorted(folder.glob("*.parquet"))] if folder else list(BUILTIN)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of traces; the shipped ones without it")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=["70b", "8b"])
    parser.add_argument("--totals", nargs="+", type=float, default=list(TOTALS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("tuning.json"))
    options = parser.parse_args(arguments)
    document = measure(options)
    options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"\n{'goal':<30} {'measured':>10}  wanted")
    for name, value in document["summary"].items():
        reached, wanted = GOALS.get(name, (None, ""))
        mark = "" if reached is None or value is None else "  reached" if reached(value) else "  NOT reached"
        print(f"{name:<30} {'-' if value is None else f'{value:10.4g}':>10}  {wanted}{mark}")


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


if __name__ == "__main__":
    main()
