"""Real servers for tests, as child processes on free loopback ports; each ends exactly the process it started.

``with redis_server() as redis: ... redis.url`` and ``with prometheus(config) as prom: ... prom.query("up")``.
A server that is not installed skips the test and says which Debian package has it.
"""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from tiertune_agent.demo.ports import PORTS, free_port
from tiertune_agent.settings import HttpSettings

PACKAGES = {
    "redis-server": "redis-server",
    "redis-sentinel": "redis-sentinel",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
    "chromium": "chromium",
}
"""Program to Debian package."""
READY_S = 60.0
POLL_S = 0.02
HTTP = httpx.Client(trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""For plain HTTP, each time on a new connection: a client of each request would first load authorities, for 20 ms."""


def program(name: str) -> str:
    """Path of an installed program; skips the test where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian package {PACKAGES[name]})")
    return path


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
    """Poll another process until it is ready; TimeoutError naming ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {timeout_s:g} s")
        time.sleep(POLL_S)


def sampled(text: str, name: str, *labels: str) -> float:
    """Sum of the samples of this name in a `/metrics` that have these ``label="value"``; 0 where there is none."""
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return sum(
        float(value)
        for sample, _, value in rows
        if sample.partition("{")[0] == name and all(label in sample for label in labels)
    )


@contextlib.contextmanager
def running(command: Sequence[str | Path], *, log: Path, env: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A child process (``subprocess.Popen``) with its output in ``log``: SIGTERM at the end, SIGKILL 10 s later."""
    with log.open("ab") as out:
        process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_start(process: "subprocess.Popen[bytes]", log: Path, ready: Callable[[], bool]) -> None:
    def ready_or_dead() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}: {log.read_text()[-2000:]}")
        return ready()

    wait_until(ready_or_dead, f"{log.stem} is ready")


@dataclass(frozen=True)
class Redis:
    port: int
    process: "subprocess.Popen[bytes]"
    directory: Path

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


def answers_ping(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


@contextlib.contextmanager
def redis_server(
    *,
    port: int | None = None,
    maxmemory: str = "64mb",
    policy: str = "allkeys-lru",
    options: Sequence[str] = (),
    ready: Callable[[int], bool] = answers_ping,
) -> Iterator[Redis]:
    """An empty Redis without persistence. ``port`` lets a test stop it and start it again in the same place."""
    path, port = program("redis-server"), port or free_port()
    with tempfile.TemporaryDirectory(prefix="tiertune-redis-") as folder:
        command = [path, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        command += ["--dir", folder, "--maxmemory", maxmemory, "--maxmemory-policy", policy, *options]
        log = Path(folder) / "redis.log"
        with running(command, log=log) as process:
            await_start(process, log, lambda: ready(port))
            yield Redis(port, process, Path(folder))


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports that were free a moment ago."""
    while True:
        first = random.choice(PORTS)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@dataclass(frozen=True)
class Prometheus:
    url: str
    process: "subprocess.Popen[bytes]"
    directory: Path

    def get(self, path: str, **parameters: Any) -> Any:
        """``data`` of an API answer; AssertionError with Prometheus's own message where it refuses."""
        answer = HTTP.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", f"{path} {parameters}: {answer.get('error')}"
        return answer["data"]

    def query(self, expression: str, **parameters: Any) -> list[dict[str, Any]]:
        """Instant vector: ``[{"metric": labels, "value": [time, text]}]``."""
        result: list[dict[str, Any]] = self.get("query", query=expression, **parameters)["result"]
        return result

    def query_range(self, expression: str, *, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Matrix: ``[{"metric": labels, "values": [[time, text], ...]}]``; times in Unix seconds."""
        data = self.get("query_range", query=expression, start=start, end=end, step=step_s)
        result: list[dict[str, Any]] = data["result"]
        return result

    def targets_up(self) -> bool:
        targets = self.get("targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def wait_targets_up(self) -> None:
        """Wait for the first good scrape of every target: about 6 s after the start (discovery is throttled)."""
        wait_until(self.targets_up, "every target of Prometheus is up")

    def wait_alertmanagers(self) -> None:
        """Wait until Prometheus has found where to send alerts: those that fire before go nowhere."""
        wait_until(lambda: bool(self.get("alertmanagers")["activeAlertmanagers"]), "Prometheus has an Alertmanager")


def _http_ok(url: str) -> bool:
    try:
        return HTTP.get(url, timeout=1).is_success
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def _monitor(name: str, config: Mapping[str, Any], *options: str) -> Iterator[tuple[str, Any, Path]]:
    """One of Prometheus's programs, ready to answer: its address, its process, its folder, ``{}`` in options."""
    path, port = program(name), free_port()
    with tempfile.TemporaryDirectory(prefix=f"tiertune-{name}-") as folder:
        file, log = Path(folder) / "config.yml", Path(folder) / f"{name}.log"
        file.write_text(yaml.safe_dump(dict(config)))
        command = [path, f"--config.file={file}", "--log.level=warn", f"--web.listen-address=127.0.0.1:{port}"]
        with running([*command, *(option.format(folder) for option in options)], log=log) as process:
            url = f"http://127.0.0.1:{port}"
            await_start(process, log, lambda: _http_ok(f"{url}/-/ready"))
            yield url, process, Path(folder)


@contextlib.contextmanager
def prometheus(config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """Prometheus on ``config`` (the mapping of a prometheus.yml); ready to answer, targets perhaps not yet scraped."""
    options = "--storage.tsdb.path={}/tsdb", "--rules.alert.resend-delay=1s"
    with _monitor("prometheus", config, *options) as (url, process, folder):
        yield Prometheus(url, process, folder)


@dataclass(frozen=True)
class Alertmanager:
    url: str
    process: "subprocess.Popen[bytes]"

    def alerts(self) -> list[dict[str, Any]]:
        """What it knows of: ``[{"labels", "annotations", "status": {"state", "inhibitedBy"}, ...}]``."""
        found: list[dict[str, Any]] = HTTP.get(f"{self.url}/api/v2/alerts", timeout=30).raise_for_status().json()
        return found


@contextlib.contextmanager
def alertmanager(config: Mapping[str, Any]) -> Iterator[Alertmanager]:
    """Alertmanager on ``config`` (the mapping of an alertmanager.yml), alone."""
    options = "--storage.path={}/data", "--cluster.listen-address="
    with _monitor("prometheus-alertmanager", config, *options) as (url, process, _):
        yield Alertmanager(url, process)


class Quiet(BaseHTTPRequestHandler):
    """Says nothing of what it answers."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
        pass


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """A server on loopback; where is its ``server_port``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def app_served(app: Any) -> Iterator[str]:
    """An agent's application on a port of its own; yields its address."""
    listener = HttpSettings(port=0).listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started, "the agent serves")
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@dataclass(frozen=True)
class Webhook:
    """A receiver of alerts."""

    url: str
    alerts: list[dict[str, Any]]
    """Every alert of every message, in the order in which they came: ``status``, ``labels``, ``annotations``."""

    def told(self, name: str, status: str) -> list[dict[str, Any]]:
        return [alert for alert in self.alerts if alert["labels"]["alertname"] == name and alert["status"] == status]


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    """Listens on loopback, and keeps what Alertmanager sends."""
    alerts: list[dict[str, Any]] = []

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            alerts.extend(body["alerts"])
            self.send_response(200)
            self.end_headers()

    with serving(Handler) as server:
        yield Webhook(f"http://127.0.0.1:{server.server_port}/", alerts)


@contextlib.contextmanager
def exporter(scrape: Callable[[], bytes]) -> Iterator[str]:
    """Serves what ``scrape`` gives, asked anew each time, at ``/metrics`` alone; yields host and port."""

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(scrape() if found else b"")

    with serving(Handler) as server:
        yield f"127.0.0.1:{server.server_port}"
