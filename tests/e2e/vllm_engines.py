"""vLLM engines and a store as child processes of a test; each ends exactly the process it started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import yaml

from e2e.servers import running, wait_until

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-engine"
PYTHON = VENV / "bin" / "python"
CHILD = Path(__file__).parent / "vllm_child.py"
END_S = 60
CHUNK_TOKENS = 64

needs_engine = pytest.mark.skipif(
    not (VENV / ".tiertune-setup").exists(), reason="no vLLM: make setup-engine has not made .venv-engine"
)


@dataclass(frozen=True)
class Answer:
    tokens: list[list[int]]
    counters: dict[str, float]
    """vLLM's own, by name, without labels."""
    seconds: float


class Engine:
    """A running engine; ``wait_ready`` before the first ``generate``."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self._log = log

    def wait_ready(self) -> None:
        assert self._read() == {"ready": True}

    def generate(self, prompts: Sequence[list[int]], *, max_tokens: int = 16, reset: bool = False) -> Answer:
        """Greedy. ``reset`` first empties the engine's own caches, on the device and in staging."""
        ask = {"prompts": list(prompts), "max_tokens": max_tokens, "reset": reset}
        _pipe(self.process.stdin).write(json.dumps(ask) + "\n")
        _pipe(self.process.stdin).flush()
        return Answer(**self._read())

    def end(self) -> int:
        """Let it end by itself; returns its exit code."""
        _pipe(self.process.stdin).close()
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

    def _read(self) -> dict[str, Any]:
        line = _pipe(self.process.stdout).readline()
        assert line, f"the engine ended with {self.process.wait(END_S)}: {self.log()[-4000:]}"
        return json.loads(line)  # type: ignore[no-any-return]


@contextlib.contextmanager
def engine(
    model: Path, log: Path, *, transfer: dict[str, Any] | None = None, caching: bool = True, processes: bool = False
) -> Iterator[Engine]:
    """vLLM on the CPU in float32. ``processes``: the engine's core runs in a process of its own, as in a server."""
    settings = {
        "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "block_size": 32,
        "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False,
        "enable_prefix_caching": caching, "kv_transfer": transfer,
    }  # fmt: skip
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        # Engines bind to the first core otherwise, all of them to the same one.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [str(PYTHON), str(CHILD), json.dumps(settings)], env=environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
    try:
        yield Engine(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def through_store(socket: Path, engine_id: str) -> dict[str, Any]:
    """KVTransferConfig of an engine with TierTune; deadlines fit a machine that is busy with other tests."""
    return {
        "kv_connector": "TierTuneConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {
            "socket": str(socket),
            "staging": "32MiB",
            "chunk_tokens": CHUNK_TOKENS,
            "lookup_deadline": "20s",
            "load_deadline": "20s",
            "load_deadline_floor": "20s",
            "store_deadline": "20s",
            "connect_timeout": "20s",
        },
    }


@dataclass(frozen=True)
class Store:
    process: "subprocess.Popen[bytes]"
    socket: Path
    url: str

    def counters(self, name: str) -> dict[tuple[str, ...], float]:
        """Rows of one metric: label values to value."""
        metrics = httpx.get(f"{self.url}/v1/counters", timeout=10).json()["metrics"]
        return {tuple(labels): value for *labels, value in metrics.get(name, {"rows": []})["rows"]}


@contextlib.contextmanager
def store(folder: Path) -> Iterator[Store]:
    """A store with DRAM alone, in ``folder``."""
    config, socket, address = folder / "store.yaml", folder / "store.sock", folder / "state" / "http"
    config.write_text(
        yaml.safe_dump(
            {
                "name": "host-a",
                "socket": str(socket),
                "state_dir": str(folder / "state"),
                "http": {"port": 0},
                "dram": {"capacity": "64MiB", "segment": "16MiB"},
            }
        )
    )
    program = Path(sys.executable).with_name("tiertune")
    command = [str(program), "store", "serve", "--config", str(config)]
    with running(command, log=folder / "store.log") as process:
        wait_until(
            lambda: address.exists() or process.poll() is not None,
            f"the store: {(folder / 'store.log').read_text()}",
        )
        yield Store(process, socket, address.read_text().strip())


def _pipe(pipe: "IO[str] | None") -> "IO[str]":
    assert pipe is not None
    return pipe
