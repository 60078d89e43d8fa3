"""How large a chunk and staging come out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.vllm.probes import UnsupportedError
from tiertune_connector.vllm.sizes import PAGE_BYTES, plan

LLAMA_8B = {"block_tokens": (16,), "block_bytes": 16 * 131_072, "batched_tokens": 8192, "prompt_tokens": 32_768}
"""128 KiB of KV per token."""


def test_the_formula_of_the_readme():
    """KV bytes per token times twice a step's and twice the longest prompt's tokens: 10 GiB for 8 B and 32 k."""
    planned = plan(**LLAMA_8B, chunk_tokens=256)
    assert planned.staging_bytes == 131_072 * (2 * 8192 + 2 * 32_768) == 10 * 2**30
    assert planned.prompt_bytes == 131_072 * 32_768
    assert planned.row_bytes == 256 * 131_072


@pytest.mark.parametrize(("block", "blocks"), [(16, 16), (32, 8), (128, 2), (256, 1), (528, 1), (96, 2)])
def test_a_chunk_has_about_256_tokens_where_nobody_says(block, blocks):
    """In whole blocks, and at least one."""
    assert plan(**LLAMA_8B | {"block_tokens": (block,)}, chunk_tokens=None).blocks_per_chunk == blocks


@pytest.mark.parametrize(("wanted", "near"), [(100, "96 or 112"), (8, ": 16")])
def test_a_chunk_that_is_no_whole_blocks_is_refused(wanted, near):
    """The message names the sizes beside it."""
    message = rf"kv_connector_extra_config\.chunk_tokens: {wanted} is no multiple of the engine's block of 16"
    with pytest.raises(UnsupportedError, match=message) as error:
        plan(**LLAMA_8B, chunk_tokens=wanted)
    assert near in str(error.value)


def test_groups_with_other_blocks_have_other_chunks():
    """`chunk_tokens` counts in the largest block; every group's chunk has equally many blocks, and the same bytes."""
    planned = plan(**LLAMA_8B | {"block_tokens": (16, 64)}, chunk_tokens=128)
    assert planned.chunk_tokens == (32, 128)
    assert planned.blocks_per_chunk == 2


@given(
    blocks=st.lists(st.sampled_from([16, 32, 64, 528]), min_size=1, max_size=3),
    block_bytes=st.integers(1, 10**8),
    batched=st.integers(1, 10**5),
    prompt=st.integers(1, 10**6),
    times=st.integers(1, 64),
)
def test_staging_is_whole_chunks_and_holds_two_prompts(blocks, block_bytes, batched, prompt, times):
    """Of whatever sizes: whole pages, whole chunks, room for two of the longest prompts in every group."""
    wanted = times * max(blocks)
    planned = plan(blocks, block_bytes, batched_tokens=batched, prompt_tokens=prompt, chunk_tokens=wanted)
    assert planned.row_bytes % PAGE_BYTES == 0
    assert 0 <= planned.row_bytes - block_bytes * times < PAGE_BYTES
    assert planned.staging_bytes % planned.row_bytes == 0
    needed = sum(-(-2 * (batched + prompt) // tokens) for tokens in planned.chunk_tokens)
    assert planned.staging_bytes == planned.row_bytes * needed
    assert planned.prompt_bytes <= planned.staging_bytes
