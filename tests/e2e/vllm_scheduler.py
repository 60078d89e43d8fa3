"""vLLM's scheduler without an engine, stepped with TierTune's connector and with plain offloading. Needs .venv-engine.

``vllm_scheduler.py MODEL SOCKET`` prints JSON: for ``ours``, ``plain`` and ``undeferred`` the seconds that each step
spent in the connector and in all of the scheduler, with 64 running requests and 16 whose lookup is outstanding. The
worker is played: each running request gets a token in every step, and stores are acknowledged two steps later.
TierTune's store is a real one, but never seems to answer the lookups of the 16; those of plain offloading wait for a
chunk that is being stored, and ``undeferred`` is plain offloading without them.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from e2e.vllm_model import HEADS, KV_HEADS, LAYERS, VOCABULARY, WIDTH, planned
from tiertune_connector.client.store_client import StoreClient

BLOCK, CHUNK = 32, 64
RUNNING, DEFERRED = 64, 16
PROMPT, DEFERRED_PROMPT = 512, 2048
STEPS = 500
STAGING = 256 << 20
CALLS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "get_kv_connector_stats", "take_events", "has_pending_push_work",
    "get_external_cache_hit_sources",
)  # fmt: skip
"""Of the connector, in a step."""


class Played:
    """A scheduler and the worker that it believes to have."""

    def __init__(self, model: str, transfer: dict[str, Any], seed: int) -> None:
        import torch

        engine_id = f"played-{os.getpid()}-{seed}"
        config = EngineArgs(
            model=model, skip_tokenizer_init=True, dtype="float32", block_size=BLOCK, max_model_len=4096,
            enforce_eager=True, kv_cache_memory_bytes=1 << 30, max_num_seqs=2 * RUNNING, enable_prefix_caching=False,
            kv_transfer_config=KVTransferConfig(kv_role="kv_both", engine_id=engine_id, **transfer),
        ).create_engine_config()  # fmt: skip
        config.cache_config.kv_cache_layout = "LBHNC"
        layer = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=WIDTH // HEADS, dtype=torch.float32
        )
        layers = {f"model.layers.{index}.self_attn.attn": layer for index in range(LAYERS)}
        cache = planned(config, layers, 1 << 30)
        config.cache_config.num_gpu_blocks = cache.num_blocks
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self.connector_s = 0.0
        """Spent in the connector so far."""
        for name in CALLS:
            setattr(self.scheduler.connector, name, self._timed(getattr(self.scheduler.connector, name)))
        self._random = np.random.default_rng(seed)
        self._submitted: deque[dict[int, Any]] = deque([{}, {}])
        self.withheld: set[str] = set()
        """Requests whose stores are never acknowledged."""

    def add(self, name: str, prompt: list[int]) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=4096 - len(prompt), ignore_eos=True)
        sampling.update_from_generation_config({}, None)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self.hasher))

    def prompt(self, length: int) -> list[int]:
        return self._random.integers(10, VOCABULARY, length).tolist()

    def step(self) -> tuple[float, float]:
        """Seconds on the scheduler thread: in the connector, in all."""
        self.connector_s, started = 0.0, time.perf_counter()
        output = self.scheduler.schedule()
        between = time.perf_counter()
        answer = self._answer(output)
        again = time.perf_counter()
        self.scheduler.update_from_output(output, answer)
        return self.connector_s, between - started + time.perf_counter() - again

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            answer = call(*arguments, **named)
            self.connector_s += time.perf_counter() - started
            return answer

        return timed

    def _answer(self, output: Any) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = self.scheduler.requests[name]
            tokens.append([11] if request.num_computed_tokens >= request.num_prompt_tokens else [])
        metadata = output.kv_connector_metadata
        self._submitted.append(dict(metadata.store_jobs))
        done = {job for job, what in self._submitted.popleft().items() if what.req_id not in self.withheld}
        worker = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done, 1)) if done else None
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=worker),
        )

    def run(self) -> None:
        """Until all of the running decode; their stores go on."""
        for number in range(RUNNING):
            self.add(f"running-{number}", self.prompt(PROMPT + number))
        for _ in range(RUNNING * PROMPT // 1024):
            self.step()
            time.sleep(0.01)
        assert len(self.scheduler.running) >= RUNNING

    def waiting(self) -> int:
        return len(self.scheduler.requests) - len(self.scheduler.running)


def main() -> None:
    model, socket = sys.argv[1:]
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": STAGING, "block_size": CHUNK, "offload_prompt_only": False},
    }
    plain, undeferred = Played(model, offloading, seed=1), Played(model, offloading, seed=3)
    ours = Played(
        model,
        {
            "kv_connector": "TierTuneConnector",
            "kv_connector_extra_config": {
                "socket": socket, "staging": STAGING, "chunk_tokens": CHUNK, "lookup_deadline": "600s",
                "connect_timeout": "20s",
            },
        },
        seed=2,
    )  # fmt: skip
    kinds = {"plain": plain, "ours": ours, "undeferred": undeferred}
    for each in kinds.values():
        each.run()
    defer_plain(plain)
    with unanswered():
        for number in range(DEFERRED):
            ours.add(f"deferred-{number}", ours.prompt(DEFERRED_PROMPT))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for each in kinds.values():
        each.step()
    for _ in range(STEPS):
        for name, each in kinds.items():
            seconds[name].append(each.step())
    counts = {
        name: {
            "connector_s": [connector for connector, _ in seconds[name]],
            "step_s": [step for _, step in seconds[name]],
            "running": len(each.scheduler.running),
            "deferred": each.waiting(),
        }
        for name, each in kinds.items()
    }
    sys.stdout.write(json.dumps(counts) + "\n")
    sys.stdout.flush()
    os._exit(0)  # there is no worker to be shut down with


@contextmanager
def unanswered() -> Iterator[None]:
    """What is asked of the store now is never answered, as far as the engine sees."""
    lookup = StoreClient.lookup

    def outstanding(*arguments: Any, **named: Any) -> "Future[Any]":
        lookup(*arguments, **named)
        return Future()

    StoreClient.lookup = outstanding  # type: ignore[method-assign]
    yield
    StoreClient.lookup = lookup  # type: ignore[method-assign]


def defer_plain(played: Played) -> None:
    """Requests that wait for a chunk which another one is storing, for ever."""
    shared = played.prompt(DEFERRED_PROMPT)
    played.withheld.add("storing")
    played.add("storing", shared)
    for _ in range(8):
        played.step()
    for number in range(DEFERRED):
        played.add(f"deferred-{number}", shared + played.prompt(8))


if __name__ == "__main__":
    main()
