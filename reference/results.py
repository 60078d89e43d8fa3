"""Figures with a goal, from committed results: as the benchmarks print them, read in a page or made from their rows."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.document import known
from benchmarks.goals import table
from benchmarks.tuning.__main__ import judged
from benchmarks.tuning.cells import summary

ROOT = Path(__file__).parents[1]
STORE = ROOT / "docs" / "store-results.md"
CELLS = ROOT / "benchmarks" / "results" / "tuning.json"
_PRINTED = re.compile(r"^(\S.*?) +(\S+)  ((?:at least|at most|below) .+?)  (short|reached)$", re.MULTILINE)


class Figure(NamedTuple):
    benchmark: str
    name: str
    measured: str
    goal: str
    end: str
    """Short, or reached."""


def figures() -> Iterator[Figure]:
    """In the order of benchmarks; of each, those that are short first."""
    cells = table(judged(summary(known(CELLS)["cells"])))
    for benchmark, printed in (("store", STORE.read_text(encoding="utf-8")), ("tuning", cells)):
        yield from (Figure(benchmark, *line) for line in _PRINTED.findall(printed))
