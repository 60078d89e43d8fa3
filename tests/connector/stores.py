"""A store in this process, engines that talk to it, and what tests of it wait for."""

import hashlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from connector.memory_tier import MemoryTier
from tiertune_connector.access import Login
from tiertune_connector.addresses import parse_address
from tiertune_connector.chunk import Origin
from tiertune_connector.client.store_client import ArrivedPart, ClientSlot, Loaded, Reserved, StoreClient
from tiertune_connector.codec import Codec
from tiertune_connector.counters import Counters
from tiertune_connector.keys import Namespace
from tiertune_connector.serve.main import StoreProcess
from tiertune_connector.settings import StoreSettings
from tiertune_connector.tiers.base import Outcome, Tier
from tiertune_connector.tiers.redis import RedisTier
from tiertune_connector.tiers.slots import DramPool

CHUNK_TOKENS = 16
CHUNK_BYTES = 20_000
"""Not a whole number of pages."""
STRIDE = 20_480
"""Bytes that such a chunk takes in DRAM."""
NAMESPACE = Namespace(model="llama", chunk_tokens=CHUNK_TOKENS)
PATIENCE_S = 30.0
"""For what comes in the end, however busy the machine is."""

A, B = "a" * 32, "b" * 32
"""Digests of namespaces."""

Bytes = npt.NDArray[np.uint8]


class Clock:
    """Monotonic seconds that stand still until a test moves them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def eventually(true: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The first truthy answer; AssertionError if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if answer := true():
            return answer
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.005)


def at_best(attempt: Callable[[], float], bound_s: float, attempts: int = 5) -> bool:
    """Whether one of a few attempts, which answer their seconds, is in time: what waits for something never is."""
    return any(attempt() < bound_s for _ in range(attempts))


@contextmanager
def amid(play: Callable[[int, threading.Event], None], players: int) -> Iterator[None]:
    """Threads that ``play``, each with its number, until the block ends, whatever ends it; what fails in one fails.

    One that a failed test left playing would keep the interpreter from all tests after it.
    """
    stop, errors = threading.Event(), list[Exception]()

    def run(number: int) -> None:
        try:
            play(number, stop)
        except Exception as error:  # noqa: BLE001 (any is the finding)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(players)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)


def in_turns(*works: Callable[[int], object]) -> Callable[[int, threading.Event], None]:
    """For :func:`amid`: each player does its own work again and again, told which turn it is."""

    def play(number: int, stop: threading.Event) -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            works[number](turn)

    return play


def at_once(work: Callable[[int], object], threads: int) -> None:
    """So many threads do it once each, told their number; what fails in one fails."""
    with amid(lambda number, _: work(number), threads):
        pass


def no_more_threads(patch: pytest.MonkeyPatch, left: int = 0, named: str = "") -> None:
    """From now on so many can be started whose name begins so; of others as many as ever."""
    start, spare = threading.Thread.start, iter(range(left))

    def failing(thread: threading.Thread) -> None:
        if thread.name.startswith(named) and next(spare, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", failing)


def counted(counters: Counters, name: str) -> dict[tuple[str, ...], float]:
    """A counter in this process, by the values of its labels; of a histogram its counts."""
    table = counters.snapshot()[1].get(name, {"labels": (), "rows": []})
    return {tuple(row[: len(table["labels"])]): row[-1] for row in table["rows"]}


def chain(name: str, count: int) -> list[bytes]:
    """Keys of a prompt's chunks."""
    return [hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(count)]


def payload(key: bytes, nbytes: int = CHUNK_BYTES) -> Bytes:
    """The bytes that the chunk of a key has: other ones for every key."""
    seed = np.frombuffer(hashlib.sha256(key).digest(), np.uint32).tolist()
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(nbytes), np.uint8)


def view(data: Bytes) -> memoryview:
    return memoryview(data)  # type: ignore[arg-type]


def damaged(tier: MemoryTier, namespace: str, key: bytes) -> None:
    """Flip a byte of a chunk."""
    with tier._lock:
        payload, expected, origin = tier._chunks[namespace, key]
        tier._chunks[namespace, key] = (bytes([payload[0] ^ 1]) + payload[1:], expected, origin)


def redis_tier(url: str, **given: Any) -> RedisTier:
    """A tier of one server, whose chunks are written as they are unless a ``codec`` says otherwise."""
    usual = {"timeout_s": 5.0, "login": Login(), "codec": Codec(time.monotonic, Counters())}
    return RedisTier(parse_address(url), writer="host-a", **usual | given)


def read_chunk(tier: Tier, namespace: str, key: bytes, nbytes: int) -> tuple[Outcome, Origin]:
    """What a tier answers when it is to read a chunk; AssertionError if what then comes is not the key's payload."""
    out = np.zeros(nbytes, np.uint8)
    outcome, origin = tier.read(namespace, key, view(out))
    assert outcome is not Outcome.OK or np.array_equal(out, payload(key, nbytes))
    return outcome, origin


@contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder with a path short enough for a unix socket in it."""
    with tempfile.TemporaryDirectory(prefix="tt-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def settings(home: Path, *, dram: int = 64 * STRIDE, **more: Any) -> StoreSettings:
    """A small store in ``home``, on a free port; HTTP, socket and state as given there.

    ``disk`` may be its capacity alone, and ``remote`` need not have a url: both are in ``home`` then.
    A remote that answers has all the time that it takes, unless a test bounds it: a busy machine is no slow remote.
    """
    document = {
        "name": "host-a",
        "socket": home / "s.sock",
        "state_dir": home / "state",
        "http": {"port": 0},
        "dram": {"capacity": dram, "segment": 16 * STRIDE},
    }
    if not isinstance(more.get("disk", {}), dict):
        more["disk"] = {"path": home / "disk", "capacity": more["disk"]}
    if "remote" in more:
        (home / "remote").mkdir(parents=True, exist_ok=True)
        more["remote"] = {"url": f"file://{home}/remote", "timeout": PATIENCE_S} | more["remote"]
    return StoreSettings.model_validate(document | more)


@contextmanager
def running(home: Path, *, wrap_remote: Any = lambda tier: tier, **more: Any) -> Iterator[StoreProcess]:
    """A store that serves in this process."""
    process = StoreProcess(settings(home, **more), wrap_remote=wrap_remote)
    try:
        process.start()
        yield process
    finally:
        process.stop()


def pool(store: StoreProcess) -> DramPool:
    """What a store has of the tests' namespace in DRAM."""
    return store.store.dram.pools[NAMESPACE.digest]


def pinned(store: StoreProcess) -> int:
    """Chunks of them that may not leave."""
    return pool(store).pool.pinned


class Engine:
    """Stores chunks whose bytes follow from their keys, and reads them back; of a store, or who answers at a socket."""

    def __init__(
        self,
        store: StoreProcess | Path,
        *,
        name: str = "engine-0",
        namespace: Namespace = NAMESPACE,
        chunk_bytes: int = CHUNK_BYTES,
        connect_s: float = 5.0,
    ) -> None:
        socket = store if isinstance(store, Path) else store.server.path
        self.client = StoreClient(
            socket, namespace, chunk_bytes=chunk_bytes, chunk_tokens=namespace.chunk_tokens, engine=name
        )
        self.chunk_bytes = chunk_bytes
        self.begun: dict[ClientSlot, Bytes] = {}
        """Rows of chunks that were copied in part before their load was answered."""
        self.parts = 0
        self.connected = self.client.connect(connect_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def find(self, keys: Sequence[bytes], request: str = "r", timeout_s: float = 10.0) -> list[str]:
        """The tier of each leading chunk."""
        tokens = len(keys) * CHUNK_TOKENS
        return self.client.lookup(request, keys, prompt_tokens=tokens).result(timeout_s).tiers

    def heard(self) -> None:
        """Returns when the store has dealt with all that was told it, and counted the lookups that asked no remote."""
        assert self.reserve([]).slots == []

    def reserve(self, keys: Sequence[bytes], request: str = "", tenant: bytes = b"") -> Reserved:
        return self.client.reserve(keys, request=request, tenant=tenant).result(10)

    def commit(self, slots: Sequence[ClientSlot]) -> list[bool]:
        return self.client.commit(slots).result(10)

    def put(self, keys: Sequence[bytes], request: str = "r", tenant: bytes = b"") -> list[str]:
        """Offer chunks; per key why it was not taken, else nothing."""
        reserved = self.reserve(keys, request, tenant)
        slots = [slot for slot in reserved.slots if slot is not None]
        written = [slot for slot in slots if self.client.write(slot, payload(slot.key, self.chunk_bytes))]
        kept = dict(zip((slot.key for slot in written), self.commit(written), strict=True))
        return [reason or ("" if kept.get(key) else "lost") for key, reason in zip(keys, reserved.reasons, strict=True)]

    def put_all(self, keys: Sequence[bytes], request: str = "r", tenant: bytes = b"") -> None:
        """AssertionError, with the reasons, unless all are taken."""
        reasons = self.put(keys, request, tenant)
        assert not any(reasons), reasons

    def load(self, keys: Sequence[bytes], deadline_s: float = 5.0) -> Loaded:
        """As engines do: what comes before the rest is copied at once."""
        self.begun.clear()
        asked = self.client.load(keys, deadline_s=deadline_s, arriving=self._copy_parts)
        return asked.result(deadline_s + 10)

    def _copy_parts(self, parts: Sequence[ArrivedPart]) -> None:
        for part in parts:
            row = self.begun.setdefault(part.slot, np.empty(self.chunk_bytes, np.uint8))
            self.client.read_part(part, row)
            self.parts += 1

    def read(self, loaded: Loaded) -> int:
        """How many leading chunks of a load can be read; AssertionError if one has other bytes than were stored."""
        for position, slot in enumerate(loaded.slots):
            out = self.begun.get(slot, np.empty(self.chunk_bytes, np.uint8))
            if not self.client.read(slot, out):
                return position
            assert np.array_equal(out, payload(slot.key, self.chunk_bytes)), "a foreign or torn chunk was accepted"
        return len(loaded.slots)

    def get(self, keys: Sequence[bytes], deadline_s: float = 5.0) -> int:
        """Load, read and verify the leading chunks: how many there were."""
        loaded = self.load(keys, deadline_s)
        count = self.read(loaded)
        self.client.release(loaded)
        return count


class Http:
    """A store's HTTP."""

    def __init__(self, address: str) -> None:
        # Plain HTTP: certificates, which nobody needs here, take 22 ms to load in each of hundreds of tests.
        self._http = httpx.Client(base_url=address, timeout=10, trust_env=False, verify=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self._http.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, path: str) -> str:
        return self._http.get(path).raise_for_status().text

    def post(self, path: str, body: Any) -> httpx.Response:
        return self._http.post(path, json=body)

    def raw(self, method: str, path: str, content: bytes, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._http.request(method, path, content=content, headers=named)

    def put(self, document: Any, version: int, key: str) -> httpx.Response:
        headers = {"If-Match": f'"{version}"', "Idempotency-Key": key}
        return self._http.put("/v1/tuning", json=document, headers=headers)

    def retune(self, key: str = "", **fields: Any) -> httpx.Response:
        """Change fields by their dotted path, dots written ``__``: ``tiers__dram__capacity_bytes=0``."""
        document = self.get("/v1/tuning")
        for path, value in fields.items():
            place = document
            *parents, last = path.split("__")
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = value
        return self.put(document, document["version"], key or f"test-{document['version']}")

    def total(self, name: str, **labels: str) -> float:
        """Sum of a counter's rows (a histogram's counts) that have these labels."""
        table = self.get("/v1/counters")["metrics"].get(name, {"labels": [], "rows": []})
        told = ((dict(zip(table["labels"], row, strict=False)), row[-1]) for row in table["rows"])
        return sum(value for names, value in told if labels.items() <= names.items())

    def close(self) -> None:
        self._http.close()
