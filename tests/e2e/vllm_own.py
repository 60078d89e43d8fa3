"""One vLLM API server with vLLM's own offloading: host memory, and a folder below it. Nothing of TierTune's caching.

Only the worker that copies blocks is ours, for vLLM's own refuses the CPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.servers import HTTP, sampled
from e2e.vllm_model import KV_BYTES_PER_TOKEN
from e2e.vllm_server import api_server

CHUNK_TOKENS = 64
CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
HOST_CHUNKS = 64
GPU_TOKENS = 3072


@dataclass(frozen=True)
class Own:
    url: str
    folder: Path
    """Of the tier below the host's memory."""

    @property
    def metrics(self) -> str:
        return f"{self.url}/metrics"

    def generate(self, prompts: Sequence[Sequence[int]]) -> None:
        """One after another, four tokens each."""
        for prompt in prompts:
            sampling = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
            body = {"token_ids": list(prompt), "sampling_params": sampling}
            HTTP.post(f"{self.url}/inference/v1/generate", json=body, timeout=120).raise_for_status()

    def metric(self, name: str, label: str = "") -> float:
        """Sum of the samples of this name; 0 where there is none."""
        return sampled(HTTP.get(self.metrics, timeout=30).text, name, label)


@contextmanager
def own_server(model: Path, folder: Path) -> Iterator[Own]:
    below = folder / "below"
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": "own",
        "kv_connector_extra_config": {
            "spec_name": "TierTuneSpec",
            "spec_module_path": "tiertune_connector.vllm.spec",
            "cpu_bytes_to_use": HOST_CHUNKS * CHUNK_BYTES,
            "block_size": CHUNK_TOKENS,
            "secondary_tiers": [{"type": "fs", "root_dir": str(below)}],
        },
    }
    kv_bytes = GPU_TOKENS * KV_BYTES_PER_TOKEN
    with api_server(model, folder / "own.log", kv_bytes, transfer) as (url, _):
        yield Own(url, below)
