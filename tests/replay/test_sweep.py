"""Sweeps: every trace under every scenario, the same wherever it is played."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from connector.stores import PATIENCE_S, short_folder
from replay.files import SCENARIO, SCENARIOS, columns, write_trace
from tiertune_agent.replay.sweep import SweepError, grid, over_processes, over_ray, play, sweep_document
from tiertune_agent.replay.traces import TraceError
from tiertune_agent.terminal.options import InputError

RUNS = ("never", "rule")


@pytest.fixture
def traces(tmp_path):
    return [write_trace(tmp_path / f"{name}.parquet", columns()) for name in ("a", "b")]


@pytest.fixture
def cells(traces):
    """All traces under all scenarios."""
    return grid(traces, [SCENARIOS], RUNS)


@pytest.fixture
def ray(monkeypatch):
    """Ray, which is to tell nobody that it was used."""
    module = pytest.importorskip("ray", reason="Ray is not installed (make setup-ray)")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with short_folder() as folder:
        monkeypatch.setenv("RAY_TMPDIR", str(folder))
        yield module


class Killed:
    """Ends the process that it is sent to."""

    def __reduce__(self):
        return os._exit, (9,)


ENDLESS = """
import dataclasses, signal, sys
from pathlib import Path
from tiertune_agent.replay.sweep import grid, over_processes

class Endless:
    def __reduce__(self):
        return exec, ("import time; print(end='playing', flush=True); time.sleep(600)",)

signal.signal(signal.SIGINT, signal.default_int_handler)
*traces, scenario = map(Path, sys.argv[1:])
cells = [dataclasses.replace(cell, policy=Endless()) for cell in grid(traces, [scenario], ("never",))]
list(over_processes(cells, 2))
"""
"""A command whose replays, two at once, take ten minutes."""


def without_wall(document):
    return json.loads(json.dumps(document), object_hook=lambda d: {k: v for k, v in d.items() if k != "wall_s"})


class TestGrid:
    def test_every_trace_under_every_scenario_of_a_folder(self, traces, cells):
        """Traces first, scenarios by name."""
        names = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
        assert [(cell.trace, cell.scenario.name) for cell in cells] == [
            (str(trace), name) for trace in traces for name in names
        ]

    def test_a_folder_without_scenarios_is_told(self, traces, tmp_path):
        """Nothing to play is wrong input."""
        with pytest.raises(InputError, match=r"there is no \.yaml file in"):
            grid(traces, [tmp_path], RUNS)

    def test_a_run_that_a_scenario_does_not_have_is_told_before_anything_is_played(self, traces):
        """With the names that there are."""
        with pytest.raises(InputError, match="there is no run 'rule_blind' in slice-8b-two-hosts; there are always"):
            grid(traces, [SCENARIO], ["rule_blind"])


def test_the_page_tells_of_the_time_that_was_played(traces):
    """Twice the load is half the time: what is told of it, and the axis on which the split moves."""
    (cell,) = grid(traces[:1], [SCENARIOS / "conv-70b-25g.yaml"], ("never",))
    twice = replace(cell, scenario=cell.scenario.model_copy(update={"time_factor": 0.5}))
    spans = [play(each).span_s for each in (cell, twice)]
    assert spans[1] == spans[0] / 2 > 0


class TestPlaces:
    @pytest.mark.parametrize("processes", [1, 2])
    def test_times_that_no_replay_plays_are_told_before_anything_is_played(self, traces, tmp_path, processes):
        """A trace in milliseconds comes last: what was played before it would be lost."""
        late = write_trace(tmp_path / "ms.parquet", columns() | {"t": pa.array([0.0, 1e6, 1e11])})
        with pytest.raises(TraceError, match="ms: column 't' and time_factor make 1,157,407 days"):
            next(over_processes(grid([*traces, late], [SCENARIO], ("never",)), processes))

    @pytest.mark.slow
    def test_processes_give_what_one_gives(self, cells):
        """Two processes, the same documents in the same order, wall times aside."""
        steps = []
        alone, two = (list(over_processes(cells, processes, lambda: steps.append(1))) for processes in (1, 2))
        assert without_wall(sweep_document(alone, 0)) == without_wall(sweep_document(two, 0))
        assert len(alone) == len(cells)
        assert len(steps) == 2 * sum(len(cell.runs) for cell in cells)

    def test_a_process_that_is_killed_is_told(self, cells):
        """As by a kernel that is short of memory: one message which says what to do, and no traceback."""
        killed = [replace(cell, policy=Killed()) for cell in cells]
        with pytest.raises(SweepError, match=r"a process ended before its replays were done: .* lower --processes"):
            list(over_processes(killed, 2))

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_no_process_plays_on_for_nobody(self, traces, number):
        """Whoever ends the command alone, as a service manager does, ends its replays, however long they take."""
        command = [sys.executable, "-c", ENDLESS, *map(str, traces), str(SCENARIO)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
            try:
                assert parent.stdout.read(7) == b"playing"
            finally:
                parent.send_signal(number)
            parent.communicate(timeout=PATIENCE_S)  # the output ends with the last process that has it

    @pytest.mark.slow
    def test_an_interrupt_is_of_one_process_alone(self, traces):
        """A terminal sends it to all: those that play, or are just beginning to, end without a word."""
        command = [sys.executable, "-c", ENDLESS, *map(str, traces), str(SCENARIO)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, start_new_session=True) as parent:
            assert parent.stdout.read(7) == b"playing"
            os.killpg(parent.pid, signal.SIGINT)
            _, told = parent.communicate(timeout=PATIENCE_S)
        assert (told.count(b"Traceback"), told.splitlines()[-1]) == (1, b"KeyboardInterrupt"), told.decode()

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_ray_gives_what_one_process_gives(self, cells, ray):
        """On a local Ray, which ends with the sweep."""
        alone, spread = list(over_processes(cells, 1)), list(over_ray(cells, "local"))
        assert without_wall(sweep_document(alone, 0)) == without_wall(sweep_document(spread, 0))
        assert not ray.is_initialized()

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_a_trace_that_ray_s_nodes_do_not_have_is_told(self, tmp_path, ray):
        """By its own message, without Ray's account of where it came from."""
        absent = tmp_path / "absent.parquet"
        with pytest.raises(TraceError) as error:
            list(over_ray(grid([absent], [SCENARIO], ("never",)), "local"))
        assert (type(error.value), str(error.value)[: len(f"{absent}: ")]) == (TraceError, f"{absent}: ")
        assert not ray.is_initialized()

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.usefixtures("ray")
    def test_a_process_of_a_node_that_is_killed_is_told(self, cells):
        """Once Ray has given it up."""
        with pytest.raises(SweepError, match=r"^--ray: a process of a node ended before its replay was done: .+$"):
            list(over_ray([replace(cells[0], policy=Killed())], "local"))

    @pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "host:port"])
    def test_a_cluster_that_does_not_answer_is_told(self, cells, monkeypatch, address):
        """At once, not after Ray's own patience of minutes."""
        monkeypatch.setitem(sys.modules, "ray", object())
        with pytest.raises(InputError, match=f"no Ray cluster answers at '{address}'"):
            next(over_ray(cells, address))

    @pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
    @pytest.mark.parametrize("scheme", ["", "ray://"])
    def test_a_cluster_may_have_an_ipv6_address(self, cells, monkeypatch, scheme):
        """In brackets, as Ray reads it: what listens there is asked."""

        def init(**_):
            raise ConnectionError("was asked")

        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
        with (
            socket.create_server(("::1", 0), family=socket.AF_INET6) as listening,
            pytest.raises(InputError, match="was asked"),
        ):
            next(over_ray(cells, f"{scheme}[::1]:{listening.getsockname()[1]}"))

    def test_without_ray_it_says_what_to_install(self, cells, monkeypatch):
        """The extra is optional."""
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(InputError, match=r"pip install 'tiertune\[ray\]'"):
            next(over_ray(cells, "local"))


def test_the_command_plays_a_grid_and_writes_page_and_document(tiertune, traces, tmp_path):
    """Two traces under all scenarios over two processes: a list of replays, one page."""
    options = ("--run", "never,rule", "--processes", 2, "--html", tmp_path / "r.html")
    done, document = tiertune.json("replay", *traces, "--scenario", SCENARIOS, *options)
    assert (done.returncode, done.stderr) == (0, "")
    cells = document["cells"]
    assert len(cells) == 2 * len(list(SCENARIOS.glob("*.yaml")))
    assert {tuple(cell["runs"]) for cell in cells} == {("never", "rule")}
    assert f"{len(cells)} replays" in (tmp_path / "r.html").read_text()
