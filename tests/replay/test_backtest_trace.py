"""A policy over a trace: its run beside those that it must beat, and what it would have decided."""

import shutil

import pytest

from replay.files import SCENARIO, SCENARIOS, columns, write_trace

pytestmark = pytest.mark.slow

LEFT_OUT = "a trace has no dates, its calendar is left out"


@pytest.fixture
def policy(tmp_path):
    return tmp_path / "p.yaml"


@pytest.fixture
def call(policy):
    return ("policy", "backtest", policy, "--trace", "lmcache_agents", "--scenario", SCENARIO)


def test_the_run_the_gains_and_the_decisions_are_told(tiertune, policy, call):
    """baseline, rule, best_split and tuned are played; every change and every last answer is in the table."""
    policy.write_text("version: 1\nmode: auto\nguard: {min_requests: 10, soak: 30s, changes_per_hour: 100}\n")
    done, document = tiertune.json(*call)
    assert (done.returncode, done.stderr) == (0, "")
    runs = document["runs"]
    assert list(runs) == ["baseline", "rule", "best_split", "tuned"]
    assert f"With {policy} the mean time to the first token is " in done.stdout
    for one in [*runs["tuned"]["changes"], *runs["tuned"]["answers"]]:
        assert one["reason"] in " ".join(done.stdout.split())


def test_a_policy_that_recommends_changes_nothing(tiertune, policy, call):
    """Its answers say what it would wish."""
    policy.write_text("version: 1\nmode: recommend\nguard: {freeze: [{days: [sat], from: '00:00', to: '12:00'}]}\n")
    done, document = tiertune.json(*call)
    assert (done.returncode, done.stderr) == (0, f"note: {policy}: guard.freeze: {LEFT_OUT}\n")
    tuned = document["runs"]["tuned"]
    assert (tuned["decisions"], tuned["split"][1:]) == (0, [])


def test_a_folder_of_scenarios_is_told(tiertune, policy, call):
    """A backtest plays one scenario; exit 2, and nothing is played."""
    policy.write_text("version: 1\n")
    done = tiertune(*call[:-1], SCENARIOS)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"--scenario: {SCENARIOS} is a folder of several: name a file in it\n"


def test_a_folder_of_one_scenario_is_that_scenario(tiertune, policy, tmp_path):
    """As in a replay."""
    policy.write_text("version: 1\n")
    (tmp_path / "one").mkdir()
    shutil.copy(SCENARIO, tmp_path / "one")
    trace = write_trace(tmp_path / "t.parquet", columns())
    done, document = tiertune.json("policy", "backtest", policy, "--trace", trace, "--scenario", tmp_path / "one")
    assert (done.returncode, done.stderr, document["requests"]) == (0, "", 3)


def test_a_wrong_policy_is_told_with_its_place(tiertune, policy, call):
    """By file, line and column; exit 2."""
    policy.write_text("version: 1\nmode: aotu\n")
    done = tiertune(*call)
    assert done.returncode == 2
    assert f"{policy}:2:7: mode: " in done.stderr
