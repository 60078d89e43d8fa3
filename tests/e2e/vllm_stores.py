"""Store processes beside real engines: they can be killed, restarted, retuned, and their way to the remote slowed."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import redis
import yaml

from connector.stores import Http
from e2e.servers import wait_until
from tiertune_agent.demo.throttle import LinkRate

START_S = 30.0
END_S = 15.0
MIB = 1 << 20


class Host:
    """A host: a store as ``tiertune store serve`` runs it, its remote behind a link whose speed is set here."""

    def __init__(
        self, folder: Path, name: str, *, remote: str | None, dram: str = "128MiB", disk: bool = False
    ) -> None:
        folder.mkdir()
        self.name = name
        self.socket = folder / "s.sock"
        self._link = folder / "link"
        self.link = LinkRate(self._link)
        """Bytes per second; 0 is no bound."""
        self._config, self._log, self._address = folder / "store.yaml", folder / "store.log", folder / "state" / "http"
        config: dict[str, Any] = {
            "name": name, "socket": str(self.socket), "state_dir": str(folder / "state"), "http": {"port": 0},
            "dram": {"capacity": dram, "segment": "16MiB"},
        }  # fmt: skip
        if disk:
            config["disk"] = {"path": str(folder / "disk"), "capacity": 0}
        if remote:
            config["remote"] = {"url": remote, "timeout": "2s", "probe_every": "500ms"}
        self._config.write_text(yaml.safe_dump(config))

    def start(self) -> None:
        """First, or again after ``kill``: with the same state and socket."""
        self._address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tiertune_agent.demo.host", "--config", str(self._config)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--link", str(self._link)], stdout=log, stderr=subprocess.STDOUT)
        wait_until(lambda: self._address.exists() or self.process.poll() is not None, f"{self.name} serves", START_S)
        assert self.process.poll() is None, self._log.read_text()
        self.url = self._address.read_text().strip()
        self.http = Http(self.url)

    def kill(self) -> None:
        """As a crash ends it."""
        self.process.kill()
        self.process.wait()
        self.http.close()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            self.process.wait()
        self.http.close()

    def clients(self) -> set[str]:
        """Those that are connected: an engine may have more than one."""
        return {one["client"] for one in self.http.get("/v1/status")["clients"]}

    def wait_back(self, clients: set[str]) -> None:
        """Until all of them are connected again."""
        wait_until(lambda: self.clients() >= clients, f"the clients of {self.name} are back")

    def hits(self, tier: str, origin: str = "") -> float:
        """Tokens that lookups found in a tier, of one origin or of all."""
        labels = {"origin": origin} if origin else {}
        return self.http.total("tier_lookup_tokens_total", tier=tier, result="hit", **labels)

    def gate(self) -> str:
        """What gates decided and saw so far, for a message."""
        names = ("gate_requests_total", "gate_outcomes_total", "fetch_estimate_bytes_per_second", "tier_errors_total")
        metrics = self.http.get("/v1/counters")["metrics"]
        return "\n".join(f"{name}: {metrics[name]['rows']}" for name in names if name in metrics)

    def resident(self) -> float:
        """Bytes of chunks in DRAM."""
        return self.http.total("tier_resident_bytes", tier="dram")

    def wait_resident(self, nbytes: float) -> None:
        """Until DRAM holds so much, and all of it is written to the remote."""
        wait_until(lambda: self.resident() >= nbytes, f"{self.name} holds {nbytes / MIB:.1f} MiB")
        self.wait_written()

    def wait_written(self) -> None:
        """Until nothing waits to be written to slower tiers."""
        wait_until(lambda: self.http.total("write_behind_queued") == 0, f"{self.name} has written behind")

    def wait_estimate(self, *, at_least: float = 0.0, at_most: float = float("inf")) -> None:
        """Until the probes have measured that the remote is so fast, in bytes per second."""
        seen = [0.0]

        def measured() -> bool:
            seen[0] = self.http.total("fetch_estimate_bytes_per_second", tier="remote")
            return at_least <= seen[0] <= at_most and seen[0] > 0

        wait_until(measured, f"{self.name}'s remote at {at_least:.3g} to {at_most:.3g} B/s")

    def tune(self, **fields: Any) -> None:
        """Change fields of the tuning by their dotted path, dots written ``__``; must be taken."""
        answer = self.http.retune(**fields)
        assert answer.status_code == 200, answer.text

    def flush(self) -> dict[str, int]:
        """Drop all chunks, also of the remote; returns how many by tier."""
        answer = self.http.post("/v1/flush", {})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def forget_dram(self) -> None:
        """Empty DRAM alone: the chunks are left in the remote."""
        capacity = self.http.get("/v1/tuning")["tiers"]["dram"]["capacity_bytes"]
        self.tune(tiers__dram__capacity_bytes=0)
        wait_until(lambda: self.resident() == 0, f"{self.name} has let go of its DRAM")
        self.tune(tiers__dram__capacity_bytes=capacity)


@contextmanager
def host(folder: Path, name: str, *, remote: str | None, **more: Any) -> Iterator[Host]:
    """A running host, ended at the end."""
    each = Host(folder, name, remote=remote, **more)
    each.start()
    try:
        yield each
    finally:
        with suppress(ProcessLookupError):
            each.end()


def damage(url: str, payload_offset: int) -> int:
    """Flip one byte in the payload of every chunk in a Redis; returns how many."""
    with redis.Redis.from_url(url) as client:
        names = [name for name in client.scan_iter(b"tiertune:*", count=1000) if b":writing:" not in name]
        for name in names:
            byte = client.getrange(name, payload_offset, payload_offset)
            client.setrange(name, payload_offset, bytes([byte[0] ^ 0x40]))
    return len(names)


class Every:
    """Calls ``act`` again and again in a thread, ``period_s`` after its last start, until the end of the block."""

    def __init__(self, period_s: float, act: Callable[[int], object]) -> None:
        self.calls = 0
        self.error: BaseException | None = None
        self._period_s = period_s
        self._act = act
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._act(self.calls)
            except BaseException as error:  # noqa: BLE001 (told at the end of the block)
                self.error = error
                return
            self.calls += 1
            self._stop.wait(max(0.0, self._period_s - (time.monotonic() - began)))
