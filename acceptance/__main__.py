"""One command that proves the whole: ``python -m acceptance [--json FILE]`` (``make acceptance``).

Every claim has a world of its own (stores, engines, a Redis, an agent, all real processes on this machine) in a process
of its own; three are proved at a time. Exit status 0 only if all hold, 1 where one does not, 2 where Redis is missing.
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from acceptance.claims import CLAIMS, Proof, begin_worker, failed, proved_by_worker

AT_A_TIME = 3


def proofs(names: Sequence[str], *, short: bool, console: Console) -> list[Proof]:
    """Proofs of these claims, in their order; each is printed as soon as it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    found: dict[str, Proof] = {}
    with (
        ProcessPoolExecutor(AT_A_TIME, multiprocessing.get_context("spawn"), begin_worker) as pool,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        rows: dict[str, TaskID] = {name: progress.add_task(CLAIMS[name].says, total=1) for name in names}
        futures: dict[Future[Proof], str] = {pool.submit(proved_by_worker, name, short=short): name for name in names}
        try:
            for future in as_completed(futures):
                name = futures[future]
                broken = future.exception()  # its process was killed
                found[name] = failed(name, repr(broken)) if broken else future.result()
                progress.remove_task(rows[name])
                tell(found[name], console)
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [found[name] for name in names]


def tell(proof: Proof, console: Console) -> None:
    holds = "[green]holds[/]" if proof.holds else "[red]DOES NOT HOLD[/]"
    console.print(f"{holds}  [bold]{proof.says}[/] ({proof.seconds:.0f} s)", highlight=False)
    console.print(f"  {proof.evidence}", markup=False, highlight=False, soft_wrap=True)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--short", action="store_true", help="three minutes: fewer steps, no ten minutes of waiting")
    parser.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="only these")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    if shutil.which("redis-server") is None:
        print("redis-server is not installed: apt-get install redis-server (Debian)", file=sys.stderr)
        return 2
    if options.json and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        print(f"--json: {options.json} is a folder, or its folder does not exist", file=sys.stderr)
        return 2
    started, console = time.monotonic(), Console()
    console.print(f"proving {len(options.claims)} claims, {AT_A_TIME} at a time ...", style="dim")
    with suppress(KeyboardInterrupt):
        found = proofs(options.claims, short=options.short, console=console)
        seconds, held = time.monotonic() - started, sum(proof.holds for proof in found)
        console.print(f"{held} of {len(found)} claims hold ({seconds:.0f} s)", style="bold", highlight=False)
        if options.json:
            document = {"seconds": round(seconds, 1), "short": options.short, "claims": [asdict(one) for one in found]}
            options.json.write_text(json.dumps(document, indent=1) + "\n")
        return 0 if held == len(found) else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
