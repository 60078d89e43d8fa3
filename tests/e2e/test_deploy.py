"""The files of deploy/ and the commands of docker-compose.yml start the real programs without containers."""

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
import yaml

from e2e.postgres import PASSWORD, Postgres, postgres_server
from e2e.promql import ROOT
from e2e.servers import HTTP, Prometheus, program, running, wait_until
from tiertune_agent.demo.ports import free_port

pytestmark = [pytest.mark.real, pytest.mark.slow]

SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
QUICK = {"15s": "1s"}
"""Of the agent's windows and Prometheus's scrapes."""
PORTS = ("7410", "7420", "9090")
SEEN = {"tiertune-store", "tiertune-agent", "prometheus"}
"""Jobs of Prometheus whose targets run here."""


@dataclass(frozen=True)
class Here:
    """The same files and commands, elsewhere: ports, folders and windows replaced, and nothing else."""

    folder: Path
    words: dict[str, str]

    def of(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, self.words)), lambda word: self.words[word[0]], text)

    def command(self, service: str) -> list[str]:
        return [self.of(part) for part in SERVICES[service]["command"]]

    def running(self, service: str, entrypoint: str | Path) -> contextlib.AbstractContextManager[object]:
        return running([entrypoint, *self.command(service)], log=self.folder / f"{service}.log")


def elsewhere(folder: Path, database: Postgres) -> Here:
    """Copies deploy/ with every word replaced; rules and policies stay beside it."""
    words = {port: str(free_port()) for port in PORTS} | {"5432": str(database.port)} | QUICK
    words |= {"/etc/tiertune": str(folder), "/var/lib/tiertune": f"{folder}/state", "/run/secrets": f"{folder}/secrets"}
    words |= {"/run/tiertune": str(folder), "=/prometheus": f"={folder}/prometheus"}
    here = Here(folder, words)
    for name in ("deploy", "secrets"):
        (folder / name).mkdir()
    for name in ("policies", "dashboards"):
        (folder / name).symlink_to(ROOT / name)
    for path in (ROOT / "deploy").glob("*.*"):
        (folder / "deploy" / path.name).write_text(here.of(path.read_text()))
    (folder / "secrets" / "postgres_password").write_text(PASSWORD)
    return here


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    tiertune = Path(sys.executable).with_name("tiertune")
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(postgres_server())
        database.command("create database tiertune")
        here = elsewhere(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiertune-"))), database)
        program("redis-server")
        stack.enter_context(here.running("redis", "env"))
        stack.enter_context(here.running("store", tiertune))
        subprocess.run([tiertune, *here.command("migrate")], check=True, capture_output=True, timeout=60)
        stack.enter_context(here.running("agent", tiertune))
        stack.enter_context(here.running("prometheus", program("prometheus")))
        yield here


@pytest.fixture(scope="module")
def seen(here) -> Prometheus:
    prometheus = Prometheus(f"http://127.0.0.1:{here.words['9090']}", None, here.folder)

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return HTTP.get(f"{prometheus.url}/-/ready").is_success
        return False

    wait_until(answers, "Prometheus answers")
    return prometheus


def test_prometheus_sees_store_and_agent(here, seen):
    """Started in no particular order, every target that runs is up; the others are down, and known."""

    def health() -> dict[str, set[str]]:
        states: dict[str, set[str]] = {}
        for target in seen.get("targets")["activeTargets"]:
            states.setdefault(target["labels"]["job"], set()).add(target["health"])
        return states

    wait_until(lambda: all(health().get(job) == {"up"} for job in SEEN), "Prometheus sees them")
    jobs = {job["job_name"] for job in yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"]}
    assert set(health()) == jobs


def test_the_agent_keeps_its_history_in_postgresql(here, seen):
    """It leads, its rounds succeed, and the store that it is told of answers under its own name."""
    wait_until(
        lambda: bool(seen.query('tiertune_agent_last_success_timestamp_seconds{exported_job="loop"} > 0')),
        "a round",
    )
    assert seen.query("tiertune_agent_leader == 1")
    assert not seen.query('tiertune_agent_incidents{kind="store_unreachable"} > 0')


def test_the_store_reaches_redis(here, seen):
    """The remote tier of deploy/store.yaml is the Redis of deploy/redis.conf, with its limits."""
    ok = 'tiertune_tier_health{store="host-a", tier="remote", state="ok"} == 1'
    wait_until(lambda: bool(seen.query(ok)), "the remote is well")
    with contextlib.closing(redis.Redis(unix_socket_path=str(here.folder / "redis.sock"))) as remote:
        limits = remote.config_get("maxmemory", "maxmemory-policy")
    assert limits == {"maxmemory": str(4 << 30), "maxmemory-policy": "allkeys-lru"}


def test_the_collector_accepts_its_configuration():
    """The OpenTelemetry collector builds every part that deploy/otel-collector.yaml names."""
    path = shutil.which("otelcol-contrib")
    if path is None:
        pytest.skip("otelcol-contrib is not installed (no Debian package has it)")
    command = [path, "validate", f"--config={ROOT / 'deploy/otel-collector.yaml'}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
