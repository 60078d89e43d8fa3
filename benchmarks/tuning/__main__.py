"""The tuners' goals, measured: ``python -m benchmarks.tuning --traces DIR --json tuning.json`` (``make bench-tuning``).

Every run of a cell is made by the replay on the same requests and the same link, so all figures are ratios within one
run. Without ``--traces`` the traces that come along are used; they are small, so the goals are not theirs.

Rows are printed as they are made and written after each job; with ``--skip-done`` those that the file has already are
kept and not made again, so that a grid may be run in pieces, and an interrupted run be taken up.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from benchmarks import document
from benchmarks.goals import Judged, table
from benchmarks.tuning import cells, cost, curves, eviction, gate, harm, queues, speed
from benchmarks.tuning.jobs import Job, Part, Row, run
from benchmarks.tuning.worlds import FLEETS, LINKS, ROUTINGS, TOTALS, Grid, short
from tiertune_agent.policy.document import LoadedPolicy, load
from tiertune_agent.replay.traces import BUILTIN, TraceError, open_trace
from tiertune_connector.documents import DocumentError

PARTS: dict[str, Part] = {
    "cells": cells,
    "gate": gate,
    "queues": queues,
    "eviction": eviction,
    "curves": curves,
    "harm": harm,
    "cost": cost,
    "speed": speed,
}
Rows = dict[str, dict[str, Row]]
"""By part and name."""


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run all parts asked for, over processes: the document, and whether every job came to its end."""
    policy = short(options.policy.source) if options.policy else ""
    rows = kept(options.json, policy) if options.skip_done else {name: {} for name in PARTS}
    whole, result = True, told(rows, policy)
    for name, made in run(list(left(options, rows)), options.processes):
        if isinstance(made, BaseException):
            whole = False
            print(f"{name}: {made!r}", *getattr(made, "__notes__", ()), made.__cause__ or "", file=sys.stderr)
            continue
        rows[name].update({row["name"]: row for row in made})
        result = told(rows, policy)
        document.write(options.json, result)
    return result, whole


def left(options: argparse.Namespace, rows: Rows) -> Iterator[tuple[str, Part, Job]]:
    """The jobs that are still to be done."""
    asked = (options.fleets, options.routings, options.totals, options.links, options.seeds)
    policy = (options.policy.policy, short(options.policy.source)) if options.policy else ()
    grid = Grid(traces(options.traces), *asked, *policy)
    for name in options.parts:
        for job in PARTS[name].jobs(grid):
            todo = job.without(rows[name])
            if todo.cases:
                yield name, PARTS[name], todo


def kept(path: Path, policy: str = "") -> Rows:
    """The rows that an earlier run wrote; exits if that was under another policy: a summary is of one."""
    found = document.known(path)
    other = found.get("policy", "") if found else policy
    if other != policy:
        sys.exit(f"{path} was made under {other or 'no --policy'}: name another file by --json")
    return {name: {row["name"]: row for row in found.get(name, [])} for name in PARTS}


def told(rows: Rows, policy: str = "") -> dict[str, Any]:
    """The document for ``--json``: rows sorted by name, whichever was done first; the policy if one is named."""
    parts = {name: [made[row] for row in sorted(made)] for name, made in rows.items()}
    figures = {figure: value for name in PARTS for figure, value in PARTS[name].summary(parts[name]).items()}
    return {"summary": figures, **({"policy": policy} if policy else {}), **parts}


def traces(folder: Path | None) -> list[str]:
    """The parquet files of a folder; without one, the names of the shipped traces."""
    return [str(path) for path in sorted(folder.glob("*.parquet"))] if folder else list(BUILTIN)


def traces_folder(text: str) -> Path:
    """A folder of traces; ArgumentTypeError if it has none, or one cannot be used."""
    path = document.folder(text)
    if not any(path.glob("*.parquet")):
        raise argparse.ArgumentTypeError(f"no trace (*.parquet) in {path}")
    for trace in traces(path):
        try:
            open_trace(trace)
        except TraceError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return path


def policy_file(path: str) -> LoadedPolicy:
    """The policy in a file; ArgumentTypeError tells what is wrong in it."""
    try:
        return load(Path(path))
    except DocumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least_one(text: str) -> int:
    """ArgumentTypeError unless it is 1 or more."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def positive(text: str) -> float:
    """ArgumentTypeError unless it is a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def judged(figures: Mapping[str, float | None]) -> Iterator[Judged]:
    """Every figure that was measured, with its goal."""
    goals = {name: goal for part in PARTS.values() for name, goal in part.GOALS.items()}
    return ((name, value, goals.get(name)) for name, value in figures.items() if value is not None)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=traces_folder, help="folder of traces; the shipped ones without it")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--fleets", nargs="+", choices=FLEETS, default=["70b", "8b"], help="of cells and queues; gate has all")
    add("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="of cells and queues")
    add("--totals", nargs="+", type=positive, default=list(TOTALS), help="of cells")
    add("--links", nargs="+", type=positive, default=list(LINKS), help="in Gbit/s, of cells, gate and queues")
    add(
        "--policy",
        type=policy_file,
        help="that cells, eviction, harm and speed tune under; on auto, else it changes nothing",
    )
    add("--seeds", type=at_least_one, default=1, help="of cells; gate and queues have five at least")
    add("--processes", type=at_least_one, default=2)
    add("--json", type=document.target, default=Path("tuning.json"))
    add("--skip-done", action="store_true", help="keep the rows that the file has, and make those that it lacks")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a job failed, 130 if it was interrupted."""
    try:
        result, whole = measure(arguments(given))
    except KeyboardInterrupt:
        return 130
    print(f"\n{table(judged(result['summary']))}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
