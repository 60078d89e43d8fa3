"""Blocks go to staging and back, where the engine runs on the CPU."""

import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from tiertune_connector.vllm.cpu_worker import CPUWorker

PER_CHUNK, BLOCKS, CHUNKS = 3, 12, 6
PAGES = (48, 80)
"""Bytes of a block in each of two tensors; the second group's data leave part of theirs empty."""
USED = ((48, 80), (48, 64))


@pytest.fixture
def region():
    row = 4096
    found = SharedOffloadRegion(f"tiertune-test-{uuid.uuid4().hex}", CHUNKS, 0, row, row)
    yield found
    found.cleanup()
    assert not Path(found.mmap_path).exists()


@pytest.fixture
def caches():
    """Two tensors that two groups share, every byte other than its neighbours."""
    random = np.random.default_rng(0)
    tensors = [
        CanonicalKVCacheTensor(torch.from_numpy(random.integers(-128, 128, (BLOCKS, page), np.int8)), page)
        for page in PAGES
    ]
    refs = [[CanonicalKVCacheRef(tensor, used) for tensor, used in enumerate(sizes)] for sizes in USED]
    return CanonicalKVCaches(tensors, refs)


@pytest.fixture
def worker(region, caches):
    made = CPUWorker(caches, region, PER_CHUNK)
    yield made
    made.shutdown()


def on_device(blocks, sizes, indices):
    return GPULoadStoreSpec(block_ids=blocks, group_sizes=sizes, block_indices=indices)


def test_what_was_stored_comes_back(worker, caches):
    """Into other blocks, byte for byte, for two groups whose first chunks are partial; other blocks stay."""
    before = [entry.tensor.clone() for entry in caches.tensors]
    # Group 0 stores its logical blocks 1-4 (chunks 0 and 1), group 1 its blocks 5 and 6 (chunks 1 and 2).
    sizes, indices, chunks = [4, 2], [1, 5], CPULoadStoreSpec([5, 0, 3, 2])
    source, target = [0, 1, 2, 3, 4, 5], [11, 10, 9, 8, 7, 6]
    assert worker.submit_store(1, on_device(source, sizes, indices), chunks)
    assert worker.submit_load(2, chunks, on_device(target, sizes, indices), expedited=True)
    for tensor, entry in enumerate(caches.tensors):
        for place, (old, new) in enumerate(zip(source, target, strict=True)):
            used = USED[0 if place < 4 else 1][tensor]
            assert torch.equal(entry.tensor[new, :used], before[tensor][old, :used])
            assert torch.equal(entry.tensor[new, used:], before[tensor][new, used:])
        assert torch.equal(entry.tensor[:6], before[tensor][:6])


def test_a_job_is_told_once_with_its_bytes(worker):
    """It had ended when it was submitted; then nothing is left to tell."""
    worker.submit_store(7, on_device([3, 4], [2, 0], [0, 0]), CPULoadStoreSpec([1]))
    worker.wait({7})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (7, True, 2 * sum(USED[0]))
    assert worker.get_finished() == []


def test_chunks_lie_whole_in_a_row(worker, region, caches):
    """A row of staging is what the store gets: tensor after tensor, blocks in order."""
    worker.submit_store(1, on_device([2, 0, 1], [3, 0], [0, 0]), CPULoadStoreSpec([4]))
    row = np.asarray(region.create_kv_memoryview())[4]
    expected = b"".join(entry.tensor[[2, 0, 1]].numpy().tobytes() for entry in caches.tensors)
    assert row[: len(expected)].tobytes() == expected
    del row


def test_a_place_that_is_not_staging_is_an_error(worker):
    """It would be overwritten."""
    with pytest.raises(AttributeError, match="chunk_ids"):
        worker.submit_store(1, on_device([0], [1, 0], [0, 0]), on_device([0], [1, 0], [0, 0]))
