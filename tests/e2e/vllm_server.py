"""vLLM's API server with two data-parallel ranks, and a subscriber to its KV events."""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from e2e.servers import HTTP, free_ports, sampled, wait_until
from e2e.vllm_engines import PYTHON, Answer, Request, end_group, environment, through_store
from e2e.vllm_model import KV_BYTES_PER_TOKEN
from tiertune_agent.demo.ports import free_port

READY_S = 300.0
SUBSCRIBER = Path(__file__).parent / "vllm_events.py"
RANKS = 2
BLOCK_TOKENS = 32
GPU_BLOCKS = 192
"""Of each rank: a few prompts, so that blocks leave."""


@dataclass(frozen=True)
class Server:
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    events: Path

    def generate(self, request: Request, rank: int, *, max_tokens: int = 8) -> Answer:
        """Greedy, by one rank."""
        sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": list(request.prompt), "sampling_params": sampling}
        if request.salt:
            body["cache_salt"] = request.salt
        started = time.perf_counter()
        said = HTTP.post(
            f"{self.url}/inference/v1/generate", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=120
        )
        assert said.status_code == 200, f"{said.text}\n{self.log.read_text()[-3000:]}"
        seconds = time.perf_counter() - started
        choice = said.json()["choices"][0]
        logprobs = [place["logprob"] for place in choice["logprobs"]["content"]]
        return Answer(choice["token_ids"], logprobs, 0, seconds, seconds)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `/metrics` that have these labels."""
        text = HTTP.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        return sampled(text, name, *(f'{label}="{value}"' for label, value in labels.items()))

    def heard(self) -> list[dict[str, Any]]:
        """KV events so far, in order."""
        whole = self.events.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def server(model: Path, folder: Path, store: Path, engine_id: str, **more: str) -> Iterator[Server]:
    """Two ranks, float32, token ids in and out, that fetch whatever they find; ``more`` are settings of the adapter."""
    events = free_ports(RANKS)
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
    transfer = through_store(store, engine_id, gated=False, self_describing_kv_events=True, **more)
    kv_bytes = GPU_BLOCKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    options = ("--data-parallel-size", str(RANKS), "--kv-events-config", json.dumps(publish))
    log, heard = folder / "server.log", folder / "events.jsonl"
    endpoints = [f"tcp://127.0.0.1:{events + rank}" for rank in range(RANKS)]
    with (
        _process([str(PYTHON), str(SUBSCRIBER), str(heard), *endpoints], folder / "events.log"),
        api_server(model, log, kv_bytes, transfer, *options) as (url, process),
    ):
        yield Server(url, process, log, heard)


@contextmanager
def api_server(
    model: Path, log: Path, kv_bytes: int, transfer: Mapping[str, Any], *options: str
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """vLLM's own, ready to answer: its address and its process. Its device holds ``kv_bytes`` of chunks."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--tokens-only",
        "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS),
        "--max-model-len", "2048", "--kv-cache-memory-bytes", str(kv_bytes), "--host", "127.0.0.1",
        "--port", str(port), "--kv-transfer-config", json.dumps(transfer), *options,
    ]  # fmt: skip
    with _process(command, log) as process:
        wait_until(lambda: _healthy(url) or process.poll() is not None, "the API server is ready", READY_S)
        assert process.poll() is None, _failure(log)
        yield url, process


@contextmanager
def _process(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    env = environment(processes=True) | {"VLLM_SERVER_DEV_MODE": "1"}  # /reset_prefix_cache
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, process_group=0)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        end_group(process)


def _failure(log: Path) -> str:
    """The errors of each process, not only the last one's, which tells no more than that another failed."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([*(line for line in lines if "Error" in line), "...", *lines[-20:]])


def _healthy(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health", timeout=2).is_success
    except httpx.TransportError:
        return False
