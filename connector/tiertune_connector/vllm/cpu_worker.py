"""Moves KV blocks between the engine's cache and staging if the engine runs on the CPU.

vLLM's own worker needs CUDA-like or XPU devices. This one copies at once, on the worker's thread: there is no stream to
overlap with, and the forward pass has ended by then.
"""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import time
from collections.abc import Iterator
from math import ceil

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class CPUWorker(OffloadingWorker):
    """Synchronous copies; results wait for `get_finished`."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._page_bytes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._engine = [
            tensor.tensor.view(torch.int8).view(-1, page)
            for tensor, page in zip(kv_caches.tensors, self._page_bytes, strict=True)
        ]
        self._staging = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._page_bytes]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_staging=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: CPULoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002 (0.33 asks; a copy at once is as quick as it gets)
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_staging=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every job ended when it was submitted."""

    def shutdown(self) -> None:
        self._staging.clear()
        self._engine.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, staging: CPULoadStoreSpec, *, to_staging: bool) -> bool:
        started, copied = time.perf_counter(), 0
        for group, block, chunk, sub_slot in self._pairs(engine, staging):
            for ref in self._refs[group]:
                page = self._page_bytes[ref.tensor_idx]
                inside = self._staging[ref.tensor_idx][chunk].narrow(0, sub_slot * page, ref.page_size_bytes)
                outside = self._engine[ref.tensor_idx][block].narrow(0, 0, ref.page_size_bytes)
                if to_staging:
                    inside.copy_(outside)
                else:
                    outside.copy_(inside)
                copied += ref.page_size_bytes
        self._finished.append(TransferResult(job_id, True, copied, time.perf_counter() - started))
        return True

    def _pairs(self, engine: GPULoadStoreSpec, staging: CPULoadStoreSpec) -> Iterator[tuple[int, int, int, int]]:
        """Yield (group, engine block, staging chunk, sub-slot in it); only a group's ends may be partial chunks."""
        per_chunk = self._blocks_per_chunk
        blocks = iter(engine.block_ids.tolist())
        first_chunk = 0
        for group, (count, index) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            skip = index % per_chunk
            for offset in range(skip, skip + count):
                yield group, next(blocks), int(staging.chunk_ids[first_chunk + offset // per_chunk]), offset % per_chunk
            first_chunk += ceil((count + skip) / per_chunk) if count else 0
