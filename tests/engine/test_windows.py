"""Which chunks of a group with a window vLLM's scheduler may store: blocks that it let go of are not in them."""

import pytest
import torch
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, RSWASpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from e2e.vllm_model import HEADS, KV_HEADS, LAYERS, WIDTH
from engine.conftest import BLOCK, full_attention
from engine.scheduler import tokens
from tiertune_connector.vllm.windows import _needed_tokens

HEAD = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_size": WIDTH // HEADS, "dtype": torch.float32}
CHUNKS, PER_CHUNK = 4, 4


def narrow():
    """Half of the layers see 40 tokens: two blocks, half a chunk."""
    window = SlidingWindowSpec(sliding_window=40, **HEAD)
    return {f"model.layers.{n}.attn": full_attention() if n < LAYERS // 2 else window for n in range(LAYERS)}


def coarse():
    """They see 20, and have one head: vLLM makes their blocks, and so their chunks, twice as large."""
    window = SlidingWindowSpec(sliding_window=20, **HEAD | {"num_kv_heads": 1})
    return narrow() | {f"model.layers.{n}.attn": window for n in range(LAYERS // 2, LAYERS)}


def reference():
    """They see the prompt and the last 40 tokens of the answer."""
    return {f"model.layers.{n}.attn": RSWASpec(rswa_window=40, **HEAD) for n in range(LAYERS)}


@pytest.fixture
def layers():
    return narrow


@pytest.fixture
def chunk(layers):
    """Tokens of the windowed group's."""
    return PER_CHUNK * BLOCK * (2 if layers is coarse else 1)


@pytest.fixture
def engine(engines, layers, chunk):
    return engines(layers=layers, chunk_tokens=chunk)


@pytest.fixture
def stored(engine, chunk):
    """Whether each chunk of the windowed group, and of the other, is stored where those blocks are gone."""
    request = engine.request("a", tokens(CHUNKS * chunk + 10))
    states = engine.scheduler._req_status["a"].group_states
    (windowed,) = (
        state
        for config, state in zip(engine.scheduler.config.kv_group_configs, states, strict=True)
        if config.sliding_window_size_in_chunks is not None
    )
    for state in states:
        state.block_ids = list(range(1, CHUNKS * PER_CHUNK + 2))

    def store(*gone, begun=0):
        windowed.next_stored_chunk_idx = begun
        for place in gone:
            windowed.block_ids[place] = 0
        keys = [key for state in states for key in state.offload_keys]
        taken = set(engine.manager.prepare_store(keys, engine.context(request)).keys_to_store)
        (other,) = (state for state in states if state is not windowed)
        assert taken.issuperset(other.offload_keys), "of the whole chain nothing is ever gone"
        return [key in taken for key in windowed.offload_keys], windowed.block_ids

    return store


def test_with_all_blocks_there_all_chunks_are_stored(stored):
    """And the list of blocks is left as it is."""
    told, blocks = stored()
    assert told == [True] * CHUNKS
    assert 0 not in blocks


@pytest.mark.parametrize("gone", [6, 7])
def test_a_chunk_without_a_block_that_a_hit_needs_is_not_stored(stored, gone):
    """Either of the last two, though vLLM looks at the last one alone: in the chunk's row are foreign tokens there."""
    told, _ = stored(gone)
    assert told == [True, False, True, True]


def test_a_chunk_that_begins_with_what_is_gone_is_stored_first(stored):
    """No hit needs that. But of a chunk before it the worker would take the blocks of this one for the next row's."""
    told, blocks = stored(4, 5)
    assert told == [False, True, True, True]
    assert blocks[4:8] == [0, 0, 7, 8]


def test_no_block_is_gone_amid_others(stored):
    """The worker would put the rest one place too far ahead: those before it are let go of, too."""
    told, blocks = stored(5)
    assert told == [False, True, True, True]
    assert blocks[4:8] == [0, 0, 7, 8]


@pytest.mark.parametrize("layers", [coarse])
def test_a_hit_ends_inside_a_chunk_where_the_others_are_finer(engines, engine, chunk):
    """Of the chain three chunks of half the size are there: in the middle of the window's second one vLLM goes on."""
    prompt = tokens(CHUNKS * chunk)
    engine.compute(engine.request("a", prompt), only=lambda group, index: group == 1 or index < 3)
    other = engines(layers=coarse, chunk_tokens=chunk)
    assert other.finds("b", prompt) == chunk + chunk // 2


@pytest.mark.parametrize("layers", [coarse])
@pytest.mark.parametrize("gone", [4, 5, 6, 7])
def test_where_hits_end_inside_chunks_they_are_stored_whole_or_not_at_all(stored, gone):
    """The one that ends in the middle needs what is before it: any block counts as needed, and none is let go of."""
    told, blocks = stored(gone)
    assert told == [True, False, True, True]
    assert [place for place, block in enumerate(blocks) if not block] == [gone]


def test_chunks_that_vllm_has_dealt_with_before_are_not_stored_later(stored):
    """It has not followed since whose their blocks are."""
    assert stored(begun=2)[0] == [False, False, True, True]


def test_after_a_reset_what_was_stored_is_not_stored_anew(engine, stored):
    """vLLM begins with the first chunk again, and with blocks that may be another request's."""
    stored(begun=2)
    engine.connector.reset_cache()
    told, blocks = stored()
    assert told == [False, False, True, True]
    assert blocks[: 2 * PER_CHUNK] == [0] * 2 * PER_CHUNK


@pytest.mark.parametrize(("end", "needed"), [(96, 32), (128, 64), (192, 64), (224, 32)])
def test_what_a_hit_needs_of_attention_in_fixed_pieces(end, needed):
    """From the beginning of the piece in which the last token lies, which is computed all the same."""
    assert _needed_tokens(ChunkedLocalAttentionSpec(attention_chunk_size=64, **HEAD), end) == needed


@pytest.mark.parametrize(("layers", "stored"), [(None, 320), (reference, 128)], ids=["all tokens seen", "R-SWA"])
def test_of_a_model_with_rswa_prompts_alone_are_stored(engines, layers, stored):
    """vLLM frees blocks of its answers, and does not say so: what is stored late would be another request's."""
    engine = engines(layers=layers)
    request = engine.request("a", tokens(140))
    request.append_output_token_ids(tokens(200, seed=1))
    assert engine.end(request, RequestStatus.FINISHED_STOPPED, computed=339) == stored
