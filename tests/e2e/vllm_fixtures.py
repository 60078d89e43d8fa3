"""One fleet of real engines for all tests of the session: an engine takes 20 seconds to start.

Two hosts with a store each, on one Redis. Engines A and B are on host a, C on host b; the reference has no cache.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from e2e.servers import Redis, redis_server, wait_until
from e2e.vllm_engines import (
    CHUNK_TOKENS,
    Answer,
    Batch,
    Engine,
    Request,
    differences,
    engine,
    regions,
    through_store,
)
from e2e.vllm_model import KV_BYTES_PER_TOKEN, VOCABULARY, write_model
from e2e.vllm_server import Server, server
from e2e.vllm_stores import Host

CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
NAMES = ("reference", "engine_a", "engine_b", "engine_c")
STUB = "StubConnector"


class Fleet:
    """What runs; engines by the name of their fixture."""

    def __init__(self, folder: Path, redis: Redis, stack: ExitStack) -> None:
        self.folder, self.redis = folder, redis
        self.model = write_model(folder / "model")
        self.host_a = stack.enter_context(Host(folder / "a", "host-a", remote=redis.url, dram="512MiB", disk=True))
        self.host_b = stack.enter_context(Host(folder / "b", "host-b", remote=redis.url, dram="256MiB"))
        self.ids: list[str] = []
        self.engines: list[Engine] = []
        self._by_name: dict[str, Engine] = {}
        self._expected: dict[tuple[tuple[int, ...], int], Answer] = {}
        self._stack = stack

    def launch(self, name: str) -> None:
        """Start an engine; it is ready with ``get``."""
        launched = {
            # Its core is a process of its own, as in a server; those of the others are in the process that is asked.
            "engine_a": lambda: self._engine("a", self.host_a, processes=True),
            "engine_b": lambda: self._engine("b", self.host_a),
            "engine_c": lambda: self._engine("c", self.host_b, load_deadline_floor="300ms"),
            "reference": lambda: self._enter(
                engine(self.model, self.folder / "reference.log", enable_prefix_caching=False)
            ),
        }[name]()
        self._by_name[name] = launched

    def get(self, name: str) -> Engine:
        return self._by_name[name]

    def ready(self) -> None:
        """All have started, and know what their prefills cost."""
        for each in self._by_name.values():
            each.wait_ready()
        for each in self._by_name.values():
            each.start(steps_of_all_sizes(), max_tokens=2)
        for each in self._by_name.values():
            each.finish()

    def restart_a(self) -> Engine:
        """Engine A ends and comes back as one of two connectors: one that never has anything, then TierTune's."""
        before = self._by_name["engine_a"]
        assert before.end() == 0
        wait_until(lambda: not before.processes_left(), "engine A and its processes have ended")
        transfer = through_store(self.host_a.socket, self.new_id("a2"))
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": transfer.pop("engine_id"),
            "kv_connector_extra_config": {
                "connectors": [
                    {"kv_connector": STUB, "kv_connector_module_path": "e2e.vllm_stub", "kv_role": "kv_both"},
                    transfer,
                ]
            },
        }
        again = self._enter(engine(self.model, self.folder / "a2.log", transfer=both))
        again.wait_ready()
        again.generate(steps_of_all_sizes(), max_tokens=2)
        self._by_name["engine_a"] = again
        return again

    def expected(self, requests: Sequence[Request | list[int]], *, max_tokens: int = 8) -> list[Answer]:
        """What the engine without any cache answers."""
        prompts = [tuple(each.prompt if isinstance(each, Request) else each) for each in requests]
        new = [prompt for prompt in dict.fromkeys(prompts) if (prompt, max_tokens) not in self._expected]
        for start in range(0, len(new), 4):
            some = new[start : start + 4]
            answers = self.get("reference").generate([list(prompt) for prompt in some], max_tokens=max_tokens).answers
            self._expected |= {(prompt, max_tokens): answer for prompt, answer in zip(some, answers, strict=True)}
        return [self._expected[prompt, max_tokens] for prompt in prompts]

    def right(self, each: Engine, asked: Sequence[Request | list[int]]) -> Batch:
        """What an engine answers: the same as one without any cache."""
        expected = self.expected(asked)
        batch = each.generate(asked)
        assert differences(batch.answers, expected) == []
        return batch

    def computed(self, each: Engine, asked: Sequence[Request | list[int]]) -> Batch:
        """As `right`, and then the store of host a, and its remote, have all that the engine has computed of it."""
        self.expected(asked)
        before = self.host_a.resident()
        batch = self.right(each, asked)
        self.host_a.wait_resident(before + chunks(asked) * CHUNK_BYTES)
        return batch

    def fetched(self, each: Engine, asked: Sequence[Request | list[int]]) -> None:
        """As `right`, of an engine that gets every whole chunk from the store of its host."""
        with fetching(each):
            batch = self.right(each, asked)
        assert batch.external >= chunks(asked) * CHUNK_TOKENS, f"{self.host_a.gate()}\n{self.host_b.gate()}"

    def close(self) -> None:
        """Every engine ends by itself, and leaves neither a process nor a region of staging."""
        running = [each for each in self.engines if each.process.poll() is None]
        for each in running:
            each.hang_up()
        assert [each.end() for each in running] == [0] * len(running)
        wait_until(lambda: not any(each.processes_left() for each in self.engines), "no process of an engine is left")
        assert regions(self.ids) == []

    def _engine(self, name: str, home: Host, *, processes: bool = False, **more: str) -> Engine:
        transfer = through_store(home.socket, self.new_id(name), **more)
        return self._enter(engine(self.model, self.folder / f"{name}.log", transfer=transfer, processes=processes))

    def _enter(self, started: object) -> Engine:
        each: Engine = self._stack.enter_context(started)  # type: ignore[arg-type]
        self.engines.append(each)
        return each

    def new_id(self, name: str) -> str:
        self.ids.append(f"{self.folder.name}-{name}")
        return self.ids[-1]


@contextmanager
def fetching(each: Engine) -> Iterator[None]:
    """What the engine finds it fetches, and waits for: on a busy machine its gate may believe anything of its costs."""
    each.ask("always_fetch", on=True, patient=True)
    try:
        yield
    finally:
        each.ask("always_fetch", on=False)


def prompts(count: int, *, seed: int, prefix: int = 1024, tail: int = 100) -> list[list[int]]:
    """``prefix`` tokens in common, then ``tail`` of their own each."""
    random = np.random.default_rng(seed)
    common, *tails = (random.integers(10, VOCABULARY, n).tolist() for n in [prefix, *[tail] * count])
    return [common + own for own in tails]


def chunks(asked: Sequence[Request | list[int]]) -> int:
    """Whole chunks that prompts have, what several begin with once."""
    plain = [each.prompt if isinstance(each, Request) else each for each in asked]
    ends = [(prompt, end) for prompt in plain for end in range(CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS)]
    return len({tuple(prompt[:end]) for prompt, end in ends})


def steps_of_all_sizes() -> list[Request]:
    """New prompts, one after another, from which an engine learns what prefills cost."""
    random = np.random.default_rng(time.monotonic_ns())
    lengths = (40, 100, 1400, 300, 1000, 600, 1200, 200, 800)
    alone = [random.integers(10, VOCABULARY, length).tolist() for length in lengths]
    return [Request(prompt, at=0.3 * number) for number, prompt in enumerate(alone)]


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Starts, all at once, those engines that the session's tests use."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tt-")))  # short enough for a unix socket
        redis = stack.enter_context(redis_server(maxmemory="1gb"))
        started = Fleet(folder, redis, stack)
        for name in NAMES:
            if name in wanted:
                started.launch(name)
        started.ready()
        yield started
        started.close()


@pytest.fixture(scope="session")
def reference(fleet: Fleet) -> Engine:
    return fleet.get("reference")


@pytest.fixture
def engine_a(fleet: Fleet) -> Engine:
    """Of every test anew: it may have been restarted."""
    return fleet.get("engine_a")


@pytest.fixture(scope="session")
def engine_b(fleet: Fleet) -> Engine:
    return fleet.get("engine_b")


@pytest.fixture(scope="session")
def engine_c(fleet: Fleet) -> Engine:
    return fleet.get("engine_c")


@pytest.fixture(scope="session")
def dp_server(fleet: Fleet) -> Iterator[Server]:
    """Two data-parallel ranks behind one API, on host a; unsalted requests are not to be shared."""
    home, engine_id = fleet.host_a.socket, fleet.new_id("dp")
    with server(fleet.model, fleet.folder, home, engine_id, isolation="require_salt") as running:
        yield running
