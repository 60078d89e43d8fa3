"""A prompt's chunks from the store's memory to the GPU by way of pinned staging, beside the GPU's own copy alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.store.rounds import interleaved, ratio
from benchmarks.store.world import CHUNK_TOKENS, DEADLINE_S, MIB, keys, serving, store_chunk
from tiertune_connector.client.store_client import Part

NBYTES = 32 * MIB
"""Of a chunk: 256 tokens of a Llama of 8 billion parameters in bfloat16."""
CHUNKS = 8
PROMPTS = 12
ROUNDS = 15


def measure(folder: Path) -> dict[str, Any]:
    """Paths by name; each moves 8 chunks of 32 MiB. ``load_to_gpu`` waits until the last byte is on the GPU."""
    import torch

    staging = torch.empty(CHUNKS, NBYTES, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(CHUNKS, NBYTES, dtype=torch.uint8)
    device = torch.empty(CHUNKS, NBYTES, dtype=torch.uint8, device="cuda")
    beside = np.ones((CHUNKS, NBYTES), np.uint8)
    rows = staging.numpy()
    rows[:] = np.frombuffer(np.random.default_rng(0).bytes(NBYTES), np.uint8)
    with serving(folder, dram=(PROMPTS + 2) * CHUNKS * NBYTES) as store:
        client = store.client(NBYTES)
        store.wait_sized()
        chains = [keys(f"prompt {number}", CHUNKS) for number in range(PROMPTS)]
        for chain in chains:
            for key, row in zip(chain, rows, strict=True):
                store_chunk(client, key, row)

        def load(number: int, then: Any = lambda position: None) -> None:
            chain = chains[number % PROMPTS]
            client.lookup("bench", chain, prompt_tokens=CHUNKS * CHUNK_TOKENS).result()

            def copy(parts: Sequence[Part]) -> None:
                for part in parts:
                    client.read_part(part, rows[part.position])

            loaded = client.load("bench", chain, deadline_s=DEADLINE_S, arriving=copy).result()
            for position, slot in enumerate(loaded.slots):
                if slot is None or not client.read(slot, rows[position]):
                    raise RuntimeError("a chunk did not come")
                then(position)
            client.release(loaded)

        def to_gpu(source: Any) -> None:
            device.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        def from_gpu(_: int) -> None:
            staging.copy_(device, non_blocking=True)
            torch.cuda.synchronize()

        def load_to_gpu(number: int) -> None:
            load(number)
            to_gpu(staging)

        def load_while_copying(number: int) -> None:
            load(number, lambda position: device[position].copy_(staging[position], non_blocking=True))
            torch.cuda.synchronize()

        seconds = interleaved(
            {
                "copy": lambda _: to_gpu(staging),
                "copy back": from_gpu,
                "copy unpinned": lambda _: to_gpu(pageable),
                "memcpy": lambda _: np.copyto(beside, rows),
                "load": load,
                "load to gpu": load_to_gpu,
                "load while copying": load_while_copying,
            },
            ROUNDS,
        )
        client.close()
    total = CHUNKS * NBYTES
    pinned = seconds["copy"]
    return {
        "staging_to_gpu": ratio(pinned, seconds["memcpy"], "memcpy", total),
        "gpu_to_staging": ratio(seconds["copy back"], seconds["memcpy"], "memcpy", total),
        "unpinned_to_gpu": ratio(seconds["copy unpinned"], pinned, "pinned copy", total),
        "store_to_staging": ratio(seconds["load"], seconds["memcpy"], "memcpy", total),
        "store_to_gpu": ratio(seconds["load to gpu"], pinned, "pinned copy", total),
        "store_to_gpu_chunk_by_chunk": ratio(seconds["load while copying"], pinned, "pinned copy", total),
    }
