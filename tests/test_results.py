"""The page of results tells every benchmark, and what is short of its goal."""

import re

from benchmarks.store.goals import PATHS
from benchmarks.tuning.__main__ import PARTS
from benchmarks.tuning.cells import GOALS
from pages import ROOT
from reference.results import figures

PAGE = (ROOT / "docs" / "results.md").read_text()


def test_every_figure_of_a_file_that_has_a_goal_is_told():
    """Those of the store's paths and of the cells, once each; short ones at the top, reached ones at the end."""
    told = list(figures())
    names = [one.name for one in told]
    assert len(names) == len(set(names))
    assert {*PATHS, *GOALS} <= set(names)
    top, _, end = PAGE.partition("\n## Every benchmark\n")
    assert {one.end for one in told} == {"short", "reached"}
    for one in told:
        row = f"| {one.benchmark} | {one.name} | {one.measured} | {one.goal} |"
        assert (row in top, row in end) == (one.end == "short", one.end == "reached")


def test_every_benchmark_is_named_with_its_command():
    """Targets of the Makefile, modules with a command, parts of the tuners' benchmark, files of results."""
    targets = re.findall(r"^(bench[\w-]*|acceptance|test-long):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) >= 5
    scripts = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "def main" in path.read_text()]
    wanted = [
        *(f"`make {target}" for target in targets),
        *(f"`python -m benchmarks.{name}" for name in ("store", *scripts)),
        *(f"make bench-tuning PARTS={part} " for part in PARTS),
        *(f"`benchmarks/results/{path.name}`" for path in (ROOT / "benchmarks" / "results").glob("*.json")),
    ]
    assert [what for what in wanted if what not in PAGE] == []
