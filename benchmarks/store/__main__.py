"""The store's data path against the machine's: ``python -m benchmarks.store [--parts dram disk ...]``.

Every path goes through a real client and a real store process, its metrics on, and is timed in turns with its
baseline, in the same run: ratios of medians say what the store does, seconds what this machine does. Under
``overhead``, ``metric_event`` is the microseconds of one metric event; the others are relative to a memcpy of the
chunk: ``bookkeeping_32m``, a store's work in its index for a chunk, and ``round_trips_32m``, a load without its copy,
which has no goal. Under ``live`` are lookups while a store is tuned, beside quiet ones. Under ``scattered``, without a
goal, the chunk also goes from the row to an engine's blocks, or comes from there.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import document, goals
from benchmarks.store import coded, dram, live, lookup, peers
from benchmarks.store.disk import disk
from benchmarks.store.goals import judged
from benchmarks.store.remote import remote
from benchmarks.store.slower import NotMeasuredError
from benchmarks.store.world import unwound

QUICK_ROUNDS = 3
Told = dict[str, Any]


PARTS: dict[str, tuple[Callable[..., Told], int, dict[str, int]]] = {
    "dram": (dram.measure, 25, {"pool": dram.QUICK_POOL}),
    "disk": (disk, 15, {}),
    "remote": (remote, 15, {}),
    "lookup": (lookup.measure, 25, {}),
    "resize": (live.resize, 4, {"size": live.QUICK_SIZE}),
    "switch": (live.switch, 9, {"chunks": live.QUICK_SWITCHED}),
    "codec": (coded.measure, 9, {}),
    "peers": (peers.measure, 8, {}),
}
"""Each part's function, its rounds, and what it is given beside fewer rounds to be quick."""
USUAL = [part for part in PARTS if part != "peers"]
"""Parts measured unless others are named; `make bench-peers` measures beside LMCache."""


def measure(parts: Sequence[str], *, quick: bool, folder: Path | None = None) -> Told:
    """Results as in `bench.json`; a part that this machine cannot run is left out, and the reason printed."""
    told: Told = {}
    for part in parts:
        run, rounds, less = PARTS[part]
        with tempfile.TemporaryDirectory(prefix="tt-", dir=folder) as home:
            try:
                found = run(Path(home), QUICK_ROUNDS, **less) if quick else run(Path(home), rounds)
                told = document.laid(told, found)
            except NotMeasuredError as error:
                print(f"{part} is not measured: {error}", file=sys.stderr)
    return told


def table(told: Mapping[str, Any]) -> str:
    """Every figure beside its goal, those that are short of it first; every path beside its baseline."""
    lines = [goals.table(judged(told)), "", f"{'path':<26} {'GB/s':>9}  {'baseline':<10} {'GB/s':>7} {'ratio':>7}"]
    paths = told.get("paths", {}) | {f"{name}, scattered": path for name, path in told.get("scattered", {}).items()}
    for name, path in paths.items():
        ours, theirs = path["gb_per_s"], path["baseline_gb_per_s"]
        lines.append(f"{name:<26} {ours:>9.2f}  {path['baseline']:<10} {theirs:>7.2f} {path['ratio']:>7.3f}")
    lines += ["", *peers.table(told.get("peers", {}).get("lmcache", {}))]
    return "\n".join(lines).rstrip()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=USUAL)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs")
    parser.add_argument(
        "--folder", type=document.folder, help="on the disk that is measured; the temporary one without it"
    )
    document.add_bench_json(parser)
    options = parser.parse_args(given)
    with unwound():
        told = measure(options.parts, quick=options.quick, folder=options.folder)
    document.lay(options.json, {**told, "machine": document.MACHINE})
    print(f"{document.MACHINE}\n\n{table(told)}")


if __name__ == "__main__":
    main()
