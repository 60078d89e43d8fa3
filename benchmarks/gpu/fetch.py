"""A prompt's chunks from the store's memory to the GPU through pinned staging, as an engine's connector copies them.

Beside it what the machine does: memcpy on one thread, the GPU's own copy from and to staging, and from memory that is
not pinned. ``alone`` is without the helpers that copy chunks of a job in parallel.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch

from benchmarks.store.rounds import interleaved, ratio
from benchmarks.store.world import CHUNK_TOKENS, DEADLINE_S, MIB, Store, keys, serving
from tiertune_connector.copying.crew import usual_helpers
from tiertune_connector.vllm.transfers import Job, Transfers

NBYTES = 32 * MIB
"""Bytes of a chunk: 256 tokens of a Llama of 8 billion parameters in bfloat16."""
CHUNKS = 8
PROMPTS = 4
"""Prompts loaded in turns: 1 GiB, more than caches hold."""
ROOM = 16
"""Prompts that the store has room for: those stored meanwhile evict each other, and none that is loaded."""
ROUNDS = 15
POLL_S = 1e-4


def measure(folder: Path) -> dict[str, Any]:
    """Paths by name, as `bench.json` has them; each moves 8 chunks of 32 MiB. `store_to_gpu` is a whole fetch."""
    with serving(folder, dram=ROOM * CHUNKS * NBYTES) as store:
        prompts = _Prompts(store)
        try:
            seconds = interleaved(prompts.paths(), ROUNDS)
        finally:
            prompts.close()
    total, pinned, memcpy = CHUNKS * NBYTES, seconds["copy"], seconds["memcpy"]
    return {
        "helpers": usual_helpers(),
        "staging_to_gpu": ratio(pinned, memcpy, "memcpy", total),
        "gpu_to_staging": ratio(seconds["copy back"], memcpy, "memcpy", total),
        "unpinned_to_gpu": ratio(seconds["copy unpinned"], pinned, "pinned copy", total),
        "store_to_staging": ratio(seconds["load"], memcpy, "memcpy", total),
        "store_to_staging_alone": ratio(seconds["load alone"], memcpy, "memcpy", total),
        "staging_to_store": ratio(seconds["store"], memcpy, "memcpy", total),
        "staging_to_store_alone": ratio(seconds["store alone"], memcpy, "memcpy", total),
        "store_to_gpu": ratio(seconds["load to gpu"], pinned, "pinned copy", total),
    }


class _Prompts:
    """Prompts in the store, loaded in turns into one engine's staging."""

    def __init__(self, store: Store) -> None:
        self._client = store.client(NBYTES)
        store.wait_sized()
        self._staging = torch.empty(CHUNKS, NBYTES, dtype=torch.uint8, pin_memory=True)
        self._unpinned = torch.ones(CHUNKS, NBYTES, dtype=torch.uint8)
        self._gpu = torch.empty(CHUNKS, NBYTES, dtype=torch.uint8, device="cuda")
        self._beside = np.ones((CHUNKS, NBYTES), np.uint8)
        self._rows = self._staging.numpy()
        self._rows[:] = np.frombuffer(np.random.default_rng(0).bytes(NBYTES), np.uint8)
        self._shared = Transfers(self._client, self._rows)
        self._alone = Transfers(self._client, self._rows, helpers=0)
        self._jobs = count()
        self._stored = count()
        for number in range(PROMPTS):
            self._store(self._shared, f"prompt {number}")

    def close(self) -> None:
        for transfers in (self._shared, self._alone):
            transfers.close(DEADLINE_S)
        self._client.close()

    def paths(self) -> dict[str, Callable[[int], None]]:
        return {
            "copy": lambda _: self._copy(self._gpu, self._staging),
            "copy back": lambda _: self._copy(self._staging, self._gpu),
            "copy unpinned": lambda _: self._copy(self._gpu, self._unpinned),
            "memcpy": lambda _: np.copyto(self._beside, self._rows),
            "load": lambda number: self._load(self._shared, number),
            "load alone": lambda number: self._load(self._alone, number),
            "store": lambda _: self._store(self._shared, f"new {next(self._stored)}"),
            "store alone": lambda _: self._store(self._alone, f"new {next(self._stored)}"),
            "load to gpu": self._load_to_gpu,
        }

    def _copy(self, out: torch.Tensor, data: torch.Tensor) -> None:
        out.copy_(data, non_blocking=True)
        torch.cuda.synchronize()

    def _load(self, transfers: Transfers, number: int) -> None:
        chain = keys(f"prompt {number % PROMPTS}", CHUNKS)
        self._client.lookup("bench", chain, prompt_tokens=CHUNKS * CHUNK_TOKENS).result()
        rows = list(range(CHUNKS))
        transfers.load(Job(next(self._jobs), "bench", chain, rows, loads=True, deadline_s=DEADLINE_S))
        _done(transfers)

    def _load_to_gpu(self, number: int) -> None:
        self._load(self._shared, number)
        self._copy(self._gpu, self._staging)

    def _store(self, transfers: Transfers, name: str) -> None:
        """Once DRAM is full every chunk evicts one that was stored like this before."""
        chain, rows = keys(name, CHUNKS), list(range(CHUNKS))
        transfers.store(Job(next(self._jobs), "bench", chain, rows, loads=False, deadline_s=DEADLINE_S))
        _done(transfers)


def _done(transfers: Transfers) -> None:
    """Ask again and again, as a scheduler does, until the job is over; RuntimeError if it failed."""
    while not (over := transfers.take()):
        sleep(POLL_S)
    if not over[0].succeeded:
        raise RuntimeError(f"a job failed: {over[0]}")
