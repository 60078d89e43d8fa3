"""A real PostgreSQL for tests, as a child process on a free loopback port; it can be stopped and started again."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from e2e.servers import wait_until
from tiertune_agent.demo.ports import free_port

PROGRAMS = Path("/usr/lib/postgresql")
USER, PASSWORD = "tiertune", "a secret: with/signs@ %2F"
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=32MB", "max_wal_size=4GB")


def program(name: str) -> str:
    """Path of an installed PostgreSQL program; skips the test where there is none."""
    found = sorted(PROGRAMS.glob(f"*/bin/{name}"))
    path = str(found[-1]) if found else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian package postgresql)")
    return path


def _owner() -> list[str]:
    """PostgreSQL does not run as root: a prefix that becomes the package's own user."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]


class Postgres:
    """A server of one user with a password; databases are made and copied by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = {name: program(name) for name in ("initdb", "postgres", "psql")}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        secret = folder / "password"
        secret.write_text(PASSWORD)
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
            shutil.chown(secret, "postgres")
        command = [self._programs["initdb"], "-D", folder / "data", "-U", USER, "--auth=scram-sha-256"]
        command += [f"--pwfile={secret}", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8"]
        done = subprocess.run([*_owner(), *map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.start()

    def url(self, name: str, *, password: str | None = PASSWORD) -> str:
        secret = f":{quote(password, safe='')}" if password else ""
        return f"postgresql://{USER}{secret}@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        command = [self._programs["postgres"], "-D", str(self._folder / "data"), "-p", str(self.port)]
        for setting in (*FAST, "listen_addresses=127.0.0.1", f"unix_socket_directories={self._folder}"):
            command += ["-c", setting]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*_owner(), *command], cwd=self._folder, stdout=log, stderr=log)
        wait_until(self._ready, "PostgreSQL is ready")

    def stop(self, how: int = signal.SIGINT) -> None:
        """SIGINT ends sessions and then the server; SIGQUIT does so at once, as a crash would."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(20)
            self._process = None

    def command(self, sql: str, database: str = "postgres") -> str:
        """What psql prints, unaligned."""
        done = self._psql(sql, database)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
        return self._psql("select 1", "postgres").returncode == 0

    def _psql(self, sql: str, database: str) -> "subprocess.CompletedProcess[str]":
        command = [self._programs["psql"], "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database]
        command += ["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-c", sql]
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    """An empty server; its files are gone afterwards."""
    program("postgres")
    with tempfile.TemporaryDirectory(prefix="tiertune-postgres-") as folder:  # not pytest's: another user works in it
        server = Postgres(Path(folder))
        try:
            yield server
        finally:
            server.stop()
