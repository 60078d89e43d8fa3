"""The region of staging: made, nameless as soon as every rank has it, never left behind."""

import logging
import uuid
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from e2e.vllm_model import LAYERS
from engine.conftest import cache_of, full_attention
from tiertune_connector.vllm import compat, regions
from tiertune_connector.vllm.probes import UnsupportedError
from tiertune_connector.vllm.spec import TierTuneSpec

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture
def specs(configured):
    """The first worker's and the scheduler's spec of one engine of two ranks."""
    config = configured(**TWO_RANKS, engine_id=f"test-{uuid.uuid4().hex[:8]}", extra={
        "socket": "/nowhere/s.sock", "staging": "2MiB", "chunk_tokens": 64, "store_dram": 0, "connect_timeout": 0,
    })  # fmt: skip
    cache = cache_of(config)
    engine = compat.Engine(config, cache)
    worker = TierTuneSpec(engine.config)
    engine.tell_tier(lambda: None)
    return worker, TierTuneSpec(build_offloading_config(config, cache))


@pytest.fixture
def rank(configured):
    """Makes the spec of the other rank of an engine, with so many layers."""

    def make(first: TierTuneSpec, layers: int) -> TierTuneSpec:
        config = configured(**TWO_RANKS, engine_id=first.config.engine_id, extra={
            "socket": "/nowhere/s.sock", "staging": "2MiB", "chunk_tokens": 64, "store_dram": 0,
        })  # fmt: skip
        config.parallel_config.rank = 1
        cache = cache_of(config, {str(number): full_attention() for number in range(layers)})
        return TierTuneSpec(compat.Engine(config, cache).config)

    return make


def blocks(spec) -> CanonicalKVCaches:
    page = spec.config.worker_kv_bytes_per_block
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros(4, page, dtype=torch.int8), page)], [[CanonicalKVCacheRef(0, page)]]
    )


def files(spec) -> list[Path]:
    return list(regions.SHARED_MEMORY.glob(f"*{spec.config.engine_id}*"))


def test_no_file_is_left_once_both_sides_have_the_region(specs, caplog):
    """The scheduler takes its name, and both see the same bytes; the worker's end does not miss the name."""
    worker_side, scheduler_side = specs
    worker = worker_side.get_worker(blocks(worker_side))
    (path,) = files(worker_side)
    row_bytes = worker_side.kv_bytes_per_chunk
    assert path.name == f"vllm_offload_tiertune-{worker_side.config.engine_id}-{row_bytes}.mmap"
    assert regions.sweep() == [], "its engine lives"
    manager = scheduler_side.get_manager()
    assert files(worker_side) == []
    worker._staging[0][3].fill_(7)
    assert set(manager.primary_tier.get_kv_memoryview().cast("B")[3 * scheduler_side.kv_bytes_per_chunk :][:64]) == {7}
    with caplog.at_level(logging.WARNING):
        manager.shutdown()
        worker.shutdown()
    assert "Failed to unlink" not in caplog.text


class Handler:
    """One direction of vLLM's own worker, which needs a device."""

    def __init__(self, *_, **__):
        pass

    def shutdown(self):
        pass


def test_vllms_own_worker_is_watched_over_too(specs, monkeypatch, caplog):
    """On a GPU: held against sweeps, nameless once the scheduler has it, and its end does not miss the name."""
    worker_side, scheduler_side = specs
    monkeypatch.setattr("vllm.v1.kv_offload.cpu.gpu_worker.SingleDirectionOffloadingHandler", Handler)
    with monkeypatch.context() as on_a_gpu:
        gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True, is_xpu=lambda: False)
        on_a_gpu.setattr("tiertune_connector.vllm.spec.current_platform", gpu)
        on_a_gpu.setattr("vllm.v1.kv_offload.cpu.spec.current_platform", gpu)
        worker = worker_side.get_worker(blocks(worker_side))
    assert regions.sweep() == []
    assert len(files(worker_side)) == 1
    manager = scheduler_side.get_manager()
    assert files(worker_side) == []
    with caplog.at_level(logging.WARNING):
        manager.shutdown()
        worker.shutdown()
    assert "Failed to unlink" not in caplog.text


def test_an_engine_with_the_id_of_another_that_starts_is_refused(specs):
    """Else both would have one region: each found the other's keys and values in its rows."""
    first, _ = specs
    worker = first.get_worker(blocks(first))
    second = TierTuneSpec(first.config)
    with pytest.raises(UnsupportedError, match="same engine_id"):
        second.get_worker(blocks(second))
    assert len(files(first)) == 1, "the first one's is there still"
    worker.shutdown()


@pytest.mark.parametrize("layers", [LAYERS, LAYERS - 1])
def test_ranks_of_other_rows_never_write_into_one_region(specs, rank, layers):
    """As with pipeline stages of unequal length: the rows of one would lie across those of the other."""
    first, scheduler_side = specs
    second = rank(first, layers)
    workers = [spec.get_worker(blocks(spec)) for spec in (first, second)]
    alike = layers == LAYERS
    with nullcontext() if alike else pytest.raises(UnsupportedError, match="pipeline_parallel_size"):
        scheduler_side.get_manager().shutdown()
    for worker in workers:
        worker.shutdown()
    assert files(first) == []


def test_a_worker_that_never_got_a_scheduler_removes_its_file(specs):
    """The engine failed between the two."""
    worker_side, _ = specs
    worker_side.get_worker(blocks(worker_side)).shutdown()
    assert files(worker_side) == []


def test_a_worker_that_died_leaves_a_file_until_the_next_engine(specs):
    """A crash between the two: the next engine on the host sweeps."""
    worker_side, _ = specs
    dead = regions.engine_id(f"dead-{worker_side.config.engine_id}", 4096)
    stale = regions.SHARED_MEMORY / f"vllm_offload_{dead}.mmap"
    stale.touch(mode=0o600)
    worker = worker_side.get_worker(blocks(worker_side))
    assert not stale.exists()
    worker.shutdown()
