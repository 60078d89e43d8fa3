"""The scheduler's side against a real store, with vLLM's own managers and no engine: what is asked, fetched, stored."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import MultiModalConfig, WeightTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import KVConnectorOutput

from e2e.vllm_model import HEADS, KV_HEADS, LAYERS, WIDTH
from engine.conftest import BLOCK, CHUNK, full_attention
from engine.scheduler import tokens, wait_until
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.profile.steps import IN_FLIGHT
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.vllm.gate import FADE
from tiertune_connector.vllm.step_timing import StepMetadata

SLIDING = 128


def test_another_engine_gets_exactly_what_the_first_one_computed(engines):
    """All whole chunks come, byte for byte; the scheduler is put off until they are there, and never waits."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    asked = second.request("b", prompt)
    matched, put_off = second.matched(asked)
    assert matched == 256
    assert put_off > 0
    assert second.staged(asked) == [[True] * 4]


def test_a_prompt_that_nobody_has_is_computed(engines):
    """The answer is no tokens, and stays so however often vLLM asks."""
    engine = engines()
    request = engine.request("a", tokens(300))
    assert [engine.matched(request)[0] for _ in range(3)] == [0, 0, 0]


def test_what_is_on_the_device_is_not_fetched(engines):
    """With two chunks computed by the time the scheduler asks, the other two are fetched."""
    first, second = engines(), engines()
    first.compute(first.request("a", tokens(300)))
    asked = second.request("b", tokens(300))
    assert second.matched(asked, computed=128)[0] == 128
    assert second.staged(asked) == [[False, False, True, True]]


def test_a_store_that_was_flushed_gets_again_what_staging_has(engines, store):
    """The next request with the prompt learns what the store lacks, and cascades it; another engine then hits."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    store.store.flushes.drop()
    again = first.request("b", prompt)
    assert first.matched(again, computed=256)[0] == 0
    first.settle()
    assert second.matched(second.request("c", prompt))[0] == 256


def test_an_epoch_that_is_flushed_leaves_the_others(engines, store, remote):
    """Engines of two epochs share nothing; a flush of the old one drops everywhere what it stored, and no more."""
    prompt = tokens(300)
    for epoch in (1, 2):
        engine = engines(epoch=epoch)
        assert engine.matched(engine.request("a", prompt))[0] == 0
        engine.compute(engine.request("b", prompt))
    wait_until(lambda: sum(store.store.namespaces.served(name) is not None for name, _ in list(remote._chunks)) == 8)
    assert store.store.flushes.drop(epoch=1) == {"dram": (Outcome.OK, 4), "remote": (Outcome.OK, 4)}
    found = [engine.matched(engine.request("c", prompt))[0] for engine in (engines(epoch=1), engines(epoch=2))]
    assert found == [0, 256]


def test_a_waiting_requests_remote_chunks_are_brought_near(engines, store, remote):
    """Before the scheduler wants the request its chunks are in DRAM; nothing of them stays pinned."""
    first = engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    wait_until(lambda: len(remote._chunks) >= 4)
    pool = next(iter(store.store.dram.pools.values()))
    store.store.dram.flush(None, None)
    second = engines()
    second.tier._choosing._gate._prefill.observe_step([(0, 1000)] * 1, 1.0)
    for _ in range(5):
        second.tier._choosing._gate._prefill.observe_step([(0, 1000)], 1.0)
    lane = store.store.lanes["remote"]
    lane.transit.estimate = lambda *_: FetchEstimate(0.0, 1e-4, 1e9)
    waiting = second.request("b", prompt)
    wait_until(lambda: (second.step(), len(pool.pool) == 4)[1])
    wait_until(lambda: (second.step(), pool.pool.pinned == 0)[1])
    assert second.matched(waiting)[0] == 256


def test_a_load_that_is_over_sooner_than_predicted_is_ahead_of_nobody(engines, store, remote):
    """A slow link was foretold, and the chunks came at once: the gate believes no more that it is busy."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    wait_until(lambda: len(remote._chunks) >= 4)
    store.store.dram.flush(None, None)
    gate = second.tier._choosing._gate
    for _ in range(6):
        gate._prefill.observe_step([(0, 1000)], 10_000.0)
    slow = FetchEstimate(0.0, 5.0, 1e9)
    store.store.lanes["remote"].transit.estimate = lambda *_: slow
    assert second.matched(second.request("b", prompt))[0] == 256
    now = time.monotonic()
    assert gate.behind({"remote": slow, "dram": slow}, now, now) == {"remote": slow, "dram": slow}


def test_the_gate_knows_who_else_is_on_the_engine(engines):
    """Requests whose prompts are not computed yet, before and behind; one that is decoding is none."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    second.request("b", tokens(300, seed=1))
    asked = second.request("c", prompt)
    second.request("d", tokens(300, seed=2))
    assert second.matched(asked)[0] == 256
    assert [each.prefills for each in second.tier._lookups.get("c").decision.candidates] == [2]
    second.tier.given([("b", 0, 300)])
    assert second.tier.backlog.others("c") == 2
    second.tier.output()
    assert second.tier.backlog.others("c") == 1


def test_what_a_step_computes_is_done_when_its_output_comes(engines, monkeypatch):
    """With asynchronous scheduling the next step is given before that: a request waits for both until then.

    Its first token is there with the output of the step that computed the prompt's end, not with the next step given.
    """
    engine = engines()
    for _ in range(5):
        engine.tier._choosing._gate._prefill.observe_step([(0, 1000)], 1.0)
    told = []
    monkeypatch.setattr(engine.tier.telemetry, "first_token", lambda ask: told.append(ask.request))
    engine.request("a", tokens(300, seed=1))
    engine.request("b", tokens(300, seed=2))
    backlog_s = engine.tier.backlog.seconds
    whole_s = backlog_s("b")
    assert whole_s > 0
    engine.tier.given([("a", 0, 200)])
    engine.tier.given([("a", 200, 300)])
    engine.tier.given([])
    assert backlog_s("b") == whole_s
    engine.tier.output()
    assert 0 < backlog_s("b") < whole_s
    assert told == []
    engine.tier.given([("a", 300, 301), ("b", 0, 300)])
    engine.tier.output()
    assert (backlog_s("b"), told) == (0.0, ["a"])
    engine.tier.output()
    engine.tier.output()
    assert told == ["a", "b"]
    assert engine.tier.backlog.others("") == 0


def test_a_step_of_a_request_that_ended_tells_nothing_of_another_of_its_name(engines, monkeypatch):
    """An aborted request's step may be in flight when one of the same name comes: that has computed nothing."""
    engine, told = engines(), []
    monkeypatch.setattr(engine.tier.telemetry, "first_token", lambda ask: told.append(ask.request))
    aborted = engine.request("a", tokens(300, seed=1))
    engine.tier.given([("a", 0, 300)])
    engine.done(aborted)
    del engine.scheduler._req_status["a"]
    engine.request("a", tokens(300, seed=2))
    engine.tier.output()
    assert engine.tier.backlog.others("") == 1
    assert told == []


def test_a_load_of_a_request_that_ended_ends_none_of_another_of_its_name(engines, monkeypatch):
    """An aborted request's chunks may come when one of the same name loads its own: others stay behind these."""
    engine, ended = engines(), []
    monkeypatch.setattr(engine.tier.telemetry, "loaded", lambda *_: None)
    monkeypatch.setattr(engine.tier._choosing, "ended", lambda ask: ended.append(ask.request))
    old, own = (SimpleNamespace(request="a", succeeded=True) for _ in range(2))
    engine.request("a", tokens(300))
    engine.tier._loading["a"] = own
    engine.tier._loaded(old, [])
    assert ended == []
    engine.tier._loaded(own, [])
    assert ended == ["a"]


def test_what_a_request_that_ended_still_loads_is_ahead_of_others(engines, monkeypatch):
    """It comes all the same, and lapses when it was predicted to be over."""
    engine, ended = engines(), []
    monkeypatch.setattr(engine.tier._choosing, "ended", lambda ask: ended.append(ask.request))
    for request in ("a", "b"):
        aborted = engine.request(request, tokens(300))
        if request == "a":
            engine.tier._loading["a"] = SimpleNamespace(request="a")
        engine.done(aborted)
    assert ended == ["b"]


def test_steps_whose_output_never_comes_are_not_kept(engines):
    """As many as the profile keeps: an engine that told of none would fill its memory."""
    engine = engines()
    engine.request("a", tokens(300, seed=1))
    for place in range(IN_FLIGHT + 3):
        engine.tier.given([("a", place, place + 1)])
    assert len(engine.tier._advancing) == IN_FLIGHT


def test_unsalted_requests_neither_read_nor_write_where_salt_is_required(engines, store):
    """A salted one does both; another salt does not see it."""
    first, second = engines(isolation="require_salt"), engines(isolation="require_salt")
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    assert held(store) == 0
    first.compute(first.request("b", prompt, cache_salt="alice"))
    assert held(store) == 4
    assert second.matched(second.request("c", prompt))[0] == 0
    assert second.matched(second.request("d", prompt, cache_salt="bob"))[0] == 0
    assert second.matched(second.request("e", prompt, cache_salt="alice"))[0] == 256


def test_an_adapter_of_the_same_name_with_other_weights_never_hits(engines, home):
    """vLLM's keys have its name and path alone; the store's have its contents too."""
    first, second = engines(), engines()
    prompt = tokens(300)
    helper = adapter(home / "helper", 1)
    first.compute(first.request("a", prompt, lora_request=helper))
    assert second.matched(second.request("b", prompt))[0] == 0
    assert second.matched(second.request("c", prompt, lora_request=helper))[0] == 256
    other = adapter(home / "helper", 2)
    third = engines()
    assert third.matched(third.request("d", prompt, lora_request=other))[0] == 0


def test_chunks_of_other_weights_that_were_in_the_adapters_place_never_leave_the_engine(engines, home):
    """Loaded again with other weights, it finds in staging what the old ones computed; no other engine gets that."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt, lora_request=adapter(home / "helper", 1)))
    other = adapter(home / "helper", 2)
    other.lora_int_id = 2
    first.matched(first.request("b", prompt, lora_request=other), computed=256)
    first.settle()
    assert second.matched(second.request("c", prompt, lora_request=other))[0] == 0


def test_a_part_of_a_chunk_is_not_given_to_the_store(engines, store):
    """Nobody asks the store for it: vLLM keeps the last part of a recurrent model's prompt for its own staging."""
    engine = engines()
    request = engine.request("a", tokens(300))
    context, part = engine.context(request), make_offload_key(b"part" * 8, 0)
    context.set_offload_key_position(part, 288)
    for keys in ([part], [*engine.keys(request)[0], part]):
        prepared = engine.manager.prepare_store(keys, context)
        engine.manager.complete_store(prepared.keys_to_store, context)
        engine.settle()
    assert held(store) == 4
    assert engine.tier.telemetry._stats.totals["engine_stored_chunks_total", ("stored",)] == 4


def test_chunks_of_a_request_that_nobody_knows_are_not_stored(engines, store):
    """In doubt whose they are, they stay where they are; vLLM's job ends all the same."""
    engine = engines()
    request = engine.request("a", tokens(300))
    engine.tier._prompts.clear()
    engine.compute(request)
    assert held(store) == 0


class TestExchangedWeights:
    """A trainer sends an engine new weights while it runs; vLLM empties all caches before that."""

    @pytest.fixture
    def trained(self, engines):
        return engines(arguments={"weight_transfer_config": WeightTransferConfig()})

    def test_what_was_stored_before_a_reset_is_found_no_more(self, trained):
        """What is stored afterwards is, as ever."""
        prompt = tokens(300)
        trained.compute(trained.request("a", prompt))
        trained.connector.reset_cache()
        again = trained.request("b", prompt)
        assert trained.matched(again)[0] == 0
        trained.compute(again)
        trained.manager.primary_tier.reset_cache()
        assert trained.matched(trained.request("c", prompt))[0] == 256

    def test_a_request_that_is_kept_over_a_reset_neither_reads_nor_writes(self, trained, store):
        """Whether it was decided for or not: of what it has computed, nobody knows with which weights."""
        prompt = tokens(300)
        trained.compute(trained.request("a", prompt))
        trained.manager.primary_tier.reset_cache()
        loading, waiting = trained.request("b", prompt), trained.request("c", prompt)
        trained.begin_load(loading)
        trained.connector.reset_cache()
        trained.step("b")
        assert [trained.matched(request)[0] for request in (loading, waiting)] == [0, 0]
        before = held(store)
        trained.compute(waiting)
        assert held(store) == before
        for request in (loading, waiting):
            trained.done(request)

    def test_nobody_else_finds_what_it_stores(self, trained, engines):
        """Nor does it find what others stored."""
        mine, theirs = tokens(300), tokens(300, seed=1)
        other = engines()
        trained.compute(trained.request("a", mine))
        other.compute(other.request("a", theirs))
        assert other.matched(other.request("b", mine))[0] == 0
        assert trained.matched(trained.request("b", theirs))[0] == 0


def test_devices_that_ranks_tell_one_by_one_are_all_known(engines):
    """In a step each where one is behind; once each."""
    tier = engines().tier
    for gpus in (("GPU-a", "GPU-b"), (), ("GPU-c",), ("GPU-a",)):
        tier.measured({}, gpus)
    assert tier._client.gpus == ["GPU-a", "GPU-b", "GPU-c"]


def test_the_gate_hears_what_the_copy_to_the_devices_takes(engines):
    """Of both kinds of metadata; ranks copy at the same time, each its part."""
    connector = engines().connector
    for metadata, nbytes, seconds in ((OffloadingWorkerMetadata(), 100, 2.0), (StepMetadata(), 300, 4.0)):
        metadata.transfer_stats.load.record(nbytes, seconds)
        metadata.transfer_stats.store.record(7, 7.0)
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=metadata))
    assert connector.tier._gate._copied == (FADE * 100 + 300, FADE * 2.0 + 4.0)


@pytest.mark.parametrize(("replicated", "nbytes"), [(False, 400), (True, 200)])
def test_ranks_that_have_the_same_kv_copy_each_chunk_once_each(engines, monkeypatch, replicated, nbytes):
    """Two ranks: their bytes are those of all chunks, or of all twice; they copy at the same time anyway."""

    def config(*arguments):
        built = build_offloading_config(*arguments)
        return replace(built, replicated_layout=replicated, parallel=replace(built.parallel, world_size=2))

    monkeypatch.setattr(offloading_connector, "build_offloading_config", config)
    tier = engines().connector.tier
    tier.copied(400, 3.0)
    assert tier._gate._copied == (nbytes, 1.5)


def test_prompts_whose_logprobs_are_asked_for_are_not_looked_up(engines, store):
    """They are computed from their first token on, and wait for nothing."""
    engine = engines()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
    request = engine.request("a", tokens(300), sampling=sampling)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.compute(request)
    assert held(store) == 4


def test_a_request_that_may_not_load_from_a_tier_is_not_looked_up(engines):
    """It waits for no answer that it could not use."""
    engine = engines()
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"kv_load_tiers": []}})
    request = engine.request("a", tokens(300), sampling=sampling)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_long_engine_id_does_not_keep_an_engine_from_the_store(engines):
    """Its end, which tells the ranks of data parallelism apart, is the label."""
    engine = engines(engine_id="e" * 80 + "_dp1")
    assert engine.tier._client.connected


@pytest.mark.parametrize(("hashed", "shared"), [({}, 256), ({"enable_prefix_caching": False}, 0)])
def test_media_that_vllm_only_numbers_are_not_shared(engines, store, hashed, shared):
    """Without both of its caches vLLM does not hash an image but counts: the first one of every process is alike."""
    first, second = (engines(arguments=hashed, multimodal=MultiModalConfig(mm_processor_cache_gb=0)) for _ in range(2))
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="renderer0-mm-1-image-0", mm_position=PlaceholderRange(0, CHUNK)
    )
    prompt = tokens(300)
    first.compute(first.request("a", prompt, mm_features=[image]))
    assert second.matched(second.request("b", prompt, mm_features=[image]))[0] == shared
    text = tokens(300, seed=1)
    first.compute(first.request("c", text))
    assert second.matched(second.request("d", text))[0] == 256


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


def test_each_full_groups_chunks_are_handled(engines):
    """A prompt's chunk is one of the store's in each of them."""
    engine = engines(layers=mostly_full)
    decision = engine.tier._choosing._gate.choose(
        ["dram"] * 4,
        computed_tokens=0,
        prompt_tokens=300,
        costs={"dram": FetchEstimate(0.0, 0.02, 1e15)},
        settings={},
    )
    assert decision.fetch_s == pytest.approx(4 * 3 * 0.02)


class TestHybrid:
    """Two groups, full attention and a window of two chunks: a cut of tokens that both allow."""

    def test_a_cut_takes_the_chain_and_the_last_chunks_of_the_window(self, engines):
        """No more of the windowed group is fetched than vLLM needs."""
        first, second = engines(layers=hybrid), engines(layers=hybrid)
        prompt = tokens(64 * 6 + 10)
        first.compute(first.request("a", prompt))
        asked = second.request("b", prompt)
        assert second.matched(asked)[0] == 64 * 6
        whole, window = second.staged(asked)
        assert whole == [True] * 6
        assert window[-2:] == [True, True]
        assert not any(window[:3])

    def test_where_the_windows_chunk_is_missing_the_cut_is_shorter(self, engines):
        """The last chunk of the windowed group was not stored: all are cut one chunk before."""
        first, second = engines(layers=hybrid), engines(layers=hybrid)
        prompt = tokens(64 * 6 + 10)
        windowed = 1 - next(group.index for group in first.tier._groups if group.window_chunks is None)
        first.compute(first.request("a", prompt), only=lambda group, n: group != windowed or n < 5)
        assert second.matched(second.request("b", prompt))[0] == 64 * 5

    def test_where_the_window_has_no_room_nothing_is_told_as_saved(self, engines, store, monkeypatch):
        """vLLM computes the prompt at once, with the chain on its way: that brings nothing, and nobody waits for it."""
        first = engines(layers=hybrid)
        prompt = tokens(64 * 6 + 10)
        first.compute(first.request("a", prompt))
        small = engines(layers=hybrid, staging=str(7 * first.rows.shape[1]))
        for _ in range(5):
            small.tier._choosing._gate._prefill.observe_step([(0, 394)], 1.0)
        asked = small.request("b", prompt)
        wait_until(small.tier._lookups.get("b").reply.done)
        waited = waits(small, monkeypatch)
        assert small.matched(asked) == (0, 0)
        small.settle()
        assert waited == [0]
        assert small.tier._lookups.get("b").decision.cut == 6
        small.done(asked)
        assert gated(small) == {("gate_requests_total", ("dram", "fetch", "cheaper")): 1}
        wait_until(lambda: told(store, "duplicate_prefill_tokens_total") == 64 * 6)

    def test_only_the_chain_counts_as_tokens(self, engines, monkeypatch):
        """The window's chunks are of the same tokens."""
        first, second = engines(layers=hybrid), engines(layers=hybrid)
        prompt = tokens(64 * 6 + 10)
        first.compute(first.request("a", prompt))
        waited = waits(second, monkeypatch)
        assert second.matched(second.request("b", prompt))[0] == 64 * 6
        assert waited == [64 * 6]
        assert gated(second)["fetched_tokens_total", ("dram",)] == 64 * 6

    def test_a_last_chunk_whose_last_token_is_computed_came_whole(self, engines):
        """Of a prompt that ends with a chunk vLLM takes one token less."""
        first, second = engines(layers=hybrid), engines(layers=hybrid)
        prompt = tokens(64 * 6)
        first.compute(first.request("a", prompt))
        assert second.matched(second.request("b", prompt))[0] == 64 * 6 - 1
        assert gated(second)["fetched_tokens_total", ("dram",)] == 64 * 6


def test_what_another_request_fetches_is_told_once(engines, store, monkeypatch):
    """Two prompts with a common head at a time: the second fetches its own rest alone, and both waited."""
    first, second = engines(), engines()
    prompt = tokens(300)
    longer = prompt[:256] + tokens(150, seed=1)
    first.compute(first.request("a", longer))
    waited = waits(second, monkeypatch)
    requests = [second.request("b", prompt), second.request("c", longer), second.request("d", prompt)]
    second.begin_load(*requests)
    assert [second.matched(request)[0] for request in requests] == [256, 384, 256]
    assert sorted(waited) == [0, 128, 256]
    assert gated(second)["fetched_tokens_total", ("dram",)] == 384
    wait_until(lambda: told(store, "gate_fetched_tokens_total") == 384)
    assert told(store, "duplicate_prefill_tokens_total") == 0


def test_what_a_request_may_not_load_is_not_told_as_fetched(engines):
    """Its client bounds the tokens that are loaded for it."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"max_load_tokens": 128}})
    assert second.matched(second.request("b", prompt, sampling=sampling))[0] == 128
    assert second.tier._lookups.get("b").decision.cut == 4
    assert gated(second)["fetched_tokens_total", ("dram",)] == 128


def test_what_staging_lost_before_it_was_taken_is_not_told_as_saved(engines, store):
    """It came in time, and in vain: a load that failed, of what is computed again."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.compute(first.request("a", prompt))
    asked = second.request("b", prompt)
    second.begin_load(asked)
    second.settle()
    second.manager.primary_tier.reset_cache()
    assert second.matched(asked)[0] == 0
    second.done(asked)
    assert gated(second) == {
        ("gate_requests_total", ("dram", "fetch", "unknown_cost")): 1,
        ("loads_total", ("dram", "failed")): 1,
        ("fetched_tokens_total", ("dram",)): 256,
    }
    wait_until(lambda: told(store, "duplicate_prefill_tokens_total") == 256)


def told(store, name):
    """What the store counted."""
    return sum(row[-1] for row in store.counters.snapshot()[1].get(name, {"rows": []})["rows"])


def waits(engine, monkeypatch):
    """Tokens of each request that waited for its chunks, as they come."""
    counts = []
    monkeypatch.setattr(engine.tier.telemetry.steps, "kv_wait", lambda _seconds, count: counts.append(count))
    return counts


def gated(engine):
    """What the engine counted of gates and loads, and how often or how much."""
    totals = engine.tier.telemetry._stats.totals
    names = {"engine_gate_requests_total", "engine_loads_total", "engine_fetched_tokens_total"}
    return {(name.removeprefix("engine_"), labels): count for (name, labels), count in totals.items() if name in names}


def adapter(folder, fill):
    """A LoRA adapter on disk: its contents follow from ``fill``, its name does not."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes([fill]) * 16)
    return SimpleNamespace(lora_name="helper", name="helper", lora_int_id=1, lora_path=str(folder), path=str(folder))


def held(store):
    return sum(len(pool.pool) for pool in store.store.dram.pools.values())
