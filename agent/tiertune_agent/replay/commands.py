"""``tiertune curve`` and ``tiertune replay``: arguments checked, results told and written."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import typer

from tiertune_agent.fields import shown
from tiertune_agent.policy import load
from tiertune_agent.replay.curve import curve_document, known_algorithms
from tiertune_agent.replay.report import report
from tiertune_agent.replay.sweep import Task, grid, over_processes, over_ray, play, sweep_document
from tiertune_agent.replay.traces import open_trace
from tiertune_connector.units import format_duration

MOST = 100
"""Largest size of a cache, as a share of the unique blocks."""
HARDLY = 0.0005
"""Gains below this are none."""
BACKTEST_RUNS = ("baseline", "rule", "best_split", "tuned")


class UsageError(ValueError):
    """An argument that cannot be used; the message says what to write instead."""


def curve_command(
    *,
    trace: Path,
    sizes: str,
    algorithm: str = "lru",
    sampled: float | None = None,
    seed: int = 1,
    json_path: Path | None = None,
) -> None:
    """Print, and write to ``json_path``, the miss-ratio curve of ``trace`` (a file, or the name of a shipped one)."""
    if algorithm not in known_algorithms():
        _refuse(f"--algorithm: {algorithm!r} is not one of {', '.join(known_algorithms())}")
    if sampled is not None and not 0 < sampled <= 1:
        _refuse(f"--sampled: {sampled:g} is not a share of the blocks (above 0, at most 1)")
    if sampled is not None and algorithm == "opt":
        _refuse("--sampled: opt looks ahead over all blocks; leave it out for the exact curve")
    if seed < 0:
        _refuse(f"--seed: {seed} is below 0")
    opened, shares = open_trace(str(trace)), _parse_sizes(sizes)
    document = curve_document(opened, algorithm, shares, perf_counter, rate=sampled, seed=seed)
    typer.echo(
        f"{document['trace']}, {algorithm}: {document['accesses']} block accesses, {document['unique']} blocks; "
        f"{document['us_per_access']:.2f} µs per access"
    )
    if sampled is not None:
        typer.echo(_sampled(document, sampled))
    typer.echo(f"{'size':>8} {'chunks':>9} {'hits %':>7}")
    for point in document["points"]:
        typer.echo(f"{point['size']:>8g} {point['chunks']:>9} {100 * point['hit_ratio']:>7.2f}")
    _write(json_path, document)


def _sampled(document: Mapping[str, Any], asked: float) -> str:
    """How much was sampled in truth."""
    rates: list[float] = document["rates"]
    if document["sampled"] == 1 > asked:
        return f"so few blocks are simulated whole: exact, not sampled at {asked:g}"
    raised = sum(rate > asked for rate in rates)
    sizes = f"; {raised} of {len(rates)} sizes are too small for that and were sampled at up to {max(rates):g}"
    return f"sampled at {document['sampled']:g}, seed {document['seed']}{sizes if raised else ''}"


def replay_command(
    *,
    traces: Sequence[Path],
    scenarios: Sequence[Path],
    policy: Path | None = None,
    runs: str = "",
    json_path: Path | None = None,
    html_path: Path | None = None,
    processes: int = 1,
    ray: str | None = None,
) -> None:
    """Print, and write to the paths given, the runs named in ``runs`` (with commas; empty: all that exist).

    Of every trace under every scenario, over ``processes``, or over the Ray cluster at the address ``ray``.
    """
    cells = grid(traces, scenarios, _names(runs))
    if policy and not any("tuned" in cell.runs for cell in cells):
        _refuse("--policy: only the run tuned follows a policy; add it to --run")
    task = Task(load(policy).policy if policy else None, optimum=html_path is not None)
    start, played = perf_counter(), []
    for one in over_ray(cells, task, ray) if ray else over_processes(cells, task, processes):
        _tell(one.document)
        played.append(one)
    _write(json_path, sweep_document(played, perf_counter() - start))
    if html_path is not None:
        html_path.write_text(report(played, shlex.join(["tiertune", *sys.argv[1:]])), encoding="utf-8")


def backtest_command(*, policy: Path, trace: Path, scenario: Path, json_path: Path | None = None) -> None:
    """What the policy would have done over a trace: its run beside what it must beat, and its decisions."""
    (cell,) = grid([trace], [scenario], BACKTEST_RUNS)
    document = play(cell, Task(load(policy).policy)).document
    _tell(document)
    runs = document["runs"]
    gains = {name: 1 - runs["tuned"]["ttft_mean_s"] / runs[name]["ttft_mean_s"] for name in BACKTEST_RUNS[:-1]}
    told = ", ".join(_against(name, gain) for name, gain in gains.items())
    typer.echo(f"With {policy} the mean time to the first token is {told}.")
    for one in runs["tuned"]["changes"]:
        before, after = (shown(one["field"], one[name]) for name in ("before", "after"))
        change = f"{one['tuner']}: {one['field']} {before} → {after}, {one['state'].replace('_', ' ')}"
        typer.echo(f"{format_duration(one['at_s'])} {change}: {one['reason']}.")
    for one in runs["tuned"]["answers"]:
        typer.echo(f"{format_duration(one['at_s'])} {one['tuner']}, last answer: {one['reason']}.")
    _write(json_path, dict(document))


def _against(name: str, gain: float) -> str:
    return f"that of {name}" if abs(gain) < HARDLY else f"{abs(gain):.1%} {'under' if gain > 0 else 'over'} {name}"


def _tell(document: Mapping[str, Any]) -> None:
    typer.echo(
        f"{document['trace']}, {document['scenario']}: {document['requests']} requests in {document['wall_s']:.1f} s"
    )
    typer.echo(
        f"{'run':<12} {'TTFT mean ms':>13} {'p50':>8} {'p99':>8} {'hits %':>7} {'remote %':>9} {'fetched GB':>11}"
    )
    for name, run in document["runs"].items():
        typer.echo(_row(name, run))


def _row(name: str, run: dict[str, Any]) -> str:
    times = [1000 * run[f"ttft_{kind}_s"] for kind in ("mean", "p50", "p99")]
    hits = 100 * sum(run["hit_tokens"].values()) / run["prompt_tokens"]
    remote = 100 * run["hit_tokens"]["remote"] / run["prompt_tokens"]
    same = f"  (= {run['is']})" if "is" in run else ""
    return (
        f"{name:<12} {times[0]:>13.1f} {times[1]:>8.1f} {times[2]:>8.1f} {hits:>7.2f} {remote:>9.2f} "
        f"{run['fetched_bytes'] / 1e9:>11.1f}{same}"
    )


def _parse_sizes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= MOST for size in sizes):
        _refuse(f"--sizes: {text!r} is not a list of shares (above 0, at most {MOST}) such as 0.01,0.03")
    return sizes


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(","))) if text else []


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
