"""The scheduler's side against a real store, with vLLM's own managers and no engine: what is fetched and stored."""

import time

import pytest
from vllm.config import MultiModalConfig, WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import make_offload_key

from engine.conftest import CHUNK
from engine.scheduler import tokens, wait_until
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.tiers.base import Outcome


def test_another_engine_gets_exactly_what_the_first_one_computed(engine, prompt):
    """All whole chunks come, byte for byte; the scheduler is put off until they are there, and never waits."""
    asked = engine.request("b", prompt)
    assert engine.matched(asked) == 256
    assert engine.put_off > 0
    assert engine.staged(asked) == [[True] * 4]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_of_any_role_loads_and_stores(engines, role):
    """`kv_role` is heeded neither way, as connector/README.md says."""
    first, second = engines(), engines(arguments={"role": role})
    first.computes("a", tokens(300))
    assert second.finds("b", tokens(300)) == 256
    second.computes("c", tokens(300, seed=1))
    assert first.finds("d", tokens(300, seed=1)) == 256


def test_a_prompt_that_nobody_has_is_computed(engine):
    """The answer is no tokens, and stays so however often vLLM asks."""
    request = engine.request("a", tokens(300))
    assert [engine.matched(request) for _ in range(3)] == [0, 0, 0]


def test_time_to_fetch_does_not_run_while_vllm_cannot_look(engine, prompt):
    """It does not look for what a request has that was preempted, before the worker has stored what that computed."""
    asked = engine.request("b", prompt)
    wait_until(engine.ask("b").reply.done)
    storing = engine.scheduler._req_status["b"].transfer_jobs
    storing.add(0)
    assert engine.connector.get_num_new_matched_tokens(asked, 0) == (None, False)
    engine.tier._lookups.clock = lambda: time.monotonic() + 3600
    storing.clear()
    assert engine.matched(asked) == 256


def test_what_is_on_the_device_is_not_fetched(engine, prompt):
    """With two chunks computed by the time the scheduler asks, the other two are fetched."""
    asked = engine.request("b", prompt)
    assert engine.matched(asked, computed=128) == 128
    assert engine.staged(asked) == [[False, False, True, True]]


def test_a_store_that_was_flushed_gets_again_what_staging_has(engine, prompt, engines, store):
    """The next request with the prompt learns what the store lacks, and cascades it; another engine then hits."""
    engine.computes("b", prompt)
    store.store.flushes.drop()
    assert engine.matched(engine.request("c", prompt), computed=256) == 0
    engine.settle()
    assert engines().finds("d", prompt) == 256


def test_an_epoch_that_is_flushed_leaves_the_others(engines, store, remote):
    """Engines of two epochs share nothing; a flush of the old one drops everywhere what it stored, and no more."""
    prompt = tokens(300)
    for epoch in (1, 2):
        engine = engines(epoch=epoch)
        assert engine.finds("a", prompt) == 0
        engine.computes("b", prompt)
    wait_until(lambda: sum(store.store.namespaces.served(name) is not None for name, _ in list(remote._chunks)) == 8)
    assert store.store.flushes.drop(epoch=1) == {"dram": (Outcome.OK, 4), "remote": (Outcome.OK, 4)}
    found = [engine.finds("c", prompt) for engine in (engines(epoch=1), engines(epoch=2))]
    assert found == [0, 256]


def test_a_waiting_requests_remote_chunks_are_brought_near(engine, prompt, store, remote):
    """Before the scheduler wants the request its chunks are in DRAM; nothing of them stays pinned."""
    wait_until(lambda: len(remote._chunks) >= 4)
    pool = next(iter(store.store.dram.pools.values()))
    store.store.dram.flush(None, None)
    engine.took(1000, 1.0)
    lane = store.store.lanes["remote"]
    lane.transit.estimate = lambda *_: FetchEstimate(0.0, 1e-4, 1e9)
    waiting = engine.request("b", prompt)
    wait_until(lambda: (engine.step(), len(pool.pool) == 4)[1])
    wait_until(lambda: (engine.step(), pool.pool.pinned == 0)[1])
    assert engine.matched(waiting) == 256


def test_unsalted_requests_neither_read_nor_write_where_salt_is_required(engines, store):
    """A salted one does both; another salt does not see it."""
    first, second = engines(isolation="require_salt"), engines(isolation="require_salt")
    prompt = tokens(300)
    first.computes("a", prompt)
    assert held(store) == 0
    first.computes("b", prompt, cache_salt="alice")
    assert held(store) == 4
    assert second.finds("c", prompt) == 0
    assert second.finds("d", prompt, cache_salt="bob") == 0
    assert second.finds("e", prompt, cache_salt="alice") == 256


def test_an_adapter_of_the_same_name_with_other_weights_never_hits(engines, home):
    """vLLM's keys have its name and path alone; the store's have its contents too."""
    first, second = engines(), engines()
    prompt = tokens(300)
    helper = adapter(home / "helper", 1)
    first.computes("a", prompt, lora_request=helper)
    assert second.finds("b", prompt) == 0
    assert second.finds("c", prompt, lora_request=helper) == 256
    other = adapter(home / "helper", 2)
    third = engines()
    assert third.finds("d", prompt, lora_request=other) == 0


def test_chunks_of_other_weights_that_were_in_the_adapters_place_never_leave_the_engine(engines, home):
    """Loaded again with other weights, it finds in staging what the old ones computed; no other engine gets that."""
    first, second = engines(), engines()
    prompt = tokens(300)
    first.computes("a", prompt, lora_request=adapter(home / "helper", 1))
    other = adapter(home / "helper", 2)
    other.lora_int_id = 2
    first.matched(first.request("b", prompt, lora_request=other), computed=256)
    first.settle()
    assert second.finds("c", prompt, lora_request=other) == 0


def test_what_an_adapter_computes_after_it_was_replaced_amid_a_request_stays_in_the_engine(engine, home, store):
    """Loaded in place, it computes the rest of requests that came before; their keys tell the old weights."""
    asked = engine.request("a", tokens(300), lora_request=adapter(home / "helper", 1))
    adapter(home / "helper", 2)
    engine.compute(asked)
    assert held(store) == 0


def test_what_an_adapter_computed_before_it_was_replaced_amid_a_request_is_not_fetched(engines, home):
    """The rest of the prompt is computed with the new weights: the old ones' chunks do not go before it."""
    first, second = engines(), engines()
    prompt, helper = tokens(300), adapter(home / "helper", 1)
    first.computes("a", prompt, lora_request=helper)
    asked = second.request("b", prompt, lora_request=helper)
    adapter(home / "helper", 2)
    assert second.matched(asked) == 0
    second.done(asked)
    assert second.knows_nothing()


def test_a_part_of_a_chunk_is_not_given_to_the_store(engine, store):
    """Nobody asks the store for it: vLLM keeps the last part of a recurrent model's prompt for its own staging."""
    request = engine.request("a", tokens(300))
    context, part = engine.context(request), make_offload_key(b"part" * 8, 0)
    context.set_offload_key_position(part, 288)
    for keys in ([part], [*engine.keys(request)[0], part]):
        prepared = engine.manager.prepare_store(keys, context)
        engine.manager.complete_store(prepared.keys_to_store, context)
        engine.settle()
    assert held(store) == 4
    assert engine.counted()["engine_stored_chunks_total", ("stored",)] == 4


def test_chunks_of_a_request_that_nobody_knows_are_not_stored(engine, store):
    """In doubt whose they are, they stay where they are; vLLM's job ends all the same."""
    request = engine.request("a", tokens(300))
    engine.tier._requests.clear()
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
        trained.computes("a", prompt)
        trained.connector.reset_cache()
        again = trained.request("b", prompt)
        assert trained.matched(again) == 0
        trained.compute(again)
        trained.manager.primary_tier.reset_cache()
        assert trained.finds("c", prompt) == 256

    def test_a_request_that_is_kept_over_a_reset_neither_reads_nor_writes(self, trained, store):
        """Whether it was decided for or not: of what it has computed, nobody knows with which weights."""
        prompt = tokens(300)
        trained.computes("a", prompt)
        trained.manager.primary_tier.reset_cache()
        loading, waiting = trained.request("b", prompt), trained.request("c", prompt)
        trained.begin_load(loading)
        trained.connector.reset_cache()
        trained.step("b")
        assert [trained.matched(request) for request in (loading, waiting)] == [0, 0]
        before = held(store)
        trained.compute(waiting)
        assert held(store) == before
        for request in (loading, waiting):
            trained.done(request)

    def test_nobody_else_finds_what_it_stores(self, trained, engines):
        """Nor does it find what others stored."""
        mine, theirs = tokens(300), tokens(300, seed=1)
        other = engines()
        trained.computes("a", mine)
        other.computes("a", theirs)
        assert other.finds("b", mine) == 0
        assert trained.finds("b", theirs) == 0


@pytest.mark.parametrize(
    "asks",
    [
        {"prompt_logprobs": 1},
        {"extra_args": {"kv_transfer_params": {"kv_load_tiers": []}}},
        {"extra_args": {"kv_transfer_params": {"max_load_tokens": 0}}},
        {"extra_args": {"kv_transfer_params": {"max_load_tokens": CHUNK - 1}}},
    ],
)
def test_who_could_not_use_what_is_found_is_not_looked_up(engine, store, asks):
    """Who asks for a prompt's logprobs, or may load from no tier, or less than a chunk: it waits for nothing.

    Nor is anything brought near for it, in place of others' chunks, nor told as a fetch that pays.
    """
    request = engine.request("a", tokens(300), sampling=SamplingParams(max_tokens=1, **asks))
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.compute(request)
    assert held(store) == 4


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
    first.computes("a", prompt, mm_features=[image])
    assert second.finds("b", prompt, mm_features=[image]) == shared
    text = tokens(300, seed=1)
    first.computes("c", text)
    assert second.finds("d", text) == 256


def adapter(folder, fill):
    """A LoRA adapter on disk: its contents follow from ``fill``, its name does not."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes([fill]) * 16)
    return LoRARequest("helper", 1, str(folder))


def held(store):
    return sum(len(pool.pool) for pool in store.store.dram.pools.values())
