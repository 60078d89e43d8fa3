"""Keeps chunks of windowed groups out of staging and the store once vLLM has let go of part of them.

In a group with a window, vLLM frees blocks before a request ends, but takes a chunk for whole as long as it has the
last of its blocks. So a chunk stored late (staging had no room, or was emptied) may lack blocks that a hit needs, or
take them from a list where they are another request's by now: whoever loads it would get foreign tokens. And the worker
puts a group's blocks one after another from the first on: one missing in between would shift all that follow.

A model with R-SWA (reference sliding window attention, `rswa_window`) sees its whole prompt and the last tokens of its
answer. vLLM frees the blocks between them, and does not count it among models with a window. Only its prompts are
stored: the answer's keys and values differ anyway from those of a prompt with the same tokens.
"""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections.abc import Collection, Iterator
from typing import Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext, get_offload_group_idx

NULL = 0
"""vLLM's block in place of one that it let go of."""


def guard(scheduler: Any) -> None:  # noqa: ANN401 (its Scheduler)
    """Have vLLM's scheduler store only those chunks of a windowed group that have all that a hit needs.

    And only prompts of a model with R-SWA.
    """
    if any(hasattr(config.kv_cache_spec, "rswa_window") for config in scheduler.config.kv_group_configs):
        scheduler.config = scheduler.config._replace(offload_prompt_only=True)
    prepare = scheduler.manager.prepare_store

    def prepare_store(keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        lacking: set[OffloadKey] = set()
        status = scheduler._req_status.get(req_context.req_id)  # noqa: SLF001
        for config, state in _windowed(scheduler, status) if status else ():
            of_group = [key for key in keys if get_offload_group_idx(key) == config.group_idx]
            # vLLM also takes a hit where another group's chunk ends: that may be inside this group's chunk.
            inside = any(
                other.tokens_per_chunk % config.tokens_per_chunk for other in scheduler.config.kv_group_configs
            )
            lacking |= _lacking(of_group, req_context, config, state, whole=inside)
        return prepare([key for key in keys if key not in lacking] if lacking else keys, req_context)

    scheduler.manager.prepare_store = prepare_store


def emptied(scheduler: Any) -> None:  # noqa: ANN401 (its Scheduler)
    """Call before vLLM's scheduler empties staging and begins to store all requests anew from their first chunk.

    It has not followed whose the blocks of the chunks it had stored are now.
    """
    for status in scheduler._req_status.values():  # noqa: SLF001
        for config, state in _windowed(scheduler, status):
            stored = state.next_stored_chunk_idx * _per_chunk(config)
            state.block_ids[:stored] = [NULL] * min(stored, len(state.block_ids))


def _windowed(scheduler: Any, status: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 (its RequestOffloadState)
    """Each windowed group's configuration, and its state of a request.

    For a recurrent layer that keeps its states apart (`align`), vLLM stores these, and no blocks of the list.
    """
    for config, state in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
        if config.sliding_window_size_in_chunks is not None and not getattr(config, "requires_cow_source", False):
            yield config, state


def _lacking(
    keys: list[OffloadKey],
    context: ReqContext,
    config: Any,  # noqa: ANN401 (its GroupOffloadConfig)
    state: Any,  # noqa: ANN401 (its RequestGroupState)
    *,
    whole: bool,
) -> set[OffloadKey]:
    """Those of ``keys``, in the prompt's order, that are not to be stored.

    A chunk that is stored may lack blocks that no hit needs. Then all blocks before these are left out, too, so that it
    begins with the missing ones: the worker can do that for the first chunk only, so no earlier one is stored.
    ``whole``: hits end inside chunks, and may need any block.
    """
    per_chunk, table = _per_chunk(config), state.block_ids
    lacking: set[OffloadKey] = set()
    first = False
    for key in reversed(keys):
        end = context.get_offload_key_position(key) or 0
        last = end // config.tokens_per_block
        needed = -(-_needed_tokens(config.kv_cache_spec, end) // config.tokens_per_block)
        needed = per_chunk if whole else min(per_chunk, needed)
        blocks = table[last - per_chunk : last]
        if first or NULL in blocks[-needed:] or last <= state.next_stored_chunk_idx * per_chunk:
            lacking.add(key)
        elif NULL in blocks:
            first = True
            gone = per_chunk - blocks[::-1].index(NULL)
            table[last - per_chunk : last - per_chunk + gone] = [NULL] * gone
    return lacking


def _needed_tokens(spec: Any, end: int) -> int:  # noqa: ANN401 (vLLM's KVCacheSpec)
    """Tokens before ``end`` that a hit there needs, even if its last token is computed anyway."""
    if isinstance(spec, SlidingWindowSpec):
        return spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return (end - 1) % spec.attention_chunk_size + 1
    return 1  # a recurrent layer's state


def _per_chunk(config: Any) -> int:  # noqa: ANN401 (its GroupOffloadConfig)
    return config.tokens_per_chunk // config.tokens_per_block
