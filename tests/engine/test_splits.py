"""Blocks that are larger than a kernel's: how they are split decides where a token lies, and a rank alone knows it."""

import uuid

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from e2e.vllm_model import LAYERS, planned
from engine.conftest import NAME, full_attention
from tiertune_connector.vllm.compat import Engine
from tiertune_connector.vllm.connector import TierTuneConnector

BLOCK = 64
SETTINGS = {
    "socket": "/nowhere/s.sock", "staging": "2MiB", "chunk_tokens": BLOCK, "store_dram": 0, "connect_timeout": 0,
}  # fmt: skip
SIZES = {"block_size": BLOCK, "max_model_len": 512}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture
def starts(configured):
    """Starts an engine, of a kernel block for each rank (None: a mute one); its namespace, as a store is told it."""
    ended = []

    def start(*kernels, layout=KVCacheLayout.LBHNC, **fields):
        ranks, engine = TWO_RANKS if len(kernels) > 1 else {}, f"test-{uuid.uuid4().hex[:8]}"
        layers = {f"model.layers.{n}.attn": full_attention(block_size=BLOCK, **fields) for n in range(LAYERS)}

        def side(role, rank=0):
            config = configured(**NAME, **ranks, **SIZES, engine_id=engine, extra=SETTINGS)
            config.parallel_config.rank = rank
            cache = planned(config, layers, 4 << 20)
            ended.append(TierTuneConnector(config, role, cache))
            return ended[-1], cache

        for rank, kernel in enumerate(kernels):
            worker, cache = side(KVConnectorRole.WORKER, rank)
            if kernel is None:
                worker._engine.splits = lambda _: None
            worker.register_kv_caches(allocate_kv_cache(cache, torch.device("cpu"), layout, [kernel or BLOCK]))
        scheduler, _ = side(KVConnectorRole.SCHEDULER)
        return scheduler.tier._client.hello.namespace

    yield start
    for connector in ended:
        connector.shutdown()


def test_engines_that_split_blocks_alike_share(starts):
    """A page that is split has all heads of a kernel's block before those of the next one."""
    whole, split = starts(64), starts(32)
    assert starts(64) == whole != split == starts(32)
    assert len({whole, split, starts(16)}) == 3


@pytest.mark.parametrize("page", [{"num_kv_heads": 1}, {"layout": KVCacheLayout.LBNHC}], ids=["a head", "by token"])
def test_pages_that_are_the_same_split_or_not_are_shared(starts, page):
    """With one head, or all heads of a token together, tokens lie one behind the other, whatever kernels there are."""
    assert starts(64, **page) == starts(32, **page)


def test_each_rank_is_heard(starts):
    """They find kernels by themselves."""
    assert starts(64, 64) == starts(64, 64)
    assert len({starts(*kernels) for kernels in ((64, 64), (32, 32), (64, 32), (32, 64))}) == 4


def test_an_engine_of_which_a_rank_is_not_heard_shares_with_none(starts):
    """Its pages may lie in either way."""
    assert len({starts(64), starts(None), starts(None)}) == 3
    assert len({starts(64, None), starts(64, None)}) == 2


def test_layers_that_a_rank_does_not_have_are_not_split(configured):
    """As of a group whose layers are all in other stages of a pipeline."""
    config = configured(**NAME, **SIZES)
    cache = planned(config, {"model.layers.0.attn": full_attention(block_size=BLOCK)}, 4 << 20)
    assert Engine(config, cache).splits({}) == [1]
