"""``tiertune curve`` and ``tiertune replay``: arguments checked, results told and written."""

import json
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import typer

from tiertune_agent.replay.curve import curve_document, known_algorithms
from tiertune_agent.replay.scenario import load_scenario
from tiertune_agent.replay.simulate import NOT_YET, RUNS, replay_document
from tiertune_agent.replay.traces import open_trace

MOST = 100
"""Largest size of a cache, as a share of the unique blocks."""


class UsageError(ValueError):
    """An argument that cannot be used; the message says what to write instead."""


def curve_command(
    *,
    trace: Path,
    sizes: str,
    algorithm: str = "lru",
    sampled: float | None = None,
    seed: int = 1,  # noqa: ARG001 (of the sampling)
    json_path: Path | None = None,
) -> None:
    """Print, and write to ``json_path``, the miss-ratio curve of ``trace`` (a file, or the name of a shipped one)."""
    if algorithm not in known_algorithms():
        later = " (s3fifo is not in this version)" if algorithm == "s3fifo" else ""
        _refuse(f"--algorithm: {algorithm!r} is not one of {', '.join(known_algorithms())}{later}")
    if sampled is not None:
        _refuse("--sampled: sampled curves are not in this version; leave it out for the exact curve")
    document = curve_document(open_trace(str(trace)), algorithm, _parse_sizes(sizes), perf_counter)
    typer.echo(
        f"{document['trace']}, {algorithm}: {document['accesses']} block accesses, {document['unique']} blocks; "
        f"{document['us_per_access']:.2f} µs per access"
    )
    typer.echo(f"{'size':>8} {'chunks':>9} {'hits %':>7}")
    for point in document["points"]:
        typer.echo(f"{point['size']:>8g} {point['chunks']:>9} {100 * point['hit_ratio']:>7.2f}")
    _write(json_path, document)


def replay_command(
    *,
    trace: Path,
    scenario: Path,
    policy: Path | None = None,
    runs: str = "",
    json_path: Path | None = None,
    html_path: Path | None = None,
) -> None:
    """Print, and write to ``json_path``, the runs named in ``runs`` (with commas; empty: all that exist)."""
    if policy is not None:
        _refuse("--policy: only the run tuned follows a policy, and it is not in this version")
    if html_path is not None:
        _refuse("--html: the report as a page is not in this version; use --json")
    names = _parse_runs(runs)
    document = replay_document(open_trace(str(trace)), load_scenario(scenario), names, perf_counter)
    typer.echo(
        f"{document['trace']}, {document['scenario']}: {document['requests']} requests in {document['wall_s']:.1f} s"
    )
    typer.echo(
        f"{'run':<12} {'TTFT mean ms':>13} {'p50':>8} {'p99':>8} {'hits %':>7} {'remote %':>9} {'fetched GB':>11}"
    )
    for name, run in document["runs"].items():
        typer.echo(_row(name, run))
    _write(json_path, document)


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


def _parse_runs(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(","))) if text else list(RUNS)
    for name in names:
        if name not in RUNS:
            later = " in this version" if name in NOT_YET else ""
            _refuse(f"--run: there is no run {name!r}{later}; there are {', '.join(RUNS)}")
    return names


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
