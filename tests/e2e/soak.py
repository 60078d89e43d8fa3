"""A store process with every tier, engines in processes of their own, and somebody who spoils things by a seed.

Engines compare every byte that they read with what was written for its key. In the first part stores are killed, too;
the rest is one process, whose memory, descriptors and threads must be the same at its end as after a while.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.stores import NAMESPACE, STRIDE, Engine, chain, eventually
from e2e.servers import redis_server
from e2e.store_child import Child, resident_bytes
from tiertune_agent.demo.ports import free_port
from tiertune_connector.eviction import ALGORITHMS

ENGINES, THREADS = 2, 2
"""Client processes, and engines in each."""
ROUGH, WARM = 0.25, 0.25
"""Shares of the time in which stores are killed, too, and in which the last of them comes to its usual size."""
CHAINS, CHUNKS = 90, 6
DRAM, DISK = 64 * STRIDE, 256 * STRIDE
REMOTE = "6mb"
TENANTS = (b"", b"a" * 16, b"b" * 16)
EVERY_PIECE = "from tiertune_connector.store import loads; loads.STEP_BYTES = 1"
"""Chunks here are small: clients hear of each that has come before its load is answered, and copy it at once."""
PAUSE_S = 0.4
"""Mean, between two faults."""
SAMPLES = 21


@dataclass(frozen=True)
class Held:
    """What a process holds: medians of a few looks, while it works."""

    resident_bytes: float
    descriptors: float
    threads: float


# -- an engine's process


def client() -> None:
    """``socket seed``: reads and writes until its input ends, then tells what it read. Any wrong byte ends it."""
    path, seed = Path(sys.argv[1]), int(sys.argv[2])
    stop, seen = threading.Event(), Counter[str]()
    threads = [
        threading.Thread(target=_guarded, args=(path, f"{seed}-{number}", stop, seen)) for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(seen))


def _guarded(path: Path, name: str, stop: threading.Event, seen: Counter[str]) -> None:
    try:
        with Engine(path, name=name) as engine:
            _play(engine, random.Random(name), stop, seen)
    except BaseException:  # noqa: BLE001 (any is the finding)
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _play(engine: Engine, rng: random.Random, stop: threading.Event, seen: Counter[str]) -> None:
    while not stop.is_set():
        number = int(rng.paretovariate(0.4)) % CHAINS  # few are asked for often, all now and then
        tenant = TENANTS[number % len(TENANTS)]
        keys = chain(f"{tenant!r}/{number}", CHUNKS)
        found = engine.find(keys, f"r{number}")
        loaded = engine.load(keys[: len(found)], deadline_s=rng.choice((0.02, 0.3, 1.0)))
        seen["chunks"] += (have := engine.read(loaded))
        seen["requests"] += 1
        seen["late"] += loaded.outcomes.count("late")
        seen["parts"], engine.parts = seen["parts"] + engine.parts, 0
        if rng.random() > 0.02:  # else its lease has to end it
            engine.client.release(loaded)
        if rng.random() < 0.05:
            slots = engine.client.reserve(keys[have:], tenant=tenant).result(10).slots
            engine.client.abort([slot for slot in slots if slot is not None])
        else:
            engine.put(keys[have:], f"r{number}", tenant)
        if not engine.client.connected:
            stop.wait(0.02)  # it computes itself


# -- who spoils things


class Soak:
    """One run in a folder, from its start to ``close``."""

    def __init__(self, home: Path, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self._home = home
        self._rng = random.Random(seed)
        self._undo = ExitStack()
        self._port = free_port()
        self._servers = self._undo.enter_context(ExitStack())
        self._redis = self._servers.enter_context(redis_server(port=self._port, maxmemory=REMOTE))
        self._stores = self._undo.enter_context(ExitStack())
        self._start_store()
        self._clients: list[subprocess.Popen[str]] = []
        self._undo.callback(self._kill_clients)
        for _ in range(ENGINES):
            self._start_client()

    def run(self, seconds: float) -> dict[str, Any]:
        """Figures of a whole run; AssertionError for a wrong byte or a store that does not go on."""
        started = time.monotonic()
        calm = [self._resize, self._switch, self._flush, self._toggle, self._policies, self._bypass]
        rough = [self._kill_redis, self._stop_redis, self._stop_store, self._kill_client]
        self._spoil(started + ROUGH * seconds, [self._kill_store, *calm, *rough])
        self._spoil(started + (ROUGH + WARM) * seconds, [*calm, *rough])
        before = self._held()
        self._spoil(started + seconds, [*calm, *rough])
        after = self._held()
        self._end()
        return {
            "seconds": time.monotonic() - started,
            "faults": dict(self.done),
            "engines": dict(self.seen),
            "before": {name: vars(held) for name, held in before.items()},
            "after": {name: vars(held) for name, held in after.items()},
        }

    def close(self) -> None:
        self._undo.close()

    def _spoil(self, until: float, faults: list[Any]) -> None:
        """Every fault once, then once more in another order, until the time is over."""
        pause, left = threading.Event(), list(faults)
        while time.monotonic() < until:
            if not left:
                left = self._rng.sample(faults, len(faults))
            fault = left.pop(0)
            fault()
            self.done[fault.__name__.strip("_")] += 1
            pause.wait(self._rng.expovariate(1 / PAUSE_S))
            for process in self._clients:
                assert process.poll() is None, (self._home / "clients").read_text()[-3000:]
            assert self._store.process.poll() is None, self._store.log.read_text()[-3000:]

    def _held(self) -> dict[str, Held]:
        """With the same tuning and all well, so that two of these can be compared."""
        self._retune(dram__capacity_bytes=DRAM, disk__capacity_bytes=DISK, remote__fetch="on", remote__write="commit")
        eventually(lambda: self._store.health("remote") == "ok", 20)
        eventually(self._store.has_memory, 20)
        eventually(lambda: len(self._store.http.get("/v1/status")["clients"]) == ENGINES * THREADS, 20)
        pids = {"store": self._store.process.pid, "engine": self._clients[0].pid}
        looks: dict[str, list[Held]] = {name: [] for name in pids}
        pause = threading.Event()
        for _ in range(SAMPLES):
            for name, pid in pids.items():
                looks[name].append(_look(pid))
            pause.wait(0.1)
        return {
            name: Held(
                *(statistics.median(getattr(look, field) for look in each) for field in Held.__dataclass_fields__)
            )
            for name, each in looks.items()
        }

    def _end(self) -> None:
        """Engines end by themselves, the store is idle then, and stops as it should."""
        for process in self._clients:
            told, _ = process.communicate(timeout=60)
            assert process.returncode == 0, (self._home / "clients").read_text()[-3000:]
            self.seen.update(json.loads(told))
        store = self._store
        eventually(lambda: store.http.total("tier_pinned_bytes") == 0, 20)
        eventually(lambda: store.http.total("quarantined_slots") == 0, 20)
        assert store.http.total("internal_errors_total") == 0
        assert store.http.get("/v1/status")["clients"] == []
        store.process.terminate()
        assert store.process.wait(20) == 0
        assert "Traceback" not in store.log.read_text()
        assert not store.socket.exists()

    # -- faults

    def _resize(self) -> None:
        self._retune(
            dram__capacity_bytes=self._rng.randrange(DRAM // STRIDE + 1) * STRIDE,
            disk__capacity_bytes=self._rng.randrange(DISK // STRIDE + 1) * STRIDE,
        )

    def _switch(self) -> None:
        self._store.http.retune(self._key(), defaults__eviction=self._rng.choice(list(ALGORITHMS)))

    def _flush(self) -> None:
        tenant = self._rng.choice(TENANTS)
        body = {"namespace": NAMESPACE.digest} | ({"tenant": tenant.hex()} if tenant else {})
        assert self._store.http.post("/v1/flush", body).status_code in (200, 503)  # of a remote that is away

    def _toggle(self) -> None:
        self._retune(remote__fetch=self._rng.choice(("on", "off")))

    def _policies(self) -> None:
        self._retune(
            disk__write=self._rng.choice(("off", "commit", "evict")),
            remote__write=self._rng.choice(("off", "commit", "evict")),
        )

    def _bypass(self) -> None:
        for on in (True, False):
            assert self._store.http.post("/v1/bypass", {"on": on}).status_code == 200

    def _kill_redis(self) -> None:
        self._redis.process.kill()
        self._redis.process.wait()
        self._servers.close()
        self._redis = self._servers.enter_context(redis_server(port=self._port, maxmemory=REMOTE))

    def _stop_redis(self) -> None:
        self._hang(self._redis.process)

    def _stop_store(self) -> None:
        self._hang(self._store.process)

    def _kill_store(self) -> None:
        self._store.kill()
        self._stores.close()
        self._start_store()

    def _kill_client(self) -> None:
        """Not the first, which is measured."""
        process = self._clients.pop()
        process.kill()
        process.communicate()
        self._start_client()

    def _hang(self, process: "subprocess.Popen[Any]") -> None:
        process.send_signal(signal.SIGSTOP)
        threading.Event().wait(self._rng.uniform(0.1, 1.5))
        process.send_signal(signal.SIGCONT)

    # -- parts

    def _start_store(self) -> None:
        disk = {"path": str(self._home / "disk"), "capacity": DISK}
        remote = {"url": f"redis://127.0.0.1:{self._port}/0", "timeout": 0.3, "probe_every": 0.5}
        dram = {"capacity": DRAM, "segment": 16 * STRIDE}
        child = Child(self._home, first=EVERY_PIECE, disk=disk, remote=remote, lease=2.0, dram=dram)
        self._store = self._stores.enter_context(child)
        few = {"seed": 1, "rate": 0.001, "hot": [], "version": 1}  # else samples fill their ring for minutes
        assert self._store.http.raw("PUT", "/v1/sampling", json.dumps(few).encode()).status_code == 200

    def _start_client(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", "from e2e.soak import client; client()", str(self._home / "s.sock")]
        command.append(str(self._rng.randrange(1 << 30)))
        pipe = subprocess.PIPE
        with (self._home / "clients").open("a") as log:
            started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment, text=True)
        self._clients.append(started)

    def _kill_clients(self) -> None:
        for process in self._clients:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def _retune(self, **fields: Any) -> None:
        changed = {f"tiers__{name}": value for name, value in fields.items()}
        answer = self._store.http.retune(self._key(), **changed)
        assert answer.status_code == 200, answer.text

    def _key(self) -> str:
        return f"soak-{self._rng.randrange(1 << 60)}"


def _look(pid: int) -> Held:
    def count(what: str) -> int:
        return len(list(Path(f"/proc/{pid}/{what}").iterdir()))

    return Held(resident_bytes(pid), count("fd"), count("task"))


def soak(home: Path, *, seconds: float, seed: int) -> dict[str, Any]:
    """One run; what it did and saw."""
    made = Soak(home, seed)
    try:
        return made.run(seconds)
    finally:
        made.close()


def assert_flat(figures: dict[str, Any]) -> None:
    """As much memory, as many descriptors and threads as before, but for what an allocator or a pool keeps."""
    for name, before in figures["before"].items():
        after = figures["after"][name]
        assert after["resident_bytes"] < 1.05 * before["resident_bytes"] + (4 << 20), (name, before, after)
        assert after["descriptors"] <= before["descriptors"] + 16, (name, before, after)
        assert after["threads"] <= before["threads"] + 16, (name, before, after)
