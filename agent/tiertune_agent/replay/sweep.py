"""Many replays at once: every trace under every scenario, over the processes of one machine or over a Ray cluster."""

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from tiertune_agent.fields import JsonDict
from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.contents import arrivals
from tiertune_agent.replay.report import Played
from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.simulate import replay_document, runs_of
from tiertune_agent.replay.traces import TraceError, open_trace
from tiertune_agent.terminal.options import InputError
from tiertune_agent.terminal.progress import Step, unseen
from tiertune_connector.documents import load_yaml
from tiertune_connector.ending import unheard

ANSWERS_S = 5.0
"""Seconds within which a Ray cluster must be reachable."""


_trace = lru_cache(maxsize=1)(open_trace)
"""The trace that this process played last is kept."""


class SweepError(RuntimeError):
    """A sweep that did not end; the message says why."""


@dataclass(frozen=True)
class Cell:
    """One replay of a sweep."""

    trace: str
    """A file (where the worker runs), or the name of a shipped one."""
    scenario: Scenario
    runs: tuple[str, ...]
    policy: Policy | None = None


def grid(
    traces: Sequence[Path], scenarios: Sequence[Path], runs: Sequence[str] = (), policy: Policy | None = None
) -> list[Cell]:
    """Every trace under every scenario; a folder stands for the YAML files in it. Without ``runs``: all that exist.

    Raises DocumentError, or InputError if there is no scenario or no such run.
    """
    files = [file for path in scenarios for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not files:
        raise InputError(f"--scenario: there is no .yaml file in {', '.join(map(str, scenarios))}")
    loaded = [load_yaml(file, Scenario) for file in files]
    for name, scenario in product(runs, loaded):
        if name not in runs_of(scenario):
            there = ", ".join(runs_of(scenario))
            raise InputError(f"--run: there is no run {name!r} in {scenario.name}; there are {there}")
    return [
        Cell(str(trace), scenario, tuple(runs or runs_of(scenario)), policy)
        for trace, scenario in product(traces, loaded)
    ]


def play(cell: Cell, step: Step = unseen) -> Played:
    """Play one replay in this process; ``step`` is called after each run."""
    trace, scenario = _trace(cell.trace), cell.scenario
    document = replay_document(trace, scenario, cell.runs, perf_counter, policy=cell.policy, step=step)
    return Played(document, scenario, arrivals(trace, scenario)[-1])


def over_processes(cells: Sequence[Cell], processes: int, step: Step = unseen) -> Iterator[Played]:
    """Play cells; each is yielded once it and those before it are done. ``step`` is called once for each run.

    Raises TraceError before anything is played, and SweepError if a process is killed.
    """
    for cell in cells:
        arrivals(_trace(cell.trace), cell.scenario)
    workers = min(processes, len(cells))
    if workers < 2:
        yield from (play(cell, step) for cell in cells)
        return
    context = get_context("spawn")
    ending, wanted = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _end_with, (ending,))
    with ending, pool, wanted:  # whatever ends this, also a signal: no process plays on for nobody
        try:
            with unheard():
                playing = [pool.submit(play, cell) for cell in cells]  # `map` would cancel, and then break, them
            yield from _stepped(cells, (one.result() for one in playing), step)
        except BrokenProcessPool as error:
            told = "a process ended before its replays were done: if memory was short, lower --processes"
            raise SweepError(told) from error


def _end_with(ending: Connection) -> None:
    """Have this process end once nobody has the other end of the pipe, whatever it is playing then."""

    def watch() -> None:
        ending.poll(None)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def over_ray(cells: Sequence[Cell], address: str, step: Step = unseen) -> Iterator[Played]:
    """As ``over_processes``, on a Ray cluster whose nodes have this package and the traces at the same paths.

    Raises TraceError if a node cannot use a trace, whatever was played before, and SweepError if a process is killed.
    ``address`` is Ray's: ``host:port``, ``auto`` for a running cluster, ``local`` for one that this call starts.
    """
    try:
        import ray  # noqa: PLC0415 (an optional extra)
    except ModuleNotFoundError as error:
        raise InputError("--ray: Ray is not installed: pip install 'tiertune[ray]'") from error
    _check_listens(address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError) as error:
        raise InputError(f"--ray: no Ray cluster answers at {address!r}: {error}") from error
    try:
        remote = ray.remote(play)
        pending = [remote.remote(cell) for cell in cells]
        yield from _stepped(cells, map(ray.get, pending), step)
    except TraceError as error:  # Ray's own, which tells of where it was raised, too
        raise getattr(error, "cause", error) from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        told = f"--ray: a process of a node ended before its replay was done: {str(error).splitlines()[0]}"
        raise SweepError(told) from error
    finally:
        ray.shutdown()


def _stepped(cells: Sequence[Cell], played: Iterable[Played], step: Step) -> Iterator[Played]:
    """Call ``step`` for the runs of a replay elsewhere once all of them are done."""
    for cell, one in zip(cells, played, strict=True):
        for _ in cell.runs:
            step()
        yield one


def _check_listens(address: str) -> None:
    """InputError if nothing listens: Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # a word, such as auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_S).close()
    except (OSError, ValueError) as error:
        raise InputError(f"--ray: no Ray cluster answers at {address!r}: {error}") from error


def sweep_document(cells: Sequence[Played], wall_s: float) -> JsonDict:
    """As ``--json`` writes it: one replay as it is, several in a list."""
    if len(cells) == 1:
        return dict(cells[0].document)
    return {"cells": [cell.document for cell in cells], "wall_s": wall_s}
