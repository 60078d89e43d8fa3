"""The demo's processes and the folder with all their files; both are gone afterwards."""

import ctypes
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import msgspec

from tiertune_agent.demo.player import REQUESTS, Job, Tally, save_requests
from tiertune_agent.demo.ports import free_port
from tiertune_agent.demo.throttle import link_rate
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.network import http_client
from tiertune_agent.replay.traces import Trace
from tiertune_connector.ending import Ending

HOSTS = ("host-a", "host-b")
READY_S = 60.0
LOOK_S = 0.1
END_S = 8.0
_PACKAGED_POLICY = Path(__file__).with_name("policy.yaml")
_REPOSITORY_POLICY = Path(__file__).parents[3] / "policies" / "demo.yaml"
_COMMAND_LINE = "from tiertune_agent.cli import main; main()"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class EndedError(Exception):
    """The user ended the demo."""


@dataclass(frozen=True)
class Child:
    name: str
    process: "subprocess.Popen[bytes]"
    log: Path


@dataclass(frozen=True)
class Setup:
    """What a world is made of; the defaults are the demo's."""

    players: int = 4
    window_s: float = 2
    chunk_bytes: int = 64 << 10
    dram_bytes: int = 10 << 20
    """Per host: small, so that chunks leave and come back through the remote."""
    remote_bytes: int = 320 << 20
    """For the whole fleet."""
    requests_per_s: float = 20.0
    prefill_step_s: float = 0.01
    prefill_chunk_s: float = 0.005
    """Seconds to recompute a chunk; fetching one takes about 1 ms, and 21 ms over the slowed link."""
    policy: str = ""
    """YAML; empty: the demo's."""
    settings: Mapping[str, Json] = field(default_factory=dict)
    """By host, settings that extend or replace the demo's."""
    agent: Sequence[str] = ("-c", _COMMAND_LINE)
    """Python's arguments that run ``tiertune``."""


DEMO = Setup()


class World:
    """A demo's processes: ``stop`` ends exactly those that were started here."""

    def __init__(self, folder: Path, ended: Ending, port: int, setup: Setup) -> None:
        """``ended`` is set when the user ends the demo; ``port`` is the page's."""
        self.folder = folder
        self.setup = setup
        self.page = f"http://127.0.0.1:{port}/"
        self.stores: dict[str, str] = {}
        """HTTP address by host."""
        self.remote = "Redis" if shutil.which("redis-server") else "directory"
        self._links = {host: link_rate(folder / f"{host}.link") for host in HOSTS}
        self.tallies = [Tally(folder / f"player-{index}.tally") for index in range(setup.players)]
        self._ended = ended
        self._port = port
        self._redis = ""
        self.children: list[Child] = []
        """The processes, in the order in which they were started."""

    def serve(self, trace: Trace) -> None:
        """Start all but the players, and wait until they work. DemoError and EndedError as of ``until``."""
        save_requests(trace, self.folder / REQUESTS)
        remote = self._start_remote()
        for host in HOSTS:
            self._start_host(host, remote)
        for host in HOSTS:
            self.until(self._address(host).is_file, f"{host} serves")
            self.stores[host] = self._address(host).read_text().strip()
        self.start_agent()

    def play(self, trace: Trace) -> None:
        """Start the players; returns when all have served. DemoError and EndedError as of ``until``."""
        for index in range(self.setup.players):
            self._start_player(index, trace)
        self.until(lambda: all(tally.read()["requests"] for tally in self.tallies), "every player works")

    def check(self) -> None:
        """DemoError, with the last lines of its log, if one of the processes has ended."""
        for child in self.children:
            if child.process.poll() is not None:
                told = "\n".join(child.log.read_text(errors="replace").splitlines()[-15:])
                raise DemoError(f"{child.name} ended by itself with status {child.process.returncode}:\n{told}")

    def until(self, holds: Callable[[], object], what: str, within_s: float = READY_S) -> float:
        """Wait until it holds; returns the seconds. EndedError if the user ends it meanwhile.

        DemoError if it does not hold in time, or when a process has ended.
        """
        started = time.monotonic()
        while not holds():
            self.check()
            if self._ended.wait(LOOK_S):
                raise EndedError
            if time.monotonic() - started > within_s:
                raise DemoError(f"{what}: not within {within_s:g} s; logs were in {self.folder}")
        return time.monotonic() - started

    def limit(self, bytes_per_s: float, *hosts: str) -> None:
        """Limit the own link to the remote of each of these hosts, or of all if none is named. 0: no limit."""
        for host in hosts or HOSTS:
            self._links[host][0] = bytes_per_s

    def stop(self, prefix: str = "") -> None:
        """End the children whose names start with ``prefix``, latest first, and wait until they are gone."""
        leaving = [child for child in reversed(self.children) if child.name.startswith(prefix)]
        for stage in ("player", "agent", "host", "remote"):  # those that use others first
            _end([child for child in leaving if child.name.startswith(stage)])
        self.children = [child for child in self.children if child not in leaving]

    def start_agent(self) -> None:
        """Start the agent, on its history if it has one; returns when it answers."""
        policy = _PACKAGED_POLICY if _PACKAGED_POLICY.is_file() else _REPOSITORY_POLICY
        if self.setup.policy:
            policy = self.folder / "policy.yaml"
            policy.write_text(self.setup.policy)
        config = {
            "http": {"port": self._port},
            "database": "sqlite:///history.sqlite",
            "stores": [{"name": host, "url": url} for host, url in self.stores.items()],
            "policy": str(policy),
            "window": self.setup.window_s,
            **({"remote": {"url": self._redis}} if self._redis else {}),
        }
        self._write("agent.yaml", config)
        self._spawn("agent", [sys.executable, *self.setup.agent, "agent", "run", "--config", "agent.yaml"])
        with http_client(base_url=self.page, timeout=2) as http:
            self.until(lambda: _healthy(http), "the agent answers")

    def counted(self) -> dict[str, int]:
        """The players' tallies, summed."""
        counts = [tally.read() for tally in self.tallies]
        return {field: sum(count[field] for count in counts) for field in Tally.FIELDS}

    def _start_remote(self) -> JsonDict:
        """Start the remote; returns the hosts' settings of it."""
        if self.remote == "directory":
            (self.folder / "remote").mkdir()
            return {"url": f"file://{self.folder}/remote", "capacity": self.setup.remote_bytes // len(HOSTS)}
        port = free_port()
        kept = ("--save", "", "--appendonly", "no")
        room = ("--maxmemory", str(self.setup.remote_bytes), "--maxmemory-policy", "allkeys-lru")
        self._spawn("remote", ["redis-server", "--bind", "127.0.0.1", "--port", str(port), *kept, *room])
        self.until(lambda: _listens(port), "redis-server listens")
        self._redis = f"redis://127.0.0.1:{port}/0"
        return {"url": self._redis}

    def _start_host(self, host: str, remote: JsonDict) -> None:
        # Paths relative to the folder: a unix socket's path is bounded, and temporary folders may lie deep.
        config = {
            "name": host,
            "socket": f"{host}.sock",
            "state_dir": f"{host}.state",
            "http": {"port": 0},
            "dram": {"capacity": self.setup.dram_bytes, "segment": 2 << 20},
            "remote": {**remote, "timeout": 1.0, "probe_every": self.setup.window_s / 2},
            **self.setup.settings.get(host, {}),
        }
        self._write(f"{host}.yaml", config)
        self._spawn(host, [sys.executable, "-m", "tiertune_agent.demo.host", f"{host}.yaml", f"{host}.link"])

    def _start_player(self, index: int, trace: Trace) -> None:
        name = f"player-{index}"
        job = Job(
            name=name,
            index=index,
            players=self.setup.players,
            socket=f"{HOSTS[index % len(HOSTS)]}.sock",
            chunk_tokens=trace.block_tokens,
            chunk_bytes=self.setup.chunk_bytes,
            requests_per_s=self.setup.requests_per_s,
            prefill_step_s=self.setup.prefill_step_s,
            prefill_token_s=self.setup.prefill_chunk_s / trace.block_tokens,
        )
        self._spawn(name, [sys.executable, "-m", "tiertune_agent.demo.player", msgspec.json.encode(job).decode()])

    def _address(self, host: str) -> Path:
        return self.folder / f"{host}.state" / "http"

    def _write(self, name: str, document: JsonDict) -> None:
        (self.folder / name).write_text(json.dumps(document, indent=1))  # JSON is YAML

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 (our own programs)
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the demo alone, which ends its children in order
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (no other thread runs yet; one call into libc)
            )
        self.children.append(Child(name, process, log))


@contextmanager
def world(ended: Ending, port: int, setup: Setup = DEMO) -> Iterator[World]:
    """A world in a new temporary folder; both are gone afterwards."""
    with TemporaryDirectory(prefix="tiertune-demo-") as folder:
        made = World(Path(folder), ended, port, setup)
        try:
            yield made
        finally:
            made.stop()


def _die_with_parent() -> None:
    """In a new child: have the kernel kill it if the demo is killed and cannot end it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(children: Sequence[Child]) -> None:
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + END_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _healthy(http: httpx.Client) -> bool:
    try:
        return http.get("healthz").is_success
    except httpx.HTTPError:
        return False
