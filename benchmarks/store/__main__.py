"""The store's data path against the machine's: ``python -m benchmarks.store [--parts dram disk remote lookup]``.

Every path goes through a real client and a real store process, its metrics on, and is timed in turns with its
baseline, in the same run: ratios of medians say what the store does, seconds what this machine does. Under
``overhead``, ``metric_event`` is the time of one metric event over a microsecond, and ``bookkeeping_32m`` that of a
load without its copy over a memcpy of the chunk.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.store import dram, events, lookup
from benchmarks.store.disk import disk
from benchmarks.store.goals import judged
from benchmarks.store.remote import remote
from benchmarks.store.slower import NotMeasuredError

QUICK_ROUNDS = 3
Told = dict[str, Any]


def _dram(folder: Path, rounds: int) -> Told:
    pool = dram.QUICK_POOL if rounds == QUICK_ROUNDS else dram.POOL
    return laid(dram.measure(folder, rounds, pool=pool), events.measure(rounds))


PARTS: dict[str, tuple[Callable[[Path, int], Told], int]] = {
    "dram": (_dram, 25),
    "disk": (disk, 15),
    "remote": (remote, 15),
    "lookup": (lookup.measure, 25),
}
"""Each with its rounds."""


def measure(parts: Sequence[str], *, quick: bool, folder: Path | None = None) -> Told:
    """As `bench.json` has it; a part that this machine cannot do is left out, and why is printed."""
    told: Told = {}
    for part in parts:
        run, rounds = PARTS[part]
        with tempfile.TemporaryDirectory(prefix="tt-", dir=folder) as home:
            try:
                told = laid(told, run(Path(home), QUICK_ROUNDS if quick else rounds))
            except NotMeasuredError as error:
                print(f"{part} is not measured: {error}", file=sys.stderr)
    return told


def laid(known: Mapping[str, Any], told: Mapping[str, Any]) -> Told:
    """``told`` over ``known``, one level into both: what was not measured now stays."""
    return {
        **known,
        **{
            name: {**known.get(name, {}), **value} if isinstance(value, dict) else value for name, value in told.items()
        },
    }


def table(told: Mapping[str, Any]) -> str:
    """Every figure beside what it must be, those that are short of it first; every path beside its baseline."""
    lines = [f"{'figure':<26} {'measured':>9} {'must':>7} {'aim':>7}"]
    for name, value, goal in sorted(judged(told), key=lambda each: each[2].reached(each[1])):
        end = "reached" if goal.reached(value) else "short"
        lines.append(f"{name:<26} {value:>9.3f} {goal.must:>7g} {goal.aim:>7g}  {end}")
    lines += ["", f"{'path':<26} {'GB/s':>9}  {'baseline':<10} {'GB/s':>7} {'ratio':>7}"]
    for name, path in told.get("paths", {}).items():
        ours, theirs = path["gb_per_s"], path["baseline_gb_per_s"]
        lines.append(f"{name:<26} {ours:>9.2f}  {path['baseline']:<10} {theirs:>7.2f} {path['ratio']:>7.3f}")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; the temporary one without it")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="results are laid over what is there")
    options = parser.parse_args(given)
    told = measure(options.parts, quick=options.quick, folder=options.folder)
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    options.json.write_text(json.dumps({**laid(known, told), "machine": machine}, indent=1) + "\n")
    print(f"{machine}\n\n{table(told)}")


if __name__ == "__main__":
    main()
