"""KV events of chunks that come from the store: as complete as those of chunks that the engine computed."""

from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadingKVEventsConfig, make_offload_key

from engine.scheduler import tokens
from tiertune_connector.vllm.offloading import Offloading

BLOCK, PER_CHUNK, CHUNKS = 4, 2, 3
HASHES = [bytes([number]) * 32 for number in range(BLOCK * PER_CHUNK * CHUNKS // BLOCK)]
KEYS = [make_offload_key(HASHES[PER_CHUNK * chunk + PER_CHUNK - 1], 0) for chunk in range(CHUNKS)]


@pytest.fixture
def describing():
    return True


@pytest.fixture
def scheduler(describing):
    """As much of vLLM's as the events need: one request of three chunks of two blocks, its own tracker."""
    group = GroupOffloadConfig(
        group_idx=0,
        tokens_per_block=BLOCK,
        tokens_per_chunk=BLOCK * PER_CHUNK,
        hashes_per_chunk=PER_CHUNK,
        kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
        sliding_window_size_in_chunks=None,
        kv_cache_spec=None,
        manager_cls=None,
    )
    status = SimpleNamespace(
        req=SimpleNamespace(
            block_hashes=HASHES, all_token_ids=list(range(BLOCK * PER_CHUNK * CHUNKS)), lora_request=None
        ),
        group_states=(SimpleNamespace(offload_keys=KEYS),),
    )
    return SimpleNamespace(
        config=SimpleNamespace(kv_group_configs=(group,)),
        _req_status={"r": status},
        manager=Mock(),
        _events_tracker=OffloadingEventsTracker(OffloadingKVEventsConfig(True, describing)),
    )


def told(scheduler, *, removed=False):
    event = OffloadingEvent(keys=KEYS[1:], medium=Medium.CPU, removed=removed)
    return list(scheduler._events_tracker.take_events([event]))


def test_a_loaded_chunk_is_announced_with_its_tokens_and_blocks(scheduler):
    """And its removal names the blocks that were announced."""
    Offloading(scheduler).describe("r", KEYS[1:])
    stored, removed = told(scheduler), told(scheduler, removed=True)
    assert all(isinstance(event, BlockStored) and event.block_size == BLOCK for event in stored)
    assert [event.token_ids for event in stored] == [list(range(8, 16)), list(range(16, 24))]
    announced = {block for event in stored for block in event.block_hashes}
    assert len(announced) == 2 * PER_CHUNK
    assert isinstance(removed[0], BlockRemoved)
    assert set(removed[0].block_hashes) == announced


def test_without_it_vllm_announces_no_tokens(scheduler):
    """Why it is there: a load that ended between two lookups."""
    assert [(event.token_ids, event.block_size) for event in told(scheduler)] == [([], 0)] * 2


def test_of_a_request_that_is_gone_nothing_is_known(scheduler):
    """It raises nothing."""
    Offloading(scheduler).describe("another", KEYS)
    assert told(scheduler)[0].token_ids == []


@pytest.mark.parametrize("describing", [False])
def test_it_does_nothing_where_events_are_not_self_describing(scheduler):
    """Nothing is kept that no event would take along."""
    Offloading(scheduler).describe("r", KEYS)
    assert scheduler._events_tracker._pending_event_metadata == {}


def test_who_follows_hears_that_a_reset_emptied_staging(engines, prompt):
    """Of every block that was announced, as often as it was, and of none that was not; later ones are announced."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = engines(arguments={"kv_events_config": events}, self_describing_kv_events=True)
    followed = Counter()

    def follow():
        for event in engine.connector.take_events():
            (followed.update if isinstance(event, BlockStored) else followed.subtract)(event.block_hashes)
        return sorted(followed.values())

    assert engine.finds("b", prompt) == 256
    assert follow() == [1] * 8
    engine.computes("c", tokens(300, seed=1))
    engine.connector.reset_cache()
    assert follow() == [0] * 8
    assert engine.finds("d", prompt) == 256
    assert follow() == [1] * 8


def test_what_a_reset_took_before_it_was_announced_leaves_nothing(engines, prompt):
    """A load has ended in the step before: its chunks are in staging no more, so that no removal will ever come."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = engines(arguments={"kv_events_config": events}, self_describing_kv_events=True)
    assert engine.finds("b", prompt) == 256
    engine.connector.reset_cache()
    assert list(engine.connector.take_events()) == []
    assert engine.scheduler._events_tracker._pending_event_metadata == {}
