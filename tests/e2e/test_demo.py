"""The demo: the real command with all its processes. Of one that runs to its end: ``test_dashboards_demo``."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.servers import wait_until
from tiertune_agent.demo.ports import free_port


class Demo:
    """``tiertune demo`` as a process; all that it starts carries a mark in its environment."""

    def __init__(self, folder, *arguments, **environment):
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.mark = f"TIERTUNE_TEST_MARK={os.urandom(8).hex()}"
        self.port = free_port()
        self.log = folder / "output"
        name, _, value = self.mark.partition("=")
        command = [sys.executable, "-c", "from tiertune_agent.cli import main; main()", "demo", *arguments]
        self.began = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1", name: value, **environment},
            )

    @property
    def text(self):
        return self.log.read_text()

    def processes(self):
        """Ids of the living processes of this run, its own too, and their command lines."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdecimal() and self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # gone meanwhile, or not ours
        return found

    def children(self):
        return {pid: line for pid, line in self.processes().items() if pid != self.process.pid}

    def await_work(self):
        """Seconds from the start until players work."""
        wait_until(lambda: "page http" in self.text or self.process.poll() is not None, "players work", 60)
        assert self.process.poll() is None, self.text
        return time.monotonic() - self.began

    def shared_memory(self):
        """Files in /dev/shm that a process of this run maps."""
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in self.processes())
        return re.findall(r"/dev/shm/\S+", maps)

    def assert_nothing_left(self):
        assert self.children() == {}
        assert list(self.temporary.iterdir()) == []
        with socket.create_server(("127.0.0.1", self.port)):
            pass  # nobody listens there

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def ended(demo):
    """A demo that works is ended; how many seconds it took until it did."""
    seconds = demo.await_work()
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(30) == 0, demo.text
    return seconds


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*arguments, **environment):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Demo(folder, *arguments, **environment))
        return started[-1]

    yield start
    for demo in started:
        demo.end()


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_and_leaves_nothing(start, tmp_path):
    """Also without a Redis: the remote is a directory then, and the interrupted run still writes its result."""
    out = tmp_path / "out.json"
    demo = start("--seconds", "600", "--json", str(out), PATH=str(tmp_path))
    demo.await_work()
    assert "remote (directory)" in demo.text
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(30) == 0, demo.text
    demo.assert_nothing_left()
    assert json.loads(out.read_text())["requests"] > 0


@pytest.mark.slow
def test_sigterm_during_the_start_leaves_nothing(start):
    """Ended before anything works."""
    demo = start("--seconds", "600")
    wait_until(lambda: demo.children() != {}, "the first child runs")
    demo.process.send_signal(signal.SIGTERM)
    assert demo.process.wait(30) == 0, demo.text
    demo.assert_nothing_left()


@pytest.mark.slow
def test_a_child_that_dies_ends_the_demo_with_its_name(start):
    """The demo does not go on as if nothing were, and cleans up all the same."""
    demo = start("--seconds", "600")
    demo.await_work()
    player = next(pid for pid, line in demo.children().items() if '"player-2"' in line)
    os.kill(player, signal.SIGKILL)
    assert demo.process.wait(30) == 1
    assert "player-2 ended by itself with status -9" in demo.text
    demo.assert_nothing_left()


@pytest.mark.slow
def test_a_killed_demo_takes_its_children_along(start):
    """kill -9 leaves the temporary folder, but no process."""
    demo = start("--seconds", "600")
    demo.await_work()
    demo.process.kill()
    demo.process.wait()
    wait_until(lambda: demo.children() == {}, "the children are gone")
