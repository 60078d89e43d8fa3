"""The scheduler's side where layers are in groups: full attention and sliding windows."""

from concurrent.futures import Future
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from e2e.vllm_model import HEADS, KV_HEADS, LAYERS, WIDTH
from engine.conftest import BLOCK, full_attention
from engine.scheduler import far_from_a_small_dram, gated, tokens, told, wait_until, waits
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.protocol.messages import LookupReply
from tiertune_connector.vllm.lookups import Ask

SLIDING = 128


def hybrid():
    """Layers of the tiny model, the last half of them with a sliding window."""
    window = SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=WIDTH // HEADS,
        dtype=torch.float32,
        sliding_window=SLIDING,
    )
    return {f"model.layers.{n}.attn": full_attention() if n < LAYERS // 2 else window for n in range(LAYERS)}


def mostly_full():
    """The same but for the last one alone: three groups of full attention."""
    layers = hybrid()
    return layers | {name: full_attention() for name in list(layers)[:-1]}


def long_windows():
    """The same where vLLM makes a windowed layer's blocks twice as long, as its tokens take half the bytes."""
    return {
        name: replace(spec, num_kv_heads=2 * KV_HEADS) if isinstance(spec, FullAttentionSpec) else spec
        for name, spec in hybrid().items()
    }


def all_sliding():
    """All layers with a window: one group."""
    layers = hybrid()
    return dict.fromkeys(layers, list(layers.values())[-1])


@pytest.mark.parametrize(("layers", "chunks"), [(hybrid, 4), (mostly_full, 1), (all_sliding, 10)])
def test_all_groups_chunks_need_room_in_dram(engines, store, remote, layers, chunks):
    """Six of the store's chunks come into a DRAM of eight: so many of the prompt's, with the window's last two."""
    first, second = engines(layers=layers), engines(layers=layers)
    asked = second.request("b", far_from_a_small_dram(first, second, store, remote))
    assert second.matched(asked) == 64 * chunks
    second.done(asked)
    counts = gated(second)
    assert counts["loads_total", ("remote", "won")] == 1
    assert ("loads_total", ("remote", "failed")) not in counts


@pytest.mark.parametrize(("length", "chunks", "found"), [(64, 0, 0), (127, 0, 0), (200, 2, 128), (300, 4, 256)])
def test_nothing_is_fetched_behind_the_last_whole_chunk_of_any_group(engines, length, chunks, found):
    """vLLM would not take it: of the chunks of 64 tokens no more are looked up than the windows' of 128 allow."""
    first, second = engines(layers=long_windows, chunk_tokens=128), engines(layers=long_windows, chunk_tokens=128)
    assert [group.chunk_tokens for group in second.tier._groups] == [64, 128]
    prompt = tokens(length)
    first.computes("a", prompt)
    second.tier.telemetry.tracing.sink = object()  # nobody takes its spans
    asked = second.request("b", prompt)
    second.tier.telemetry.tracing.sink, ask = None, second.ask("b")
    assert len(ask.chain if ask else []) == second.tier._requests["b"].trace.chunks == chunks
    assert second.matched(asked) == found
    assert not any(second.staged(asked)[0][chunks:])


def test_each_full_groups_chunks_are_handled(engines):
    """A prompt's chunk is one of the store's in each of them."""
    engine = engines(layers=mostly_full)
    reply = Future()
    reply.set_result(LookupReply(1, ["dram"] * 4, {"dram": FetchEstimate(0.0, 0.02, 1e15)}, {}))
    decision = engine.tier.gate.decide(Ask("a", 300, [], [], reply, 0.0, Mock()), 0)
    assert decision.fetch_s == pytest.approx(4 * 3 * 0.02)


class TestHybrid:
    """Two groups, full attention and a window of two chunks: a cut of tokens that both allow."""

    @pytest.fixture
    def first(self, engines):
        return engines(layers=hybrid)

    @pytest.fixture
    def second(self, engines, first):
        return engines(layers=hybrid)

    @pytest.fixture
    def prompt(self, first):
        """Of six chunks and a part of one, which the first engine has computed."""
        prompt = tokens(64 * 6 + 10)
        first.computes("a", prompt)
        return prompt

    def test_a_cut_takes_the_chain_and_the_last_chunks_of_the_window(self, second, prompt):
        """No more of the windowed group is fetched than vLLM needs."""
        asked = second.request("b", prompt)
        assert second.matched(asked) == 64 * 6
        whole, window = second.staged(asked)
        assert whole == [True] * 6
        assert window[-2:] == [True, True]
        assert not any(window[:3])

    def test_where_the_windows_chunk_is_missing_the_cut_is_shorter(self, first, second):
        """The last chunk of the windowed group was not stored: all are cut one chunk before."""
        prompt = tokens(64 * 6 + 10)
        windowed = 1 - next(group.index for group in first.tier._groups if group.window_chunks is None)
        first.compute(first.request("a", prompt), only=lambda group, n: group != windowed or n < 5)
        assert second.finds("b", prompt) == 64 * 5

    def test_where_the_window_has_no_room_nothing_is_told_as_saved(self, first, prompt, engines, store, monkeypatch):
        """vLLM computes the prompt at once, with the chain on its way: that brings nothing, and nobody waits for it."""
        small = engines(layers=hybrid, staging=str(7 * first.rows.shape[1]))
        small.took(394, 1.0)
        asked = small.request("b", prompt)
        wait_until(small.ask("b").reply.done)
        waited = waits(small, monkeypatch)
        assert (small.matched(asked), small.put_off) == (0, 0)
        small.settle()
        assert waited == [0]
        assert small.ask("b").decision.cut == 6
        small.done(asked)
        assert gated(small) == {("gate_requests_total", ("dram", "fetch", "cheaper")): 1}
        wait_until(lambda: told(store, "duplicate_prefill_tokens_total") == 64 * 6)

    def test_only_the_chain_counts_as_tokens(self, second, prompt, monkeypatch):
        """The window's chunks are of the same tokens."""
        waited = waits(second, monkeypatch)
        assert second.finds("b", prompt) == 64 * 6
        assert waited == [64 * 6]
        assert gated(second)["fetched_tokens_total", ("dram",)] == 64 * 6

    def test_a_last_chunk_whose_last_token_is_computed_came_whole(self, first, second):
        """Of a prompt that ends with a chunk vLLM takes one token less."""
        prompt = tokens(64 * 6)
        first.computes("a", prompt)
        assert second.finds("b", prompt) == 64 * 6 - 1
        assert gated(second)["fetched_tokens_total", ("dram",)] == 64 * 6
