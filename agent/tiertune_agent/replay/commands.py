"""``tiertune curve``, ``replay`` and ``policy backtest --trace``: check arguments, print results, write files."""

# ruff: noqa: PLC0415 (--help is quick)
# ruff: noqa: PLR0917 (typer calls commands by keyword)

import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from tiertune_agent.terminal.options import TRACE, InputError, JsonPath, result, writable, write

if TYPE_CHECKING:
    from tiertune_agent.fields import Json
    from tiertune_agent.policy.document import Policy

MOST = 100
"""Largest size of a cache, as a share of the unique blocks."""
HARDLY = 0.0005
"""Smaller gains and losses are told as none."""
BACKTEST_RUNS = ("baseline", "rule", "best_split", "tuned")


def curve(
    trace: Annotated[Path, typer.Argument(help=TRACE, metavar="TRACE")],
    sizes: Annotated[str, typer.Option(help="Shares of the unique blocks, such as 0.01,0.03.")],
    algorithm: Annotated[
        str, typer.Option(help="lru, opt (perfect foresight), or any other algorithm of a store.")
    ] = "lru",
    sampled: Annotated[float | None, typer.Option(help="Share of the blocks to sample; by default all.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 1,
    json_path: JsonPath = None,
) -> None:
    """Compute one cache's hit ratio by size; each request touches the tail of its prompt first."""
    from tiertune_agent.replay.curve import KNOWN, curve_document
    from tiertune_agent.replay.traces import open_trace
    from tiertune_agent.terminal.progress import bar
    from tiertune_agent.terminal.tables import curve_table, show

    if algorithm not in KNOWN:
        raise InputError(f"--algorithm: {algorithm!r} is not one of {', '.join(KNOWN)}")
    if sampled is not None and not 0 < sampled <= 1:
        raise InputError(f"--sampled: {sampled:g} is not a share of the blocks (above 0, at most 1)")
    if sampled is not None and algorithm == "opt":
        raise InputError("--sampled: opt looks ahead over all blocks; leave it out for the exact curve")
    opened, shares = open_trace(str(trace)), _parse_sizes(sizes)
    with bar("curve", len(shares) if sampled is None else 1) as progress:
        document = curve_document(opened, algorithm, shares, perf_counter, rate=sampled, seed=seed, step=progress.step)
    typer.echo(
        f"{document['trace']}, {algorithm}: {document['accesses']} block accesses, {document['unique']} blocks; "
        f"{document['us_per_access']:.2f} µs per access"
    )
    if sampled is not None:
        typer.echo(_sampled(document, sampled))
    show(curve_table(document["points"]))
    result(document, json_path)


def _sampled(document: "Json", asked: float) -> str:
    """The rates actually sampled, in words."""
    rates: list[float] = document["rates"]
    if min(rates) == 1 > asked:
        return f"so few blocks are simulated whole: exact, not sampled at {asked:g}"
    raised = sum(rate > asked for rate in rates)
    sizes = f"; {raised} of {len(rates)} sizes are too small for that and were sampled at up to {max(rates):g}"
    return f"sampled at {min(rates):g}, seed {document['seed']}{sizes if raised else ''}"


def replay(
    traces: Annotated[list[Path], typer.Argument(help=TRACE, metavar="TRACE...")],
    scenarios: Annotated[list[Path], typer.Option("--scenario", help="YAML file, or a folder of them; repeatable.")],
    policy: Annotated[Path | None, typer.Option(help="YAML file: what the agent in the run `tuned` may do.")] = None,
    runs: Annotated[str, typer.Option("--run", help="Names of runs, separated by commas; by default all.")] = "",
    json_path: JsonPath = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="Write a report to this file.", metavar="PATH", callback=writable)
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="How many replays to run at once.")] = 1,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster to spread the replays over.")] = None,
) -> None:
    """Replay every trace under every scenario, under a virtual clock."""
    from tiertune_agent.replay.report import report
    from tiertune_agent.replay.sweep import grid, over_processes, over_ray, sweep_document
    from tiertune_agent.terminal.progress import bar

    if json_path and html_path and json_path.resolve() == html_path.resolve():
        raise InputError(f"--html: {html_path} is the file of --json, too: name another")
    names = list(dict.fromkeys(part.strip() for part in runs.split(","))) if runs else []
    if policy and names and "tuned" not in names:
        raise InputError("--policy: only the run tuned follows a policy; add it to --run")
    cells = grid(traces, scenarios, names, _policy(policy) if policy else None)
    start, played = perf_counter(), []
    with bar("replay", sum(len(cell.runs) for cell in cells)) as progress:
        step = progress.step
        for one in over_ray(cells, ray, step) if ray else over_processes(cells, processes, step):
            progress.aside(partial(_tell, one.document))
            played.append(one)
    result(sweep_document(played, perf_counter() - start), json_path)
    if html_path is not None:
        write(html_path, report(played, shlex.join(["tiertune", *sys.argv[1:]])))


def backtest(policy: Path, trace: Path, scenario: Path, json_path: Path | None) -> None:
    """Print, and write to ``json_path``, the policy's run of a trace, the runs that it must beat, and its decisions."""
    from tiertune_agent.replay.sweep import grid, play
    from tiertune_agent.terminal.progress import bar
    from tiertune_agent.terminal.tables import backtest_table, show

    cell, *more = grid([trace], [scenario], BACKTEST_RUNS, _policy(policy))
    if more:
        raise InputError(f"--scenario: {scenario} is a folder of several: name a file in it")
    with bar("backtest", len(cell.runs)) as progress:
        document = play(cell, progress.step).document
    _tell(document)
    runs = document["runs"]
    gains = {name: 1 - runs["tuned"]["ttft_mean_s"] / runs[name]["ttft_mean_s"] for name in BACKTEST_RUNS[:-1]}
    told = ", ".join(_against(name, gain) for name, gain in gains.items())
    typer.echo(f"With {policy} the mean time to the first token is {told}.")
    show(backtest_table([*_decided(runs["tuned"])]))
    result(document, json_path)


def _policy(path: Path) -> "Policy":
    """The policy in a file; notes tell what a replay leaves out: freezes, and rules for some stores or models."""
    from tiertune_agent.policy.document import load
    from tiertune_agent.replay.tuned import DRAM

    policy = load(path).policy
    if policy.guard.freeze or any(override.guard.freeze for override in policy.overrides):
        typer.echo(f"note: {path}: guard.freeze: a trace has no dates, its calendar is left out", err=True)
    if not all(override.match.fits(DRAM) for override in policy.overrides):
        told = "a trace names no stores and no models, entries for some of them or the remote are left out"
        typer.echo(f"note: {path}: overrides: {told}", err=True)
    return policy


def _decided(run: "Json") -> Iterator[tuple[str, ...]]:
    """Table rows: every change, then each tuner's last answer that proposed none."""
    from tiertune_agent.fields import change
    from tiertune_connector.units import format_duration

    for one in run["changes"]:
        told = f"{one['field']}: {change(one['field'], one['before'], one['after'])}"
        yield format_duration(one["at_s"]), one["tuner"], told, one["state"].replace("_", " "), one["reason"]
    for one in run["answers"]:
        yield format_duration(one["at_s"]), one["tuner"], "", "last answer", one["reason"]


def _against(name: str, gain: float) -> str:
    return f"that of {name}" if abs(gain) < HARDLY else f"{abs(gain):.1%} {'under' if gain > 0 else 'over'} {name}"


def _tell(document: "Json") -> None:
    from tiertune_agent.terminal.tables import runs_table, show

    typer.echo(
        f"{document['trace']}, {document['scenario']}: {document['requests']} requests in {document['wall_s']:.1f} s"
    )
    show(runs_table(document["runs"]))


def _parse_sizes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= MOST for size in sizes):
        raise InputError(f"--sizes: {text!r} is not a list of shares (above 0, at most {MOST}) such as 0.01,0.03")
    return sizes
