"""Store processes beside real engines: they can be killed, restarted, retuned, and their way to the remote slowed."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import redis

from e2e.servers import wait_until
from e2e.store_child import Child
from tiertune_agent.demo.throttle import link_rate

MIB = 1 << 20


class Host(Child):
    """A host: a store as ``tiertune store serve`` runs it, its remote behind a link whose speed is set here."""

    def __init__(
        self, folder: Path, name: str, *, remote: str | None, dram: str = "128MiB", disk: bool = False
    ) -> None:
        folder.mkdir()
        self.name, self._link = name, folder / "link"
        self.link = link_rate(self._link)
        """Bytes per second; 0 is no bound."""
        more: dict[str, Any] = {"disk": {"path": str(folder / "disk"), "capacity": 0}} if disk else {}
        if remote:
            more["remote"] = {"url": remote, "timeout": "2s", "probe_every": "500ms"}
        super().__init__(folder, name=name, dram={"capacity": dram, "segment": "16MiB"}, **more)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tiertune_agent.demo.host", str(self.config), str(self._link)]

    def restart(self) -> None:
        """After ``kill``."""
        self.http.close()
        self.start()
        self.__enter__()

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
        wait_until(lambda: self._dram("effective") >= self._dram("desired"), f"{self.name} has its DRAM again")

    def _dram(self, state: str) -> float:
        return self.http.total("tier_capacity_bytes", tier="dram", state=state)


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
