"""The tuners' goals, measured: ``python -m benchmarks.tuning --traces DIR --json tuning.json`` (``make bench-tuning``).

Every run of a cell is made by the replay on the same requests and the same link, so all figures are ratios within one
run. Without ``--traces`` the traces that come along are used; they are small, so the goals are not theirs.

Rows are printed as they are made and written after each job; with ``--skip-done`` those that the file has already are
kept and not made again, so that a grid may be run in pieces, and an interrupted run be taken up.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tuning import cells, cost, curves, eviction, gate, harm, queues, speed
from benchmarks.tuning.jobs import Goal, Job, Part, Row, run
from benchmarks.tuning.worlds import FLEETS, LINKS, ROUTINGS, TOTALS, Grid
from tiertune_agent.replay.traces import BUILTIN

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
    """All parts asked for, over processes: the document, and whether every job came to its end."""
    rows = kept(options.json) if options.skip_done else {name: {} for name in PARTS}
    whole, document = True, told(rows)
    for name, made in run(list(left(options, rows)), options.processes):
        if isinstance(made, BaseException):
            whole = False
            print(f"{name}: {made!r}", *getattr(made, "__notes__", ()), made.__cause__ or "", file=sys.stderr)
            continue
        rows[name].update({row["name"]: row for row in made})
        document = told(rows)
        write(options.json, document)
    return document, whole


def left(options: argparse.Namespace, rows: Rows) -> Iterator[tuple[str, Part, Job]]:
    """The jobs that are to be done."""
    grid = Grid(traces(options.traces), options.fleets, options.routings, options.totals, options.links, options.seeds)
    for name in options.parts:
        for job in PARTS[name].jobs(grid):
            todo = job.without(rows[name])
            if todo.cases:
                yield name, PARTS[name], todo


def kept(path: Path) -> Rows:
    """The rows that an earlier run wrote."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: {row["name"]: row for row in document.get(name, [])} for name in PARTS}


def told(rows: Rows) -> dict[str, Any]:
    """As ``--json`` has it: rows in the order of their names, whichever was done first."""
    parts = {name: [made[row] for row in sorted(made)] for name, made in rows.items()}
    figures = {figure: value for name in PARTS for figure, value in PARTS[name].summary(parts[name]).items()}
    return {"summary": figures, **parts}


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def traces(folder: Path | None) -> list[str]:
    """The parquet files of a folder; without one, the names of the traces that come along."""
    return [str(path) for path in sorted(folder.glob("*.parquet"))] if folder else list(BUILTIN)


def table(figures: Mapping[str, float | None]) -> str:
    """Every figure that was measured, beside its goal."""
    goals = {name: goal for part in PARTS.values() for name, goal in part.GOALS.items()}
    lines = [f"{'figure':<30} {'measured':>10}  wanted"]
    for name, value in figures.items():
        if value is not None:
            lines.append(f"{name:<30} {value:>10.4g}  {_against(goals.get(name), value)}")
    return "\n".join(lines)


def _against(goal: Goal | None, value: float) -> str:
    return f"{goal.wanted}  {'reached' if goal.reached(value) else 'NOT reached'}" if goal else ""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=Path, help="folder of traces; the shipped ones without it")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--fleets", nargs="+", choices=FLEETS, default=["70b", "8b"], help="of cells and queues; gate has all")
    add("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="of cells and queues")
    add("--totals", nargs="+", type=float, default=list(TOTALS), help="of cells")
    add("--links", nargs="+", type=float, default=list(LINKS), help="in Gbit/s, of cells, gate and queues")
    add("--seeds", type=int, default=1, help="of cells; gate has five at least")
    add("--processes", type=int, default=2)
    add("--json", type=Path, default=Path("tuning.json"))
    add("--skip-done", action="store_true", help="keep the rows that the file has, and make those that it lacks")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 1 where a job failed."""
    document, whole = measure(arguments(given))
    print(f"\n{table(document['summary'])}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
