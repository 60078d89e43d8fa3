"""A policy over a trace: its run beside those that it must beat, and what it would have decided."""

import json
import subprocess
import sys

import pytest

from replay.files import SCENARIO

pytestmark = pytest.mark.slow

LEFT_OUT = "a trace has no dates, its calendar is left out"


def backtest(policy, out):
    command = [
        sys.executable, "-c", "from tiertune_agent.cli import main; main()", "policy", "backtest", str(policy),
        "--trace", "lmcache_agents", "--scenario", str(SCENARIO), "--json", str(out),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def test_the_run_the_gains_and_the_decisions_are_told(tmp_path):
    """baseline, rule, best_split and tuned are played; every change and every last answer is in the table."""
    policy = tmp_path / "p.yaml"
    policy.write_text("version: 1\nmode: auto\nguard: {min_requests: 10, soak: 30s, changes_per_hour: 100}\n")
    done = backtest(policy, tmp_path / "b.json")
    assert (done.returncode, done.stderr) == (0, "")
    runs = json.loads((tmp_path / "b.json").read_text())["runs"]
    assert list(runs) == ["baseline", "rule", "best_split", "tuned"]
    assert f"With {policy} the mean time to the first token is " in done.stdout
    for one in [*runs["tuned"]["changes"], *runs["tuned"]["answers"]]:
        assert one["reason"] in " ".join(done.stdout.split())


def test_a_policy_that_recommends_changes_nothing(tmp_path):
    """Its answers say what it would wish."""
    policy = tmp_path / "p.yaml"
    policy.write_text("version: 1\nmode: recommend\nguard: {freeze: [{days: [sat], from: '00:00', to: '12:00'}]}\n")
    done = backtest(policy, tmp_path / "b.json")
    assert (done.returncode, done.stderr) == (0, f"note: {policy}: guard.freeze: {LEFT_OUT}\n")
    tuned = json.loads((tmp_path / "b.json").read_text())["runs"]["tuned"]
    assert (tuned["decisions"], tuned["split"][1:]) == (0, [])


def test_a_wrong_policy_is_told_with_its_place(tmp_path):
    """By file, line and column; exit 2."""
    policy = tmp_path / "p.yaml"
    policy.write_text("version: 1\nmode: aotu\n")
    done = backtest(policy, tmp_path / "b.json")
    assert done.returncode == 2
    assert f"{policy}:2:7: mode: " in done.stderr
