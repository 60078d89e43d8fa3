"""The benchmark of the store's data path: what it tells is what it timed, and it times what it says."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import document
from benchmarks.goals import Goal
from benchmarks.store import __main__ as command
from benchmarks.store import disk, live, lmcache_server, peers, remote, rounds, slower
from benchmarks.store.goals import OVERHEAD, PATHS, judged
from benchmarks.store.world import CHUNK_TOKENS, MIB, running, serving
from replay.files import ROOT

DRAM = {"dram_load_32m", "dram_load_8m", "dram_load_3m", "dram_store_32m", "dram_store_8m"}
SECONDS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9)


def test_paths_take_turns_and_only_they_are_timed(clock, monkeypatch):
    """Each begins every second round; the first rounds are not kept, nor what comes between."""
    monkeypatch.setattr(rounds, "perf_counter", clock)
    done = []

    def works(what, seconds):
        done.append(what)
        clock.now += seconds

    paths = {
        "a": lambda number: works((number, "a"), number + 1),
        "b": lambda number: works((number, "b"), 10 * (number + 1)),
    }
    kept = rounds.interleaved(paths, 4, warm=2, between=lambda: works("between", 100))
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
    """A ratio is to be high, a time low; what must be below is not reached by as much."""
    told = {"at least": [False, True, True], "at most": [True, True, False], "below": [True, False, False]}
    for side, reached in told.items():
        assert [Goal(side, 0.5).reached(value) for value in (0.49, 0.5, 0.51)] == reached


def test_what_was_not_measured_now_stays(tmp_path):
    """A run of one part leaves the others, and what other benchmarks wrote; the file is all that is left."""
    path = tmp_path / "bench.json"
    document.lay(path, {"machine": "m", "paths": {"a": 1, "b": 2}, "engines": {"x": 1}})
    document.lay(path, {"paths": {"b": 3}, "lookup": {"keys": 64}})
    assert document.known(path) == {
        "machine": "m",
        "paths": {"a": 1, "b": 3},
        "engines": {"x": 1},
        "lookup": {"keys": 64},
    }
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{}"])
def test_an_empty_file_gets_results(tmp_path, text):
    """As a temporary file has it that is made for them."""
    path = tmp_path / "bench.json"
    path.write_text(text)
    document.lay(document.target(str(path)), {"lookup": {"keys": 64}})
    assert document.known(path) == {"lookup": {"keys": 64}}


@pytest.mark.parametrize("text", ["[]", "3", "{", "no results"])
def test_what_is_no_file_of_results_is_told_before_the_work(tmp_path, text):
    """Neither is it written over, nor are figures lost that took minutes."""
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(argparse.ArgumentTypeError, match="has no results: name another file"):
        document.target(str(path))


def test_what_is_short_is_told_first():
    path = {"gb_per_s": 1.0, "baseline": "memcpy", "baseline_gb_per_s": 2.0}
    good, bad = {**path, "ratio": 0.9}, {**path, "ratio": 0.1}
    lines = command.table({"paths": {"dram_load_32m": good, "dram_load_8m": bad}}).splitlines()
    told = [(words[0], words[-1]) for words in map(str.split, lines[1:3])]
    assert told == [("dram_load_8m", "short"), ("dram_load_32m", "reached")]


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


def test_lmcache_is_measured_only_where_it_is_named_and_installed(monkeypatch, capsys, tmp_path):
    assert "peers" in command.PARTS
    assert "peers" not in command.USUAL
    monkeypatch.setattr(peers, "VENV", tmp_path)
    assert command.measure(["peers"], quick=True) == {}
    assert "peers is not measured: LMCache is not installed: make setup-lmcache" in capsys.readouterr().err


class Fake:
    """A side of which every operation takes so long, and is written down."""

    def __init__(self, name, seconds, done):
        self.name, self.seconds, self.done = name, seconds, done

    def store(self, prompt):
        self.done.append((prompt, self.name))
        return self.seconds + prompt


def test_peers_take_turns_with_the_memcpy_after_each():
    done = []
    sides = {"ours": Fake("ours", 0, done), "theirs": Fake("theirs", 100, done)}
    took = peers.turns(sides, {"store": lambda side, n: side.store(n)}, 2, beside=lambda: done.append("copy") or 7)
    warm = rounds.WARM
    assert took == {"store": {"ours": [warm, warm + 1], "theirs": [100 + warm, 101 + warm], "memcpy": [7] * 4}}
    assert done[1::2] == ["copy"] * 2 * (warm + 2)
    assert [number for number, _ in done[::2]] == [number for number in range(warm + 2) for _ in sides]
    assert all(one != other for one, other in pairwise(name for _, name in done[::4]))


@given(SECONDS, SECONDS)
def test_who_is_ahead_of_lmcache_is_who_took_less(ours, theirs):
    """Bytes per second and microseconds alike; a lookup has no memcpy."""
    told = peers.figures(
        {
            "store_8x32m": {"ours": ours, "theirs": theirs, "memcpy": [2.0]},
            "lookup_hit_8": {"ours": ours, "theirs": theirs},
        }
    )
    assert set(told["store_8x32m"]) == {"ours", "theirs", "memcpy", "unit", "samples"}
    assert told["store_8x32m"]["memcpy"] == pytest.approx(8 * 32 * MIB / 2 / 1e9)
    assert told["lookup_hit_8"]["ours"] == pytest.approx(rounds.median(ours) * 1e6)
    assert set(told["lookup_hit_8"]) == {"ours", "theirs", "unit", "samples"}
    times = rounds.median(theirs) / rounds.median(ours)
    assert [peers.faster(row) for row in told.values()] == pytest.approx([times, times])


def test_where_lmcache_is_ahead_is_told_first_and_plainly():
    ahead = {"ours": 3.0, "theirs": 2.0, "unit": "GB/s", "memcpy": 9.0}
    behind = {"ours": 3.0, "theirs": 2.0, "unit": "us"}
    told = {"store_8x32m": ahead, "lookup_hit_8": behind}
    lines = command.table({"peers": {"lmcache": told}}).splitlines()[-2:]
    assert [line.split()[0] for line in lines] == ["lookup_hit_8", "store_8x32m"]
    assert [line.endswith("LMCACHE IS AHEAD") for line in lines] == [True, False]
    assert "LMCache" not in command.table({})


class Sending:
    """A Redis that has sent so many bytes each time it is asked."""

    def __init__(self, *sent):
        self.sent = list(sent)

    def info(self, _):
        return {"total_net_output_bytes": self.sent.pop(0)}


def test_a_prompt_that_did_not_come_from_redis_is_not_told():
    prompt = peers.CHUNKS * peers.NBYTES
    assert peers.sent(Sending(5, 5 + prompt), lambda: 1.5) == 1.5
    with pytest.raises(RuntimeError, match="was to come from Redis"):
        peers.sent(Sending(5, 4 + prompt), lambda: 1.5)


@pytest.mark.parametrize(
    ("program", "patience_s", "said"),
    [("raise SystemExit(3)", 60, "ended with 3"), ("input()", 0.01, "does not answer")],
)
def test_a_client_of_lmcache_that_says_nothing_ends_the_benchmark(program, patience_s, said):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as child:
        with pytest.raises(RuntimeError, match=said):
            lmcache_server.answer(child, patience_s)
        child.kill()


def test_a_benchmark_that_is_terminated_ends_what_it_has_started(tmp_path, monkeypatch):
    """Whichever part it measures."""
    before, started = signal.getsignal(signal.SIGTERM), []

    def part(home, _rounds):
        with running(["sleep", "100"], home / "log", lambda: True) as process:
            started.append(process)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(command.PARTS, "dram", (part, 1, {}))
    with pytest.raises(SystemExit):
        command.main(["--parts", "dram", "--json", str(tmp_path / "bench.json")])
    assert started[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_what_peers_retrieve_is_what_they_stored(tmp_path, monkeypatch):
    """Into the blocks that it came from, by a real store; a prompt that is not there is told as such."""
    monkeypatch.setattr(peers, "PLANES", 2)
    monkeypatch.setattr(peers, "NBYTES", MIB)
    with serving(tmp_path, dram=64 * MIB) as store:
        client = store.client(MIB)
        ours = peers.Ours(client)
        ours._blocks[:] = np.random.default_rng(0).integers(0, 256, ours._blocks.shape, np.uint8)
        was = ours._blocks.copy()
        ours.store(1)
        ours._blocks[:] = 0
        assert ours.retrieve(1) > 0
        ids = np.concatenate(peers._ids(1))
        assert (ours._blocks[:, ids] == was[:, ids]).all()
        assert np.count_nonzero(ours._blocks) == np.count_nonzero(was[:, ids])
        with pytest.raises(RuntimeError, match="8 chunks were to be found"):
            ours.retrieve(2)
        client.close()


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
    with subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as benchmark:
        try:
            shown, errors = benchmark.communicate(timeout=100)
        finally:
            benchmark.terminate()  # else its store would go on
    assert benchmark.returncode == 0, errors
    told = json.loads(out.read_text())
    assert set(told) == {"machine", "engines", "paths", "scattered", "lookup", "faults_per_op", "overhead"}
    check(told, DRAM)
    assert set(told["scattered"]) == {"dram_load_32m", "dram_store_32m"}
    assert all(path["ratio"] > 0 for path in told["scattered"].values())
    assert set(told["overhead"]) == {*OVERHEAD, "round_trips_32m"}
    assert min(told["overhead"].values()) > 0
    assert set(told["lookup"]) == {"p50_us", "p99_us", "echo_p99_us", "keys"}
    assert told["lookup"]["keys"] == 64
    assert all(name in shown for name in (*DRAM, "lookup p50", "metric_event"))


@pytest.fixture
def small(monkeypatch):
    """Chunks of 4 MiB: what is measured is not told, only that all of it runs."""
    for module in (slower, disk, remote):
        monkeypatch.setattr(module, "NBYTES", 4 * MIB)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("part", "paths"),
    [
        ("disk", {"disk_read_32m", "disk_write_32m"}),
        pytest.param("remote", {name for name in PATHS if name.startswith("redis")}, marks=pytest.mark.real),
    ],
)
def test_what_is_slower_than_dram_is_measured(capsys, part, paths):
    told = command.measure([part], quick=True)
    if not told:
        pytest.skip(capsys.readouterr().err)
    check(told, paths)


@pytest.mark.slow
def test_lookups_are_measured_while_the_store_is_tuned(tmp_path, monkeypatch):
    """A resize is over when the memory has gone or come; a switch leaves all chunks."""
    monkeypatch.setattr(live, "QUIET_S", 0.2)
    homes = [tmp_path / name for name in ("r", "s")]
    for home in homes:
        home.mkdir()
    resized = live.resize(homes[0], 1, size=64 * MIB)["live"]["resize"]
    switched = live.switch(homes[1], 3, chunks=2000)["live"]["switch"]
    for told in (resized, switched):
        assert told["ratio"] == pytest.approx(told["p99_us"] / told["quiet_p99_us"])
        assert 0 < told["p99_us"] <= told["longest_us"]
        assert min(told["samples"], told["quiet_samples"]) > 0
    assert 0 < switched["step_us"] < switched["whole_us"]
    assert len(list(judged({"live": {"resize": resized, "switch": switched}}))) == 3
