"""Jobs over processes: rows are printed as they are made, kept after each job, and never made twice."""

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any, Protocol

from benchmarks.goals import Goal
from benchmarks.tuning.worlds import Grid
from tiertune_connector.ending import unheard

Row = dict[str, Any]
Summary = dict[str, float | None]


@dataclass(frozen=True)
class Job:
    """Work of one process: rows that share something expensive to make, such as the contents of caches."""

    make: Callable[[Any, Sequence[Any]], Iterable[Row]]
    """Makes, from ``shared`` and cases, one row for each case, in their order."""
    shared: Any
    cases: Mapping[str, Any]
    """Cases by the name of their row, which names all that the row depends on."""

    def without(self, done: Container[str]) -> "Job":
        """The job without the cases that are done."""
        left = {name: case for name, case in self.cases.items() if name not in done}
        return Job(self.make, self.shared, left)


class Part(Protocol):
    """What every part's module has."""

    @property
    def SHOWN(self) -> Sequence[str]:  # noqa: N802 (a module's constant)
        """Figures of a row that are printed."""

    @property
    def GOALS(self) -> Mapping[str, Goal]:  # noqa: N802
        """Goals by the name of the figure in the summary."""

    def jobs(self, grid: Grid) -> Iterator[Job]:
        """All that the part does on the grid."""

    def summary(self, rows: Sequence[Row]) -> Summary:
        """The figures over all rows; None where there are too few."""


def run(jobs: Iterable[tuple[str, Part, Job]], processes: int) -> Iterator[tuple[str, list[Row] | BaseException]]:
    """Run jobs; for each, as it ends: the name of its part, and its rows or the exception."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=follow_parent) as pool:
        try:
            with unheard():
                running = {pool.submit(perform, name, part.SHOWN, job): name for name, part, job in jobs}
            for future in as_completed(running):
                yield running[future], future.exception() or future.result()
        except BaseException:
            for worker in active_children():
                worker.kill()
            raise


def perform(part: str, shown: Sequence[str], job: Job) -> list[Row]:
    """The rows of a job, each printed as soon as it is made."""
    rows = []
    for name, row in zip(job.cases, job.make(job.shared, list(job.cases.values())), strict=True):
        print(f"{part} {name} {json.dumps({key: _rounded(row[key]) for key in shown})}", flush=True)
        rows.append({"name": name, **row})
    return rows


def follow_parent() -> None:
    """Make a worker end with the process that started it, however that ends."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


def _rounded(value: Any) -> Any:  # noqa: ANN401 (a figure, or whatever else a row tells)
    return float(f"{value:.4g}") if isinstance(value, float) else value
