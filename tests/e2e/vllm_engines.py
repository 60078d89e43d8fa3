"""vLLM engines as child processes of a test; each ends exactly the process it started."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-engine"
PYTHON = Path(os.environ.get("TIERTUNE_ENGINE_PYTHON") or VENV / "bin" / "python")
"""Another one than make setup-engine's may have vLLM for a GPU: docs/gpu-results.md."""
CHILD = Path(__file__).parent / "vllm_child.py"
REGIONS = Path("/dev/shm")
END_S = 60
CHUNK_TOKENS = 64
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
"""Tokens that came through the connector."""
CLOSE = 1e-4
"""Logprobs in float32 may differ by that much from those of another batch."""
SETTINGS = {
    "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 4608,
    "kv_cache_memory_bytes": 96 << 20, "gpu_memory_utilization": 0.1, "disable_log_stats": False,
}  # fmt: skip

needs_engine = pytest.mark.skipif(
    "TIERTUNE_ENGINE_PYTHON" not in os.environ and not (VENV / ".tiertune-setup").exists(),
    reason="no vLLM: make setup-engine has not made .venv-engine",
)


def of_engines(timeout_s: int) -> list[pytest.MarkDecorator]:
    """Marks of a module whose tests need real engines, and so long each."""
    return [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(timeout_s), needs_engine]


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    salt: str = ""
    at: float = 0.0
    """Arrival, in seconds after the ask."""
    adapter: str = ""
    """Folder of a LoRA adapter; empty: the model as it is."""


@dataclass(frozen=True)
class Answer:
    """Of one request."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    """Prompt tokens that were not computed, wherever they came from."""
    ttft_s: float
    """From the arrival to the first token."""
    seconds: float
    """From the arrival to the last token."""


@dataclass(frozen=True)
class Batch:
    answers: list[Answer]
    seconds: float
    external: float
    """Prompt tokens that came through the connector, in this batch."""


class Engine:
    """A running engine; ``wait_ready`` before anything else."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self._log = log
        self._external = 0.0

    def wait_ready(self) -> None:
        assert self._read() == {"ready": True}

    def start(
        self, requests: Sequence[Request | list[int]], *, max_tokens: int = 8, do: str = "generate", **more: Any
    ) -> None:
        """Let it work while the test does something else; ``finish`` must follow."""
        plain = [request if isinstance(request, Request) else Request(request) for request in requests]
        asked = [{**vars(each), "prompt": list(each.prompt)} for each in plain]
        self._write(do=do, requests=asked, max_tokens=max_tokens, **more)

    def finish(self) -> Batch:
        said = self._read()
        external = said["counters"].get(EXTERNAL_HITS, 0.0)
        before, self._external = self._external, external
        return Batch([Answer(**answer) for answer in said["answers"]], said["seconds"], external - before)

    def generate(self, requests: Sequence[Request | list[int]], *, max_tokens: int = 8) -> Batch:
        """Greedy; plain prompts arrive at once."""
        self.start(requests, max_tokens=max_tokens)
        return self.finish()

    def reset(self, *, staging: bool = True) -> None:
        """Empty the engine's own cache on the device, and ``staging``."""
        assert self.ask("reset", connector=staging)["done"]

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Any question that the child knows."""
        self._write(do=what, **fields)
        return self._read()

    def hang_up(self) -> None:
        """It ends by itself when nothing more can be asked."""
        _pipe(self.process.stdin).close()

    def end(self) -> int:
        """Let it end by itself; returns its exit code."""
        self.hang_up()
        return self.process.wait(END_S)

    def processes_left(self) -> bool:
        """Whether any process of its session's group is alive."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _write(self, **ask: Any) -> None:
        _pipe(self.process.stdin).write(json.dumps(ask) + "\n")
        _pipe(self.process.stdin).flush()

    def _read(self) -> dict[str, Any]:
        line = _pipe(self.process.stdout).readline()
        assert line, f"the engine ended with {self.process.wait(END_S)}: {self.log()[-4000:]}"
        return json.loads(line)  # type: ignore[no-any-return]


@contextlib.contextmanager
def engine(
    model: Path, log: Path, *, transfer: Mapping[str, Any] | None = None, processes: bool = False, **settings: Any
) -> Iterator[Engine]:
    """vLLM in float32. ``processes``: the engine's core runs in a process of its own, as in a server."""
    arguments = {"model": str(model), "kv_transfer": transfer, **SETTINGS, **settings}
    env = environment(processes=processes, compiled=not arguments["enforce_eager"])
    with log.open("w") as stderr:
        # A group of its own to be ended by, but no session: Linux gives sessions equal shares of the CPU (autogroup),
        # and 6.18 was seen to leave one without any for ten seconds, beside another that wakes and sleeps often.
        process = subprocess.Popen(
            [str(PYTHON), str(CHILD), json.dumps(arguments)], env=env, text=True, process_group=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
    try:
        yield Engine(process, log)
    finally:
        end_group(process)


def environment(*, processes: bool, compiled: bool = False) -> dict[str, str]:
    """Of every engine: no network, one thread, so that several fit on a small machine."""
    tests = str(Path(__file__).parents[1])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), tests])),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        # Engines bind to the first core otherwise, all of them to the same one.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Eager engines, too, compile how logprobs are gathered: two seconds of a processor before the first token.
        "TORCHDYNAMO_DISABLE": str(int(not compiled)),
        # On a GPU attention would round float32 to TF32 otherwise, and differ by how a prompt is cut.
        "TRITON_F32_DEFAULT": "ieee",
    }


def end_group(process: "subprocess.Popen[Any]") -> None:
    """Kill a process and all that it started; it must lead its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def through_store(socket: Path, engine_id: str, *, gated: bool = True, **more: Any) -> dict[str, Any]:
    """KVTransferConfig of an engine with TierTune; deadlines fit a machine that is busy with other tests.

    Not ``gated``: it fetches whatever it finds.
    """
    return {
        "kv_connector": "TierTuneConnector",
        **({} if gated else {"kv_connector_module_path": "e2e.vllm_fetching"}),
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {
            "socket": str(socket),
            "staging": "32MiB",
            "chunk_tokens": CHUNK_TOKENS,
            "lookup_deadline": "5s",
            "load_deadline": "5s",
            "load_deadline_floor": "1s",
            "store_deadline": "10s",
            "connect_timeout": "20s",
            **more,
        },
    }


def regions(engine_ids: Sequence[str]) -> list[Path]:
    """Files of staging that engines left."""
    return [path for name in engine_ids for path in REGIONS.glob(f"vllm_offload_*{name}*")]


def differences(got: Sequence[Answer], expected: Sequence[Answer]) -> list[str]:
    """What is not as it should be: tokens equal, logprobs within ``CLOSE``."""
    found = []
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one.tokens != other.tokens:
            found.append(f"request {number}: {one.tokens} instead of {other.tokens}")
            continue
        gap = max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        if gap > CLOSE:
            found.append(f"request {number}: logprobs differ by {gap:.2g}")
    return found


def _pipe(pipe: "IO[str] | None") -> "IO[str]":
    assert pipe is not None
    return pipe
