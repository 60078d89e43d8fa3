"""LMCache's server in multi-process mode and its own client, as processes that end with this one."""

import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.store.world import START_S, running
from tiertune_agent.demo.ports import free_port

VENV = Path(__file__).parents[2] / ".venv-lmcache"
CHILD = Path(__file__).with_name("lmcache_child.py")
QUIET = ("LMCACHE_TRACK_USAGE=false", "DO_NOT_TRACK=1", "LMCACHE_DISABLE_BANNER=1")
"""Otherwise LMCache reports its usage to its makers."""
HANG_S = 100.0
"""LMCache's client has time limits of its own, but not for all it does."""
SHARED = Path("/dev/shm")
BOUND = ("setpriv", "--pdeathsig", "KILL", "env", *QUIET)
"""Beginning of a command that must end with this process, even if this process is killed."""


@dataclass(frozen=True)
class LMCache:
    http: httpx.Client
    process: "subprocess.Popen[bytes]"
    child: "subprocess.Popen[bytes]"

    def clear(self) -> None:
        """Empty the cache by force: what was looked up and not retrieved stays locked."""
        self.http.post("/cache/clear", json={"force": True}).raise_for_status()

    def ask(self, what: str, prompt: int) -> dict[str, Any]:
        """What the child answers."""
        if self.child.stdin is None:
            raise RuntimeError("LMCache's client has no standard input")
        self.child.stdin.write(json.dumps({"do": what, "prompt": prompt}).encode() + b"\n")
        self.child.stdin.flush()
        return answer(self.child, HANG_S)


@contextmanager
def lmcache(folder: Path, chunks: int, shape: str, *more: str, gib: float) -> Iterator[LMCache]:
    """A server with ``gib`` of DRAM, and a client whose prompts have ``chunks``; their shared memory goes too.

    ``shape`` is that of the client's blocks (``lmcache_child``); ``more`` are options of the server.
    """
    rpc, http, name = free_port(), free_port(), f"tiertune_bench_{os.getpid()}"
    url, log = f"http://127.0.0.1:{http}", folder / "lmcache.log"
    command = [
        *(*BOUND, str(VENV / "bin" / "lmcache"), "server"),
        *("--host", "127.0.0.1", "--port", str(rpc), "--http-port", str(http), "--shm-name", name),
        *("--l1-size-gb", str(gib), "--eviction-policy", "LRU", "--supported-transfer-mode", "auto", *more),
    ]
    started: list[int] = []
    try:
        with (
            httpx.Client(base_url=url, timeout=START_S) as requests,
            running(command, log, lambda: _healthy(requests)) as server,
        ):
            started.append(server.pid)
            with _child(folder / "client.log", f"tcp://127.0.0.1:{rpc}", url, str(chunks), shape) as child:
                started.append(child.pid)
                yield LMCache(requests, server, child)
    finally:
        for pattern in (f"{name}*", *(f"lmcache_kv_{pid}_*" for pid in started)):
            for left in SHARED.glob(pattern):
                left.unlink(missing_ok=True)


@contextmanager
def _child(log: Path, *given: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [*BOUND, str(VENV / "bin" / "python"), str(CHILD), *given]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        try:
            try:
                answer(child, START_S)
            except RuntimeError as error:
                raise RuntimeError(f"{error}:\n{log.read_text()[-3000:]}") from error
            yield child
        finally:
            child.kill()


def answer(child: "subprocess.Popen[bytes]", patience_s: float) -> dict[str, Any]:
    """The next line of a child; RuntimeError if there comes none."""
    if child.stdout is None or not select.select([child.stdout], [], [], patience_s)[0]:
        raise RuntimeError(f"LMCache's client does not answer within {patience_s:g} s")
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"LMCache's client has ended with {child.wait(START_S)}")
    told: dict[str, Any] = json.loads(line)
    return told


def _healthy(http: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return http.get("/healthcheck").is_success
    return False
