"""A store process as operators run it, and a client beside it."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import httpx
import numpy as np
import yaml

from tiertune_connector.chunk import Bytes
from tiertune_connector.client.store_client import ArrivedPart, StoreClient
from tiertune_connector.keys import Namespace
from tiertune_connector.tiers.segment import PAGE

MIB = 1 << 20
CHUNK_TOKENS = 256
START_S = 60.0
"""Longest wait for anything."""
POLL_S = 0.02
WRITTEN_POLL_S = 0.003
"""Each poll costs the store half a millisecond or so."""
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Store:
    socket: Path
    pid: int
    http: httpx.Client

    def client(self, chunk_bytes: int) -> StoreClient:
        return connected(self.socket, chunk_bytes)

    def total(self, metric: str, **labels: str) -> float:
        """The sum of a counter's or gauge's series with these labels."""
        table = self.http.get("/v1/counters").json()["metrics"].get(metric, {"labels": [], "rows": []})
        told = ((dict(zip(table["labels"], row, strict=False)), row[-1]) for row in table["rows"])
        return float(sum(value for names, value in told if labels.items() <= names.items()))

    def tune(self, *path: str, **fields: Any) -> None:  # noqa: ANN401 (JSON)
        """Change fields of one part of the tuning, such as ``"tiers", "dram"``."""
        told = self.http.get("/v1/tuning")
        document = told.json()
        part = document
        for name in path:
            part = part[name]
        part |= fields
        headers = {"If-Match": told.headers["etag"], "Idempotency-Key": f"{told.headers['etag']} {path} {fields}"}
        self.http.put("/v1/tuning", json=document, headers=headers).raise_for_status()

    def wait_written(self) -> None:
        """Wait until nothing is left to be written to slower tiers."""
        wait_until(lambda: not self.total("write_behind_queued"), "all is written behind", poll_s=WRITTEN_POLL_S)

    def wait_sized(self) -> None:
        """Wait until a client's pool has all the memory that it may have: before, chunks leave for want of it."""
        wait_until(lambda: self._dram("effective") >= self._dram("desired") > 0, "DRAM is taken", poll_s=WRITTEN_POLL_S)

    def _dram(self, state: str) -> float:
        return self.total("tier_capacity_bytes", tier="dram", state=state)

    def faults(self, once: Callable[[int], None], times: int) -> float:
        """Minor faults of an operation, of this process and the store together."""
        before = self._minor()
        for number in range(times):
            once(number)
        return (self._minor() - before) / times

    def _minor(self) -> int:
        theirs = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return getrusage(RUSAGE_SELF).ru_minflt + int(theirs[7])


def connected(path: Path, chunk_bytes: int) -> StoreClient:
    """A connected client, whose namespace has chunks of ``chunk_bytes``."""
    name = Namespace(model=f"bench-{chunk_bytes}", chunk_tokens=CHUNK_TOKENS)
    client = StoreClient(path, name, chunk_bytes=chunk_bytes, chunk_tokens=CHUNK_TOKENS, engine="bench")
    if not client.connect():
        raise RuntimeError(f"no connection to {path}: {client.refusal or 'it does not answer'}")
    return client


@contextmanager
def serving(folder: Path, *, dram: int, **more: Any) -> Iterator[Store]:  # noqa: ANN401 (of a settings file)
    """A store process with ``dram`` bytes of DRAM, and further sections of its settings."""
    address = folder / "state" / "http"
    settings = {
        "name": "bench",
        "socket": str(folder / "s.sock"),
        "state_dir": str(folder / "state"),
        "http": {"port": 0},
        "dram": {"capacity": dram},
        **more,
    }
    (folder / "store.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "tiertune_connector.serve", str(folder / "store.yaml")]
    with (
        running(command, folder / "store.log", address.exists) as process,
        httpx.Client(base_url=address.read_text().strip(), timeout=START_S) as http,
    ):
        yield Store(folder / "s.sock", process.pid, http)


@contextmanager
def running(command: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready; RuntimeError with its log if it does not get so far."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()}")
            time.sleep(POLL_S)
        yield process
    finally:
        process.terminate()
        process.wait(START_S)


@contextmanager
def unwound() -> Iterator[None]:
    """Meanwhile SIGTERM ends this process as Ctrl-C does, and with it what it has started."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_until(done: Callable[[], bool], what: str, *, poll_s: float = POLL_S) -> None:
    """RuntimeError naming ``what`` if it does not come in time."""
    until = time.monotonic() + START_S
    while not done():
        if time.monotonic() > until:
            raise RuntimeError(f"{what}: not within {START_S:g} s")
        time.sleep(poll_s)


def accepts(path: Path) -> bool:
    """Whether somebody listens on that socket."""
    try:
        dial(path).close()
    except OSError:
        return False
    return True


def dial(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


def keys(name: str, count: int) -> list[bytes]:
    return [sha256(f"{name}/{number}".encode()).digest() for number in range(count)]


def touched(nbytes: int) -> Bytes:
    """Memory that begins at a page; numpy's own begins 16 bytes into one, where some processors copy far slower."""
    room = np.ones(nbytes + PAGE, np.uint8)
    return room[-room.ctypes.data % PAGE :][:nbytes]


def rows(count: int, nbytes: int) -> list[Bytes]:
    """Payloads, in one block of touched memory, each beginning at a page, as in an engine's staging."""
    stride = -(-nbytes // PAGE) * PAGE
    block = touched(count * stride).reshape(count, stride)
    block[:] = np.frombuffer(np.random.default_rng(0).bytes(block.shape[1]), np.uint8)
    return [row[:nbytes] for row in block]


def store_chunk(client: StoreClient, key: bytes, data: Bytes) -> None:
    """Reserve, copy, commit; RuntimeError if the chunk was not taken."""
    (slot,) = client.reserve([key]).result().slots
    if slot is None or not client.write(slot, data) or client.commit([slot]).result() != [True]:
        raise RuntimeError("the store did not take a chunk")


def load_chunk(client: StoreClient, key: bytes, out: Bytes | None) -> None:
    """Look up, load, copy and check, release; no ``out``: all but the copy. RuntimeError if the chunk did not come."""
    client.lookup("bench", [key], prompt_tokens=CHUNK_TOKENS).result()

    def copy(parts: Sequence[ArrivedPart]) -> None:
        for part in parts:
            if out is not None:
                client.read_part(part, out)

    loaded = client.load([key], deadline_s=DEADLINE_S, arriving=copy).result()
    if loaded.outcomes != ["hit"] or (out is not None and not client.read(loaded.slots[0], out)):
        raise RuntimeError(f"a chunk did not come: {loaded.outcomes}")
    client.release(loaded)
