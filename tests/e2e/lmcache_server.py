"""An LMCache server in multi-process mode with a folder as its L2, and a client of it; each ends with its test."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.servers import free_port, running, wait_until

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-lmcache"
CHILD = Path(__file__).parent / "lmcache_child.py"
READY_S = 120.0
QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}
"""It reports its usage to its makers otherwise."""

needs_lmcache = pytest.mark.skipif(
    not (VENV / ".tiertune-setup").exists(), reason="no LMCache: make setup-lmcache has not made .venv-lmcache"
)


@dataclass(frozen=True)
class Server:
    url: str
    process: "subprocess.Popen[bytes]"
    l2: Path
    client: "subprocess.Popen[str]"

    @property
    def metrics(self) -> str:
        return f"{self.url}/metrics"

    def store(self, prompts: Sequence[int]) -> list[bool]:
        taken: list[bool] = self._ask(do="store", prompts=list(prompts))["taken"]
        return taken

    def load(self, prompts: Sequence[int]) -> list[int]:
        """Tokens found, by prompt."""
        tokens: list[int] = self._ask(do="load", prompts=list(prompts))["tokens"]
        return tokens

    def clear_l1(self) -> None:
        httpx.post(f"{self.url}/cache/clear", json={}, timeout=30).raise_for_status()

    def metric(self, name: str) -> float:
        """Sum of the samples of this name; 0 where there is none."""
        rows = (line.rpartition(" ") for line in httpx.get(self.metrics, timeout=30).text.splitlines())
        return sum(float(value) for sample, _, value in rows if sample.partition("{")[0] == name)

    def _ask(self, **ask: Any) -> dict[str, Any]:
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        self.client.stdin.write(json.dumps(ask) + "\n")
        self.client.stdin.flush()
        line = self.client.stdout.readline()
        assert line, f"the client ended with {self.client.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def lmcache_server(folder: Path) -> Iterator[Server]:
    """An empty one, with 256 MB of DRAM."""
    rpc, http, l2 = free_port(), free_port(), folder / "l2"
    l2.mkdir()
    command = [
        *(VENV / "bin" / "lmcache", "server", "--host", "127.0.0.1", "--port", str(rpc), "--http-port", str(http)),
        *("--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
        *("--shm-name", f"tiertune_test_{os.getpid()}"),
        *("--l2-adapter", json.dumps({"type": "fs", "base_path": str(l2)})),
    ]
    url, env, log = f"http://127.0.0.1:{http}", os.environ | QUIET, folder / "lmcache.log"
    with running(command, log=log, env=env) as process:
        wait_until(lambda: process.poll() is not None or _healthy(url), "LMCache's server is ready", READY_S)
        assert process.poll() is None, log.read_text()[-3000:]
        with _client(f"tcp://127.0.0.1:{rpc}", url, folder / "client.log") as client:
            yield Server(url, process, l2, client)


@contextmanager
def _client(rpc_url: str, http_url: str, log: Path) -> Iterator["subprocess.Popen[str]"]:
    with log.open("w") as stderr:
        client = subprocess.Popen(
            [str(VENV / "bin" / "python"), str(CHILD), rpc_url, http_url],
            env=os.environ | QUIET, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == '{"ready": true}\n', log.read_text()[-3000:]
        yield client
    finally:
        client.kill()
        client.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthcheck", timeout=2).is_success
    except httpx.TransportError:
        return False
