"""The benchmark of the tuners: what it makes, keeps, and leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pytest

from benchmarks.document import write
from benchmarks.goals import table
from benchmarks.tuning import cells, gate, harm, queues, speed
from benchmarks.tuning.__main__ import PARTS, arguments, judged, kept, left, main, told
from benchmarks.tuning.cost import observe, stored
from benchmarks.tuning.jobs import Job, perform, run
from benchmarks.tuning.worlds import Grid, scenario
from replay.files import ROOT, columns, write_trace
from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.traces import builtin_trace, load_trace

WAITS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
sys.path.insert(0, "tests")
from benchmarks.tuning.jobs import Job, run
from replay.test_tuning_benchmark import Waiting, wait
list(run([("waits", Waiting, Job(wait, None, {"one": 1, "two": 2}))], 1))
"""


class Waiting:
    SHOWN = ("pid",)


def wait(_shared, cases):
    """Tells its process, and then takes long."""
    for _ in cases:
        yield {"pid": os.getpid()}
        time.sleep(600)


@pytest.fixture
def folder(tmp_path):
    """With a trace of some prompts that grow."""
    chains = [list(range(start, start + 6 + turn)) for start in (0, 100, 200) for turn in range(4)]
    write_trace(tmp_path / "small.parquet", columns(chains))
    return tmp_path


@pytest.fixture
def refused(capsys):
    """What is said of arguments that the benchmark ends upon, with 2."""

    def said(*given):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in given])
        assert ended.value.code == 2
        return capsys.readouterr().err

    return said


def of_cells(folder, *more):
    """Arguments that make some."""
    given = ["--traces", folder, "--parts", "cells", "--fleets", "8b", "--routings", "sticky", "--totals", 0.5, *more]
    return [str(word) for word in given]


def test_every_row_has_one_name(folder):
    """Over all parts of a grid no name comes twice in a part: that is what --skip-done goes by."""
    grid = Grid([str(folder / "small.parquet"), "lmcache_agents"], seeds=2)
    for part in PARTS.values():
        names = [name for job in part.jobs(grid) for name in job.cases]
        assert names
        assert len(names) == len(set(names))


def test_every_goal_is_a_figure_and_no_figure_is_told_twice():
    """A goal without a figure would never be missed."""
    figures = [name for part in PARTS.values() for name in part.summary([])]
    assert len(figures) == len(set(figures))
    assert {goal for part in PARTS.values() for goal in part.GOALS} <= set(figures)
    assert set(told({part: {} for part in PARTS})["summary"].values()) == {None}


def test_cells_that_are_done_are_not_made_again():
    """What is left of a job are its other cases, in their order."""
    job = next(cells.jobs(Grid(["a"], fleets=["8b"], links=[10, 25, 100])))
    first, second, third = job.cases
    assert list(job.without({second: {}}).cases) == [first, third]
    assert Job(job.make, job.shared, job.cases).without(job.cases).cases == {}


@pytest.mark.slow
def test_a_run_is_taken_up_where_it_ended(folder, capsys):
    """A second run with more links makes those alone, and the document has both, by name."""
    out = folder / "out.json"
    given = of_cells(folder, "--processes", 1, "--json", out, "--skip-done")
    assert main([*given, "--links", "100"]) == 0
    before = kept(out)["cells"]
    capsys.readouterr()
    assert main([*given, "--links", "10", "100"]) == 0
    rows = json.loads(out.read_text())["cells"]
    assert [row["name"] for row in rows] == [f"small sticky 0.5 seed 0 8b {gbps}g" for gbps in (100, 10)]
    assert before[rows[0]["name"]] == rows[0]
    assert "cells                                   2" in capsys.readouterr().out


def test_a_cell_tells_tuned_beside_the_others(folder):
    """Gains are against the baseline of the same requests; hours and periods come from the same run."""
    trace = str(folder / "small.parquet")
    job = next(cells.jobs(Grid([trace], fleets=["8b"], totals=[0.5], links=[25])))
    (row,) = cells.cells(job.shared, list(job.cases.values()))
    assert set(row["ttft_mean_s"]) == {*cells.OTHERS, "tuned"}
    assert row["tuned_gain"] == pytest.approx(1 - row["ttft_mean_s"]["tuned"] / row["ttft_mean_s"]["baseline"])
    assert len(row["split"]) <= row["decisions"] + row["rollbacks"] + 1
    assert row["most_changes_in_a_period"] >= bool(row["decisions"])


def patient(folder, mode):
    """The gate's settings of a policy, as a file: the replay starts without a margin."""
    path = folder / f"{mode}.yaml"
    path.write_text(f"version: 1\nmode: {mode}\ntuners: {{remote_fetch: {{margin: 1.5}}}}\n")
    return path


@pytest.mark.parametrize(("mode", "decisions"), [("auto", 1), ("recommend", 0)])
def test_a_cell_is_tuned_under_the_policy_that_is_named(folder, capsys, mode, decisions):
    """On auto its margin is set, else nothing is; the row that is printed tells the policy."""
    table = columns([list(range(turn)) for turn in range(6, 46)])
    write_trace(folder / "small.parquet", table | {"t": pa.array([10.0 * turn for turn in range(40)])})
    options = arguments(of_cells(folder, "--links", 25, "--policy", patient(folder, mode)))
    ((name, part, job),) = left(options, {"cells": {}})
    (row,) = perform(name, part.SHOWN, job)
    assert row["decisions"] == decisions
    assert row["name"] == f"small sticky 0.5 seed 0 8b 25g under {mode}"
    assert capsys.readouterr().out.startswith(f"cells {row['name']} {{")


def test_only_what_tunes_depends_on_the_policy():
    """Rows of other parts keep their names, so that --skip-done knows them."""
    grids = Grid(["lmcache_agents"]), Grid(["lmcache_agents"], policy=Policy(version=1), policy_name="strict")
    plain, under = (
        {name: [row for job in part.jobs(grid) for row in job.cases] for name, part in PARTS.items()} for grid in grids
    )
    assert {name for name in PARTS if plain[name] != under[name]} == {"cells", "eviction", "harm", "speed"}
    assert under["cells"] == [f"{name} under strict" for name in plain["cells"]]


def test_rows_under_another_policy_are_not_mixed_in(folder):
    """The summary is of one policy: it ends, and leaves the file."""
    out = folder / "out.json"
    write(out, told({part: {} for part in PARTS}))
    before = out.read_bytes()
    with pytest.raises(SystemExit, match=r"was made under no --policy: name another file by --json"):
        main(["--skip-done", "--json", str(out), "--policy", str(patient(folder, "auto"))])
    assert out.read_bytes() == before
    write(out, told({part: {} for part in PARTS}, "auto"))
    assert set(kept(out, "auto")) == set(PARTS)


def test_a_wrong_policy_is_told_with_its_place(folder, refused):
    """Exit 2, before anything is made."""
    path = folder / "p.yaml"
    path.write_text("version: 1\nmode: aotu\n")
    assert f"{path}:2:7: mode: " in refused("--policy", path)


def test_the_gate_is_judged_by_means_of_seeds():
    """One seed above the goal is none, if the mean is not."""
    common = {"trace": "t", "fleet": "8b", "gbps": 25}
    seconds = [{"rule": rule, "rule_oracle": 1.0, "best_static": 1.0} for rule in (1.10, 0.98)]
    rows = [{**common, "seed": seed, "ttft_mean_s": each} for seed, each in enumerate(seconds)]
    found = gate.summary(rows)
    assert found["gate_cells"] == 1
    assert found["rule_over_oracle_worst"] == pytest.approx(0.04)
    assert found["rule_over_best_static_worst"] == pytest.approx(0.04)


def test_a_harm_that_nobody_noticed_is_counted():
    """Reported or acted on within the soak is enough; later than that, or never, is not, if a window ended after it."""
    common = {"soak_s": 300.0, "windows": 1, "harmed": True}
    pairs = [(1.0, None), (None, 30.0), (None, 301.0), (None, None)]
    rows = [{**common, "reported_after_s": told_s, "acted_after_s": acted_s} for told_s, acted_s in pairs]
    rows += [rows[-1] | {"harmed": False}, rows[-1] | {"windows": 0}]
    found = harm.summary(rows)
    assert (found["harm_unreported"], found["harm_too_short"], found["harm_of_nothing"]) == (2, 1, 1)
    assert harm.summary(rows[-1:])["harm_unreported"] is None


@pytest.mark.parametrize(("before", "after", "harmed"), [([], [0], True), ([0], [], False), ([0, 2**30], [0], True)])
def test_a_tenth_of_no_dram_harms_nothing(before, after, harmed, monkeypatch):
    """Where sizes have left a host none by the middle of the trace there is nothing to report."""
    moments = [(at_s, size) for at_s, sizes in ((0.0, before), (1e9, after)) for size in sizes]
    changes = [SimpleNamespace(field=harm.DRAM_FIELD, at_s=at_s, after=size, document=dict) for at_s, size in moments]
    agent = SimpleNamespace(changes=changes, incidents=[], stores=SimpleNamespace(window_s=15.0))
    monkeypatch.setattr(harm, "conduct", lambda replay, policy: (agent, None))
    cases = [(by_hand, None) for by_hand in harm.HARMS.values()]
    assert [row["harmed"] for row in harm.harms("lmcache_agents", cases)] == [True, harmed]


@pytest.mark.parametrize(("seconds", "windows"), [(14.0, 0), (29.0, 1)])
def test_a_trace_may_end_before_anybody_can_notice_a_harm(folder, seconds, windows):
    """It is done in the middle, and noticed at the end of a window of 15 s."""
    trace = write_trace(folder / "short.parquet", columns([[0, 1]] * 4) | {"t": pa.array([0.0, 1.0, 2.0, seconds])})
    (row,) = harm.harms(str(trace), [(harm.HARMS["fifo"], None)])
    assert (row["windows"], row["reported_after_s"] is None) == (windows, windows == 0)


def test_the_load_is_that_of_the_engines_without_any_cache():
    """With the factor that a load asks for, as many seconds of prefill come in a second, per engine."""
    trace, plain = builtin_trace("lmcache_agents"), scenario("8b", dram=0.02, remote=0.3)
    factor = queues.load(trace, plain) / 2.0
    assert queues.load(trace, plain.model_copy(update={"time_factor": factor})) == pytest.approx(2.0)


def test_requests_that_come_all_at_once_are_measured_too(folder):
    """No load can be set then, and no hours be told: the queues are those that they make, the speed is as it is."""
    trace = str(write_trace(folder / "small.parquet", columns([[0, 1]] * 4) | {"t": pa.array([5.0] * 4)}))
    job = next(queues.jobs(Grid([trace], links=[25])))
    (row,) = queues.queues(job.shared, list(job.cases.values()))
    assert (row["time_factor"], row["ratio"]) == (1.0, pytest.approx(1.0))
    row = speed.alone(trace, None, queueing=False)
    assert (row["hours"], row["cpu_s_of_4_hours"]) == (0.0, row["cpu_s"])


def test_a_file_that_is_no_trace_is_told_before_anything_is_made(folder, refused):
    """Exit 2, with its name; what is not parquet beside the traces is left alone."""
    (folder / "README.md").write_text("traces\n")
    assert arguments(["--traces", str(folder)]).traces == folder
    write_trace(folder / "other.parquet", {"a": pa.array([1])})
    assert f"{folder / 'other.parquet'}: column 'hash_ids' is missing" in refused("--traces", folder)


@pytest.mark.parametrize("option", ["--seeds", "--processes", "--totals", "--links"])
@pytest.mark.parametrize("number", ["0", "-1", "nan", "two"])
def test_a_number_that_leaves_nothing_to_measure_is_told(refused, option, number):
    """No seeds are no rows, which looked like a run in which all was well."""
    assert f"{option}: {number} is not a" in refused(option, number)


def test_what_a_store_is_asked_are_the_traces_chains(folder):
    """A key stands for the same block everywhere, and an observer studies them all."""
    trace = load_trace(folder / "small.parquet")
    chains = stored(trace, 3)
    assert [len(chain) for chain in chains] == [6, 7, 8]
    assert all(short == longer[: len(short)] for short, longer in pairwise(chains))
    assert {len(key) for chain in chains for key in chain} == {32}
    observe(chains, 16, None)


def test_the_table_tells_what_was_not_reached():
    """Figures that were not measured are left out; those without a goal stand for themselves."""
    figures = {"regret_p90": 0.01, "regret_mean": 0.5, "cells": 3, "worst_hour": None}
    lines = table(judged(figures)).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["regret_mean", "regret_p90", "cells"]
    assert lines[0].endswith("  at most 0.03, aim 0.015  short")
    assert lines[1].endswith("  reached")
    assert lines[2].endswith(" 3")


def test_an_interrupt_is_no_error(monkeypatch):
    """Ctrl-C ends a run of hours with the shell's status for it, and without a traceback."""
    monkeypatch.setattr("benchmarks.tuning.__main__.measure", Mock(side_effect=KeyboardInterrupt))
    assert main([]) == 130


@pytest.mark.slow
def test_an_interrupt_amid_the_handing_in_of_jobs_waits_for_none():
    """Those that were handed in may take hours."""

    def jobs():
        yield "waits", Waiting, Job(wait, None, {"one": 1})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run(jobs(), 1))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_leaves_no_process(number):
    """However the run ends, its workers do, in the midst of a job and without a word, though a terminal tells all."""
    run = subprocess.Popen(
        [sys.executable, "-c", WAITS],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert run.stdout is not None
    worker = Path("/proc", re.findall(r"\d+", run.stdout.readline())[-1], "cmdline")
    os.killpg(run.pid, signal.SIGINT) if number == signal.SIGINT else run.kill()
    _, told = run.communicate(timeout=20)
    assert told.count("Traceback") == (number == signal.SIGINT), told  # of the run itself
    end = time.monotonic() + 20
    while worker.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not worker.exists()
