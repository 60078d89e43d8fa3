"""The two commands, as people call them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replay.files import ROOT, SCENARIO, columns, write_trace

FULL = Path("/dev/full")


def test_curve_tells_and_writes_the_same(tiertune):
    """The table on standard output has the figures of --json."""
    done, document = tiertune.json("curve", "lmcache_agents", "--algorithm", "lru", "--sizes", "0.01,0.1")
    assert (done.returncode, done.stderr) == (0, "")
    points = document["points"]
    assert [round(100 * point["hit_ratio"], 1) for point in points] == [36.6, 89.8]
    for point in points:
        assert f"{100 * point['hit_ratio']:.2f}" in done.stdout


def test_replay_writes_the_runs_that_were_asked_for(tiertune):
    """--run picks; the document has the contract's keys."""
    done, document = tiertune.json("replay", "shift_mix_slice", "--scenario", SCENARIO, "--run", "never,rule")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(document) == {"trace", "scenario", "requests", "wall_s", "runs"}
    assert (document["trace"], document["scenario"], document["requests"]) == (
        "shift_mix_slice",
        "slice-8b-two-hosts",
        2732,
    )
    assert list(document["runs"]) == ["never", "rule"]
    assert set(document["runs"]["rule"]) == {
        "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "ttft_mean_after_3_periods_s", "prefill_gpu_s", "prompt_tokens",
        "hit_tokens", "recomputed_tokens", "fetched_bytes", "decisions", "rollbacks", "split",
    }  # fmt: skip


def test_a_sampled_curve_tells_how_much_was_sampled(tiertune):
    """A small trace is exact whatever was asked for, and both outputs say so."""
    done, document = tiertune.json("curve", "lmcache_agents", "--sizes", "0.01", "--sampled", "0.01")
    assert (done.returncode, done.stderr) == (0, "")
    assert "so few blocks are simulated whole: exact, not sampled at 0.01" in done.stdout
    assert (document["sampled"], document["rates"], document["seed"]) == (0.01, [1.0], 1)
    assert round(100 * document["points"][0]["hit_ratio"], 2) == 36.55


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("curve lmcache_agents --sizes 0.1,zero", "--sizes: '0.1,zero' is not a list of shares"),
        ("curve lmcache_agents --sizes 1e308", "--sizes: '1e308' is not a list of shares"),
        ("curve lmcache_agents --sizes 0.1 --json absent/out.json", "absent/out.json"),
        ("curve lmcache_agents --sizes -1", "--sizes: '-1' is not a list of shares"),
        ("curve lmcache_agents --sizes 0.1 --algorithm lfu", "'lfu' is not one of lru, arc, s3fifo"),
        ("curve lmcache_agents --sizes 0.1 --sampled 0", "--sampled: 0 is not a share of the blocks"),
        ("curve lmcache_agents --sizes 0.1 --sampled nan", "--sampled: nan is not a share of the"),
        ("curve lmcache_agents --sizes 0.1 --sampled 0.1 --algorithm opt", "opt looks ahead"),
        ("curve lmcache_agents --sizes 0.1 --sampled 0.1 --seed -1", "Invalid value for '--seed': Input should be"),
        ("curve absent.parquet --sizes 0.1", "absent.parquet: there is no such file"),
        ("replay lmcache_agents --scenario absent.yaml", "absent.yaml: cannot be read: No such file"),
        (f"replay lmcache_agents --scenario {SCENARIO} --run rule,quick", "there is no run 'quick' in "),
        (
            f"replay lmcache_agents --scenario {SCENARIO} --run rule --policy {SCENARIO}",
            "--policy: only the run tuned",
        ),
        (f"replay lmcache_agents --scenario {SCENARIO} --html absent/x.html", "folder of absent/x.html"),
        (f"replay lmcache_agents --scenario {ROOT}/docs", "--scenario: there is no .yaml file in"),
        (
            f"replay lmcache_agents absent.parquet --scenario {SCENARIO} --run never",
            "absent.parquet: there is no such file",
        ),
        (
            f"replay lmcache_agents --scenario {SCENARIO} --json both.out --html ./both.out",
            "--html: both.out is the file of --json",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_told_and_exits_with_2(tiertune, arguments, message):
    """One message on standard error that says what to mend, and nothing else."""
    done = tiertune(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("match", "left_out"),
    [('model: "*"', False), ('store: "gpu-*"', True), ('model: "llama-*"', True), ("store: fleet", True)],
)
def test_overrides_that_a_trace_cannot_fit_are_told_as_left_out(tiertune, tmp_path, match, left_out):
    """It names neither stores nor models, nor the remote: rules for some of them are not what is tested."""
    policy = tmp_path / "p.yaml"
    policy.write_text(f"version: 1\noverrides: [{{match: {{{match}}}, mode: auto}}]\n")
    trace = write_trace(tmp_path / "t.parquet", columns())
    done = tiertune("replay", trace, "--scenario", SCENARIO, "--run", "tuned", "--policy", policy)
    told = "a trace names no stores and no models, entries for some of them or the remote are left out"
    assert (done.returncode, done.stderr) == (0, f"note: {policy}: overrides: {told}\n" if left_out else "")


def test_a_process_of_its_own_tells_the_same():
    """What the shell sees of wrong input: one message, nothing on standard output, status 2."""
    command = [sys.executable, "-c", "from tiertune_agent.cli import main; main()", "curve", "absent", "--sizes", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("absent: there is no such file")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("path", ["x" * 300, "a/" * 2100])
@pytest.mark.parametrize(
    "command",
    [
        ("curve", "{}", "--sizes", "0.1"),
        ("replay", "lmcache_agents", "--scenario", "{}"),
        ("policy", "backtest", str(ROOT / "policies" / "default.yaml"), "--history", "sqlite:///{}"),
    ],
    ids=["curve", "replay", "backtest"],
)
def test_a_name_that_is_too_long_is_wrong_input(tiertune, command, path):
    """As where other commands read it."""
    done = tiertune(*(word.replace("{}", path) for word in command))
    assert (done.returncode, done.stderr) == (2, f"{path.rstrip('/')}: File name too long\n")


@pytest.fixture
def curve_told_to(tmp_path):
    """Runs ``curve`` in a process of its own, of a given standard output; also returns the file of --json."""
    trace, path = write_trace(tmp_path / "t.parquet", columns([[0, 1], [0, 1]])), tmp_path / "told.json"
    main = "from tiertune_agent.cli import main; main()"
    command = [sys.executable, "-c", main, "curve", str(trace), "--sizes", "0.1", "--json", str(path)]

    def run(output):
        return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False, timeout=60), path

    return run


def test_a_reader_that_leaves_costs_no_result(curve_told_to):
    """As `head` does before the first line: the work goes on, the file of --json is whole, the status is 0."""
    reader, writer = os.pipe()
    os.close(reader)
    done, path = curve_told_to(writer)
    os.close(writer)
    assert (done.returncode, done.stderr, json.loads(path.read_text())["accesses"]) == (0, b"", 4)


@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_under_the_output_is_told_once(curve_told_to):
    """One message, and status 1: no traceback of what Python tries to write again at its end."""
    with FULL.open("wb") as full:
        done, _ = curve_told_to(full)
    assert (done.returncode, done.stderr) == (1, b"[Errno 28] No space left on device\n")


def test_wrong_files_are_told_with_their_places(tiertune, tmp_path):
    """A broken chain by file, row and column; a scenario's every mistake by file, line and column."""
    trace = write_trace(tmp_path / "t.parquet", columns([[0, 1, 2], [0, 2], [3]]))
    done = tiertune("curve", trace, "--sizes", "0.1")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{trace}: row 1, column 'hash_ids': broken chain: block 2 follows block 0 here")
    scenario = tmp_path / "s.yaml"
    scenario.write_text(SCENARIO.read_text().replace("engines: 4", "engines: none").replace("seed: 1", "sed: 1"))
    done = tiertune("replay", "lmcache_agents", "--scenario", scenario)
    assert done.returncode == 2
    assert f"{scenario}:4:10: engines: " in done.stderr
    assert f"{scenario}:17:1: sed: unknown key: did you mean seed?" in done.stderr
