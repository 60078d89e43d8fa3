"""A store as its own process, and what tests do to it: kill it, stop it, put faults between it and its machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from connector.stores import PATIENCE_S, STRIDE, Engine, Http, eventually

MAIN = "from tiertune_agent.cli import main; main()"


class Child:
    """A store as its own process."""

    def __init__(self, home: Path, *, first: str = "", **more: Any) -> None:
        """``first`` is Python that runs in it before the store: limits and faults of its machine."""
        self.home = home
        self.socket = home / "s.sock"
        self.config, self.log, self._address = home / "store.yaml", home / "log", home / "state" / "http"
        self._first = first
        config = {
            "name": "host-a",
            "socket": str(self.socket),
            "state_dir": str(home / "state"),
            "http": {"port": 0},
            "dram": {"capacity": 64 * STRIDE, "segment": 16 * STRIDE},
        }
        self.config.write_text(json.dumps(config | more))
        self.start()

    def command(self) -> list[str]:
        python = [sys.executable, "-X", "faulthandler", "-c", f"{self._first}\n{MAIN}"]
        return [*python, "store", "serve", "--config", str(self.config)]

    def start(self) -> None:
        """First, or again after ``kill``: with the same state and socket."""
        self._address.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log)

    def __enter__(self) -> Self:
        eventually(lambda: self.process.poll() is not None or self.serves(), 30)
        assert self.process.poll() is None, self.log.read_text()
        self.url = self._address.read_text().strip()
        self.http = Http(self.url)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # it writes where each of its threads stands
            self.process.wait(5)
            raise AssertionError(f"the store has not ended:\n{self.log.read_text()}") from None
        finally:
            self.process.kill()
            self.process.wait()

    def serves(self) -> bool:
        return self._address.exists()

    def kill(self) -> None:
        """As a crash ends it."""
        self.process.kill()
        self.process.wait()

    def told(self, tier: str) -> tuple[str, str]:
        """Health of a tier, and its reason."""
        told = self.http.get("/v1/status")["tiers"][tier]
        return told["health"], told["reason"]

    def health(self, tier: str) -> str:
        return self.told(tier)[0]

    def await_health(self, tier: str, state: str, timeout_s: float = PATIENCE_S) -> None:
        eventually(lambda: self.health(tier) == state, timeout_s)

    def has_memory(self) -> bool:
        """All of the DRAM that it is to have."""
        (pool,) = self.http.get("/v1/status")["pools"].values()
        return pool["dram"]["effective"]["capacity_bytes"] == pool["dram"]["applied"]["capacity_bytes"]

    def idle(self, tier: str) -> bool:
        """Nothing waits to be written to a tier."""
        return self.http.total("write_behind_queued", tier=tier) == 0

    def empty(self) -> None:
        """Evict all of DRAM, and have it all again."""
        before = self.http.get("/v1/tuning")["tiers"]["dram"]["capacity_bytes"]
        self.http.retune(tiers__dram__capacity_bytes=0)
        self.http.retune(tiers__dram__capacity_bytes=before)
        eventually(self.has_memory)

    def leave_in_remote(self, engine: Engine, keys: Sequence[bytes]) -> None:
        """Out of DRAM; what a busy machine did not write or find in time is tried again."""
        eventually(self.has_memory)

        def left() -> bool:
            for start in range(0, len(keys), 8):  # what waits to be written is bounded
                engine.put(keys[start : start + 8])
                engine.find(keys[: start + 8])
                eventually(lambda: self.idle("remote"))
            self.empty()
            return engine.find(keys) == ["remote"] * len(keys)

        eventually(left)

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


def resident_bytes(pid: int) -> int:
    """Memory of its own, without what it shares: segments are told by their capacity."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has gone")


def limited(what: str, number: int) -> str:
    """Code that bounds a resource of its process."""
    return f"import resource; resource.setrlimit(resource.{what}, ({number}, {number}))"


def refused(home: Path, **more: Any) -> str:
    """What a store says that ends with status 2."""
    child = Child(home, **more)
    eventually(lambda: child.process.poll() is not None or child.serves(), 30)
    status = child.process.poll()
    child.kill()
    assert status == 2, child.log.read_text()
    return child.log.read_text()


def mapped(process: int | str = "self") -> int:
    """Files of a store's memory that a process maps: segments, and an index for each namespace."""
    return Path(f"/proc/{process}/maps").read_text().count("memfd:tiertune")


@contextmanager
def victim(store: Child, code: str) -> Iterator["subprocess.Popen[bytes]"]:
    """An engine as its own process, which has said that it holds what ``code`` lets it take; killed in the end."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code, str(store.socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"holds\n"
            yield process
        finally:
            process.kill()


@contextmanager
def stopped(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """A process that hangs."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
