"""The benchmark of the store's data path: what it tells is what it timed, and it times what it says."""

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.store import __main__ as command
from benchmarks.store import disk, remote, rounds, slower
from benchmarks.store.goals import OVERHEAD, PATHS, Goal, judged
from benchmarks.store.world import CHUNK_TOKENS, MIB, running
from replay.files import ROOT

DRAM = {"dram_load_32m", "dram_load_8m", "dram_load_3m", "dram_store_32m", "dram_store_8m"}
SECONDS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9)


class Clock:
    """Seconds that only go on when somebody works."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def works(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(rounds, "perf_counter", made)
    return made


def test_paths_take_turns_and_only_they_are_timed(clock):
    """Each begins every second round; the first rounds are not kept, nor what comes between."""
    done = []

    def path(name, seconds):
        return lambda number: (done.append((number, name)), clock.works(seconds * (number + 1)))

    kept = rounds.interleaved(
        {"a": path("a", 1), "b": path("b", 10)}, 4, warm=2, between=lambda: (done.append("between"), clock.works(100))
    )
    assert kept == {"a": [3, 4, 5, 6], "b": [30, 40, 50, 60]}
    assert done[::2] == ["between"] * 12
    assert [number for number, _ in done[1::2]] == [number for number in range(6) for _ in "ab"]
    firsts = [name for _, name in done[1::4]]
    assert all(one != other for one, other in pairwise(firsts))
    assert Counter(firsts) == {"a": 3, "b": 3}


@given(SECONDS, SECONDS)
def test_a_ratio_is_what_its_figures_say(ours, theirs):
    """Ours over the baseline's, of as many bytes; above 1 where we are faster."""
    told = rounds.ratio(ours, theirs, "memcpy", 1 << 20)
    assert told["ratio"] == pytest.approx(told["gb_per_s"] / told["baseline_gb_per_s"])
    assert (told["baseline"], told["samples"]) == ("memcpy", len(ours))
    assert min(theirs) / max(ours) <= told["ratio"] * (1 + 1e-9)


@given(st.permutations(range(100)))
def test_a_percentile_is_one_of_the_values(values):
    assert [rounds.percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]


def test_a_goal_is_reached_from_its_own_side():
    """A ratio is to be high, a time low."""
    assert [Goal(0.5, 0.8).reached(value) for value in (0.49, 0.5, 0.9)] == [False, True, True]
    assert [Goal(100, 40).reached(value) for value in (101, 100, 3)] == [False, True, True]


def test_what_was_not_measured_now_stays():
    """A run of one part leaves the others, and what other benchmarks wrote."""
    known = {"machine": "m", "paths": {"a": 1, "b": 2}, "engines": {"x": 1}}
    assert command.laid(known, {"paths": {"b": 3}, "lookup": {"keys": 64}}) == {
        "machine": "m",
        "paths": {"a": 1, "b": 3},
        "engines": {"x": 1},
        "lookup": {"keys": 64},
    }


def test_what_is_short_is_told_first():
    path = {"gb_per_s": 1.0, "baseline": "memcpy", "baseline_gb_per_s": 2.0}
    good, bad = {**path, "ratio": 0.9}, {**path, "ratio": 0.1}
    lines = command.table({"paths": {"dram_load_32m": good, "dram_load_8m": bad}}).splitlines()
    assert [line.split()[0::4] for line in lines[1:3]] == [["dram_load_8m", "short"], ["dram_load_32m", "reached"]]


class Told:
    """A store whose tier says that it moved so many chunks, and found as many, since it was asked last."""

    def __init__(self, *, chunks, found):
        self.by_metric = {
            "tier_transfer_bytes_total": [0, chunks * slower.NBYTES],
            "tier_lookup_tokens_total": [0, found * CHUNK_TOKENS],
        }

    def total(self, metric, **_):
        return self.by_metric[metric].pop(0)


@pytest.mark.parametrize(("chunks", "found"), [(2, 3), (3, 2), (0, 0), (4, 3)])
def test_a_load_that_did_not_come_from_the_tier_is_not_told(chunks, found):
    """What DRAM served, or was moved beside, ends the benchmark."""
    with (
        pytest.raises(RuntimeError, match="3 chunks were to be moved"),
        slower.moved(Told(chunks=chunks, found=found), "disk", "read", 3),
    ):
        pass
    with slower.moved(Told(chunks=3, found=3), "disk", "read", 3):
        pass


def test_a_process_that_does_not_start_says_why(tmp_path):
    with (
        pytest.raises(RuntimeError, match="no room"),
        running([sys.executable, "-c", "raise SystemExit('no room')"], tmp_path / "log", lambda: False),
    ):
        pass


def test_what_is_not_installed_is_left_out(monkeypatch, capsys):
    """And said."""
    monkeypatch.setattr(remote.shutil, "which", lambda _: None)
    assert command.measure(["remote"], quick=True) == {}
    assert "remote is not measured: redis-server is not installed" in capsys.readouterr().err


def check(told, paths):
    """Every path and nothing else, all figures as they may be, each with a goal."""
    assert set(told["paths"]) == paths
    for path in told["paths"].values():
        assert set(path) == {"gb_per_s", "baseline", "baseline_gb_per_s", "ratio", "samples"}
        assert path["ratio"] == pytest.approx(path["gb_per_s"] / path["baseline_gb_per_s"])
        assert path["ratio"] > 0
        assert path["samples"] == command.QUICK_ROUNDS
    assert set(told["faults_per_op"]) == {name for name in paths if name.endswith("_32m")}
    assert min(told["faults_per_op"].values()) >= 0
    assert sum(1 for _ in judged(told)) >= len(paths) + len(told["faults_per_op"])


@pytest.mark.slow
def test_dram_and_lookups_are_measured(tmp_path):
    """The whole command, as `make bench` calls it, with few rounds."""
    out = tmp_path / "bench.json"
    out.write_text(json.dumps({"engines": {"model": "m"}}))
    call = [sys.executable, "-m", "benchmarks.store", "--quick", "--parts", "dram", "lookup", "--json", str(out)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert set(told) == {"machine", "engines", "paths", "lookup", "faults_per_op", "overhead"}
    check(told, DRAM)
    assert set(told["overhead"]) == set(OVERHEAD)
    assert min(told["overhead"].values()) > 0
    assert set(told["lookup"]) == {"p50_us", "p99_us", "echo_p99_us", "keys"}
    assert told["lookup"]["keys"] == 64
    assert all(name in done.stdout for name in (*DRAM, "lookup p50", "metric_event"))


@pytest.fixture
def small(monkeypatch):
    """Chunks of 4 MiB: what is measured is not told, only that all of it runs."""
    for module in (slower, disk, remote):
        monkeypatch.setattr(module, "NBYTES", 4 * MIB)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_disk_is_measured(capsys):
    told = command.measure(["disk"], quick=True)
    if not told:
        pytest.skip(capsys.readouterr().err)
    check(told, {"disk_read_32m", "disk_write_32m"})


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("small")
def test_redis_is_measured(capsys):
    told = command.measure(["remote"], quick=True)
    if not told:
        pytest.skip(capsys.readouterr().err)
    check(told, {name for name in PATHS if name.startswith("redis")})
