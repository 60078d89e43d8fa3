"""docker-compose.yml under podman, in a network of its own, with stand-ins for images that cannot be pulled.

A stand-in is an empty image under the compose file's name. The host's own programs are mounted into it read-only, so
that commands, users, mounts, secrets, limits and health checks are those of docker-compose.yml, and only the images'
own files and entrypoints are not.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.postgres import PROGRAMS
from e2e.promql import ROOT

NEEDED = ("podman", "runc", "catatonit", "nsenter", "unshare", "ip", "wget")
SERVERS = ("redis-server", "prometheus", "prometheus-alertmanager")
CONTAINERS = """[containers]
default_ulimits=["nofile=1024:4096","nproc=4096:4096"]
[engine]
runtime="runc"
cgroup_manager="cgroupfs"
events_logger="file"
"""
FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "usr", "var")
OWNED = {"var/lib/postgresql/data": 999, "var/lib/tiertune": 10001, "prometheus": 65534, "alertmanager": 65534}
"""Folders that the real images give to the user of their service; volumes take that over."""
POSTGRES = """#!/bin/sh
# What the official image's entrypoint does, as far as docker-compose.yml uses it.
set -e
[ -s "$PGDATA/PG_VERSION" ] || {
  initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS
  echo "create database $POSTGRES_DB" | postgres --single -D "$PGDATA" postgres
}
exec "$@" -D "$PGDATA" -c unix_socket_directories=/var/run/postgresql
"""


def required() -> None:
    """Skips, with the reason, where this machine cannot run containers."""
    missing = [name for name in NEEDED + SERVERS if shutil.which(name) is None]
    if missing or not list(PROGRAMS.glob("*/bin/postgres")):
        pytest.skip(f"not installed: {', '.join(missing) or 'postgres'}")
    if os.geteuid() != 0:
        pytest.skip("the container stand-ins need root")


def _image() -> bytes:
    """A root file system that holds nothing but folders, links into /usr, and the name of PostgreSQL's user."""
    parts = [tarfile.TarInfo(name) for name in FOLDERS]
    for name in ("bin", "lib", "lib64"):
        parts.append(tarfile.TarInfo(name))
        parts[-1].type, parts[-1].linkname = tarfile.SYMTYPE, f"usr/{name}"
    for name, owner in OWNED.items():
        parts.append(tarfile.TarInfo(name))
        parts[-1].uid = parts[-1].gid = owner
    users = b"postgres:x:999:999::/:/bin/sh\n"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for part in parts:
            part.mode = 0o755
            part.type = part.type if part.linkname else tarfile.DIRTYPE
            tar.addfile(part)
        passwd = tarfile.TarInfo("etc/passwd")
        passwd.size = len(users)
        tar.addfile(passwd, io.BytesIO(users))
    return out.getvalue()


def _override(folder: Path) -> dict[str, Any]:
    """What differs from docker-compose.yml: where programs come from, and how the images would have started them."""
    database = max(PROGRAMS.glob("*/bin"))
    entrypoint = folder / "postgres.sh"
    entrypoint.write_text(POSTGRES)
    entrypoint.chmod(0o755)
    bins = Path(sys.prefix) / "bin"
    own = {
        "redis": {},
        "postgres": {"entrypoint": ["/postgres.sh"], "environment": {"PGDATA": "/var/lib/postgresql/data"}},
        "store": {"entrypoint": [str(bins / "tiertune")]},
        "migrate": {"entrypoint": [str(bins / "tiertune")]},
        "agent": {"entrypoint": [str(bins / "tiertune")]},
        "prometheus": {"entrypoint": [shutil.which("prometheus")]},
        "alertmanager": {"entrypoint": [shutil.which("prometheus-alertmanager")]},
    }
    shared = [f"{path}:{path}:ro" for path in ("/usr", sys.base_prefix, sys.prefix, str(ROOT))]
    shared.append(f"{entrypoint}:/postgres.sh:ro")
    path = f"{bins}:{database}:/usr/bin:/usr/sbin"
    for service in own.values():
        service["volumes"] = list(dict.fromkeys(shared))
        service["environment"] = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | service.get("environment", {})
    return {"services": own}


@dataclass(frozen=True)
class Containers:
    """The services that stand-ins can be run for."""

    folder: Path
    services: tuple[str, ...]
    prefix: tuple[str, ...]
    """Of every command: into the network of their own."""
    environment: Mapping[str, str]

    def run(self, *command: str | Path, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self.prefix, *map(str, command)],
            env=dict(self.environment), cwd=self.folder, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def compose(self, *command: str) -> str:
        files = ("-f", "docker-compose.yml", "-f", "override.yml")
        done = self.run(sys.executable, "-m", "podman_compose", "--in-pod", "false", *files, *command, timeout_s=100)
        return done.stdout + done.stderr

    def inspect(self, service: str) -> dict[str, Any]:
        (found,) = json.loads(self.run("podman", "inspect", f"tiertune_{service}_1").stdout)
        return dict(found)

    def healthy(self, service: str) -> bool:
        """Asks as the health check does: its timer needs systemd."""
        return self.run("podman", "healthcheck", "run", f"tiertune_{service}_1").returncode == 0

    def log(self, service: str) -> str:
        done = self.run("podman", "logs", "--tail", "30", f"tiertune_{service}_1")
        return done.stdout + done.stderr

    def get(self, url: str) -> Any:
        """JSON from an address of theirs; None where nobody answers."""
        done = self.run("wget", "-q", "-O-", url)
        return json.loads(done.stdout) if done.returncode == 0 else None


@contextlib.contextmanager
def containers() -> Iterator[Containers]:
    """Ready to be started with ``compose("up", ...)``; all is gone afterwards."""
    required()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiertune-podman-")))
        folder.chmod(0o755)
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(holder.wait)
        assert holder.stdin is not None
        assert holder.stdout is not None
        stack.callback(holder.stdin.close)
        if holder.stdout.readline() != b"up\n":
            pytest.skip("this machine gives no network of one's own")
        override = _override(folder)
        prefix = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
        all_of = Containers(folder, tuple(override["services"]), prefix, _environment(folder))
        _lay_out(folder, override)
        stack.callback(_remove, all_of)
        _load_images(all_of)
        yield all_of


def _environment(folder: Path) -> dict[str, str]:
    (folder / "containers.conf").write_text(f'{CONTAINERS}tmp_dir="{folder}/libpod"\n')
    storage = f'[storage]\ndriver="overlay"\ngraphroot="{folder}/graph"\nrunroot="{folder}/run"\n'
    (folder / "storage.conf").write_text(storage)
    own = {"CONTAINERS_CONF": f"{folder}/containers.conf", "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf"}
    return {**os.environ, **own}


def _lay_out(folder: Path, override: Mapping[str, Any]) -> None:
    for name in ("deploy", "policies", "dashboards"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("secrets", "__pycache__"))
    shutil.copy(ROOT / "docker-compose.yml", folder)
    alertmanager = folder / "deploy/alertmanager.yml"  # Debian's is older than url_file
    alertmanager.write_text(re.sub("url_file: .*", "url: http://127.0.0.1:9/", alertmanager.read_text()))
    (folder / "override.yml").write_text(yaml.safe_dump(dict(override)))
    subprocess.run([folder / "deploy/make-secrets.sh"], check=True, capture_output=True, timeout=10)


def _load_images(of: Containers) -> None:
    (of.folder / "image.tar").write_bytes(_image())
    done = of.run("podman", "import", "-q", "image.tar", "localhost/standin:1")
    if done.returncode != 0:
        pytest.skip(f"podman cannot import an image here: {done.stderr.strip()[-300:]}")
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for image in {services[name]["image"] for name in of.services}:
        of.run("podman", "tag", "localhost/standin:1", image)
    trial = of.run("podman", "run", "--rm", "--network=host", "-v", "/usr:/usr:ro", "localhost/standin:1", "/bin/true")
    if trial.returncode != 0:
        pytest.skip(f"podman cannot run a container here: {trial.stderr.strip()[-300:]}")


def _remove(of: Containers) -> None:
    of.compose("down", "-v", "-t", "1")  # in the order of their needs; "rm -a" alone takes a minute
    of.run("podman", "rm", "-f", "-a", "-t", "0")
    of.run("podman", "volume", "rm", "-f", "-a")
    of.run("podman", "rmi", "-f", "-a")
    of.run("umount", of.folder / "graph" / "overlay")
