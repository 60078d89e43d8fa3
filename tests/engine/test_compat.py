"""What is read of real configurations, and which are refused."""

import contextlib
import json
import logging
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.config import PoolerConfig, WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from e2e.vllm_model import write_model
from engine.conftest import BLOCK, cache_of, full_attention
from engine.test_tier import adapter
from tiertune_connector.keys import tenant_digest
from tiertune_connector.vllm import compat, identity, probes
from tiertune_connector.vllm.facts import Group
from tiertune_connector.vllm.probes import UnsupportedError

WINDOW = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32, "block_size": BLOCK}


@pytest.fixture(autouse=True)
def _checked_anew():
    compat.check_version.cache_clear()
    yield
    compat.check_version.cache_clear()


def load_weights(*_):
    """An extension may hand over a function, too."""


def test_the_installed_vllm_is_one_that_is_known():
    """It has what the adapter counts on, and runs without a warning if it is the one that the tests are for."""
    warning = probes.check(vllm.__version__, Path(vllm.__file__).parent, allow_untested=False)
    assert bool(warning) is vllm.__version__.startswith(probes.PROBED)


LAYERS, HEADS, HEAD = 12, 8, 32
MODELS = {
    "all of the context": ({}, HEADS * HEAD),
    "a window in all layers but each sixth": (
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 64,
         "sliding_window_pattern": 6},
        HEADS * HEAD / 6,
    ),
    "latents": (
        {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 96,
         "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 24, "q_lora_rank": None},
        HEADS * (24 + 8 + 24) / 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_the_attention_width_is_what_is_computed(configured, tmp_path, kind):
    """By vLLM's count: of keys and values that heads see (MLA), and of layers that see all of a long context."""
    _, width = MODELS[kind]
    shape = compat.model_shape(configured(model=written(tmp_path, kind)))
    assert (shape.layers, shape.width) == (LAYERS, round(width))
    assert shape.params > LAYERS * (HEADS * HEAD) ** 2, "what is linear"


def written(folder, kind):
    """The folder, with a model's configuration in it."""
    usual = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HEADS * HEAD,
        "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "head_dim": HEAD, "vocab_size": 512, "max_position_embeddings": 8192,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(usual | MODELS[kind][0]))
    return str(folder)


def refused(config, match, layers=None):
    """At the start of its connector, with this message."""
    with pytest.raises(UnsupportedError, match=match):
        compat.Engine(config, cache_of(config, layers))


def test_another_version_is_refused_unless_allowed(configured, monkeypatch, caplog):
    """At the connector's start, by the operator's key."""
    monkeypatch.setattr(vllm, "__version__", "0.40.1")
    config = configured()
    refused(config, r"this is vLLM 0\.40\.1")
    allowed = configured(extra={"allow_untested": True})
    with caplog.at_level(logging.WARNING, logger=compat.logger.name):
        compat.Engine(allowed, cache_of(allowed))
    assert "this is vLLM 0.40.1" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nnodes_within_dp": 2, "world_size": 4}, "spans 2 nodes"),
        ({"use_ray": True, "world_size": 2, "distributed_executor_backend": "ray"}, "use distributed_executor_backend"),
        ({"world_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher does not say"),
        ({"world_size": 4}, None),
        ({"use_ray": True, "distributed_executor_backend": "ray"}, None),
    ],
)
def test_engines_on_several_hosts_are_refused(fields, message):
    """Staging is one host's memory; ranks beside each other, or one alone, are fine."""
    usual = {"nnodes_within_dp": 1, "world_size": 1, "use_ray": False, "distributed_executor_backend": "mp"}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**(usual | fields)))
    if message is None:
        compat.check_hosts(config)
    else:
        with pytest.raises(UnsupportedError, match=message):
            compat.check_hosts(config)


def test_real_parallel_configurations_have_what_is_asked():
    """The names of the check above are vLLM's."""
    from vllm.config import ParallelConfig

    compat.check_hosts(SimpleNamespace(parallel_config=ParallelConfig(tensor_parallel_size=1)))
    two = ParallelConfig(tensor_parallel_size=2, nnodes=2, distributed_executor_backend="mp", master_addr="127.0.0.1")
    with pytest.raises(UnsupportedError, match="spans 2 nodes"):
        compat.check_hosts(SimpleNamespace(parallel_config=two))


@pytest.mark.parametrize(("kind", "served"), [("MEAN", False), ("CLS", False), ("LAST", True)])
def test_pooling_of_all_tokens_is_refused(configured, kind, served):
    """A fetched token has no hidden state: vLLM's worker would end at it. The last token is computed always."""
    config = configured(runner="pooling", pooler_config=PoolerConfig(seq_pooling_type=kind))
    if served:
        compat.Engine(config, cache_of(config))
    else:
        refused(config, "hidden states of all of a prompt")


def test_a_prefix_lm_is_refused(configured):
    """What comes later in a prompt is in its first chunk's keys and values, and not in the chunk's key."""
    config = configured()
    refused(config, "attend to later ones", {"attn": full_attention(non_causal=True)})
    kinds = {"a": full_attention(), "b": full_attention(non_causal=True)}
    wrapped = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=kinds)
    cache = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a", "b"], wrapped)])
    with pytest.raises(UnsupportedError, match="attend to later ones"):
        compat.check_model(config, cache)


@pytest.mark.parametrize(("amx", "served"), [(False, False), (True, True)])
def test_latents_on_a_cpu_without_amx_are_refused(configured, tmp_path, monkeypatch, amx, served):
    """There vLLM 0.32 computes wrong whatever has a context, and so takes prefix caching away from such a model."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    config = configured(model=written(tmp_path, "latents"))
    with contextlib.nullcontext() if served else pytest.raises(UnsupportedError, match="whole prompts only"):
        compat.check_model(config, cache_of(config))


def test_diffusion_models_are_refused(configured):
    """A request may end with blocks whose keys and values were never written, and vLLM takes them for computed."""
    config = configured()
    config.model_config.hf_config.canvas_length = 256
    del config.model_config.is_diffusion  # which is worked out once
    refused(config, "diffusion model")


def test_routed_experts_are_refused(configured):
    """vLLM's worker ends at a token that it has none of."""
    config = configured()
    config.aux_output_config.enable_return_routed_experts = True
    refused(config, "enable_return_routed_experts")


def test_vllm_is_told_what_follows_from_our_settings(configured):
    """Recomputing after a failed load, storing answers too, chunks and staging as planned."""
    config = configured()
    engine = compat.Engine(config, cache_of(config))
    transfer = config.kv_transfer_config
    assert transfer.kv_load_failure_policy == "recompute"
    extra = transfer.kv_connector_extra_config
    assert extra["offload_prompt_only"] is False
    assert extra["cpu_bytes_to_use"] == 32 << 20
    assert extra["blocks_per_chunk"] == 2
    assert engine.groups == (Group(index=0, chunk_tokens=64, window_chunks=None),)
    engine.tell_tier(lambda: None)
    (tier,) = config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    assert tier["facts"].groups == engine.groups
    assert tier["facts"].namespace.chunk_tokens == 64


@pytest.mark.parametrize(("schedules_ahead", "ahead"), [(False, 0), (True, 1)])
def test_how_late_a_steps_output_is_read(configured, schedules_ahead, ahead):
    """With asynchronous scheduling the next step is scheduled before."""
    config = configured()
    config.scheduler_config.async_scheduling = schedules_ahead
    assert compat.Engine(config, cache_of(config)).facts().ahead == ahead


def test_staging_left_out_follows_the_formula(configured):
    """KV bytes per token times twice a step's and twice the longest prompt's tokens."""
    config = configured(extra={"chunk_tokens": 64}, max_num_batched_tokens=2048)
    compat.Engine(config, cache_of(config))
    assert config.kv_transfer_config.kv_connector_extra_config["cpu_bytes_to_use"] == 4096 * (2 * 2048 + 2 * 2048)


@pytest.mark.parametrize(("staging", "warned"), [("7MiB", True), ("8MiB", False)])
def test_staging_too_small_for_a_prompt_is_warned_of(configured, caplog, staging, warned):
    """2,048 tokens of 4 KiB each are 8 MiB."""
    config = configured(extra={"staging": staging, "chunk_tokens": 64})
    with caplog.at_level(logging.WARNING, logger=compat.logger.name):
        compat.Engine(config, cache_of(config)).tell_tier(lambda: None)
    assert ("holds less than the longest prompt" in caplog.text) is warned


def test_staging_that_holds_no_chunk_is_refused(configured):
    """vLLM would make a region of nothing: "cannot mmap an empty file"."""
    config = configured(extra={"staging": "255KiB", "chunk_tokens": 64})
    refused(config, r"staging: 255.0 KiB hold no chunk of 64 tokens, which takes 256.0 KiB")


def test_a_chunk_that_is_no_whole_blocks_is_refused(configured):
    """The message names the key and the sizes beside it."""
    config = configured(extra={"chunk_tokens": 100})
    refused(config, r"kv_connector_extra_config\.chunk_tokens: .* 96 or 128")


def arrived(**fields):
    """As much of a Request as the tier must know of."""
    usual = {
        "num_prompt_tokens": 64, "cache_salt": None, "lora_request": None, "trace_headers": None, "mm_features": [],
        "skip_reading_prefix_cache": False,
    }  # fmt: skip
    return SimpleNamespace(**(usual | fields))


def test_groups_of_a_hybrid_model(configured):
    """Full attention leads, whatever vLLM's order; a window counts chunks, a recurrent state is itself alone."""
    config = configured()
    layers = {
        "a.attn": SlidingWindowSpec(sliding_window=100, **WINDOW),
        "b.attn": SlidingWindowSpec(sliding_window=100, **WINDOW),
        "c.attn": full_attention(),
        "d.attn": full_attention(),
    }
    engine = compat.Engine(config, cache_of(config, layers))
    assert {(group.chunk_tokens, group.window_chunks) for group in engine.groups} == {(64, None), (64, 2)}
    assert engine.groups[0].window_chunks is None
    assert sorted(group.index for group in engine.groups) == [0, 1]
    keys = [[b"of group 0"], [b"of group 1"]]
    assert engine.prompt(arrived(), keys).keys == [keys[group.index] for group in engine.groups]


def test_windows_of_layers():
    """As vLLM's own scheduler counts them."""
    state = MambaSpec(shapes=((64, 64),), dtypes=(torch.float32,), block_size=BLOCK)
    assert compat._window_chunks(full_attention(), 64) is None
    assert compat._window_chunks(SlidingWindowSpec(sliding_window=129, **WINDOW), 64) == 3
    assert compat._window_chunks(state, 64) == 1


def test_a_kind_of_layer_that_vllm_does_not_offload_is_refused(configured):
    """vLLM 0.33 would fail at it without a word."""
    config = configured()
    cache = cache_of(config)
    cache.kv_cache_groups.append(KVCacheGroupSpec(["other.attn"], CrossAttentionSpec(**WINDOW)))
    with pytest.raises(UnsupportedError, match="does not offload layers of CrossAttentionSpec"):
        compat.Engine(config, cache)


def test_salts_and_adapters_reach_the_prompt(configured, tmp_path):
    """An unsalted request stays out where a salt is required; an adapter adds to its keys, an unknown one stays out."""
    config = configured(extra={"isolation": "require_salt", "chunk_tokens": 64})
    engine = compat.Engine(config, cache_of(config))
    unsalted = engine.prompt(arrived(), [[]])
    salted = engine.prompt(arrived(cache_salt="a", lora_request=adapter(tmp_path, 1)), [[]])
    assert (unsalted.reads, unsalted.writes, unsalted.tenant, unsalted.suffix) == (False, False, b"", b"")
    assert (salted.reads, salted.writes, len(salted.tenant), len(salted.suffix)) == (True, True, 16, 16)
    unknown = engine.prompt(arrived(cache_salt="a", lora_request=LoRARequest("other", 2, "someone/other")), [[]])
    assert (unknown.reads, unknown.writes) == (False, False)


@pytest.mark.parametrize("key", [None, "secret", "\udcff"], ids=["none", "text", "any byte"])
def test_the_tenants_key_is_the_environments(configured, monkeypatch, key):
    """Whoever guesses salts needs it, too; equal salts are one tenant, others are others."""
    monkeypatch.delenv(compat.TENANT_KEY, raising=False)
    if key is not None:
        monkeypatch.setenv(compat.TENANT_KEY, key)
    engine = compat.Engine(configured(), cache_of(configured()))
    for salt in ("a", "b", "\ud800"):
        assert engine.prompt(arrived(cache_salt=salt), [[]]).tenant == tenant_digest(salt, os.fsencode(key or ""))


@pytest.mark.parametrize("isolation", ["shared", "require_salt"])
@pytest.mark.parametrize("salt", ["a", "", None])
def test_unsalted_requests_stay_out_where_a_salt_is_required(configured, isolation, salt):
    """They neither read nor write, and are no tenant's."""
    config = configured(extra={"isolation": isolation, "chunk_tokens": 64})
    prompt = compat.Engine(config, cache_of(config)).prompt(arrived(cache_salt=salt), [[]])
    allowed = isolation == "shared" or salt == "a"
    assert (prompt.reads, prompt.writes, bool(prompt.tenant)) == (allowed, allowed, salt == "a")


@pytest.mark.parametrize(("encodes", "shared"), [(False, True), (True, False)])
def test_media_that_an_adapter_may_have_encoded_are_not_shared(configured, tmp_path, encodes, shared):
    """vLLM keeps what was encoded by the adapter's name alone; its text is shared, and so are media without it."""
    config = configured(enable_lora=True, max_lora_rank=8, enable_tower_connector_lora=encodes)
    engine = compat.Engine(config, cache_of(config))
    helper, media = adapter(tmp_path, 1), [object()]
    prompts = [
        engine.prompt(arrived(lora_request=helper, mm_features=media), [[]]),
        engine.prompt(arrived(lora_request=helper), [[]]),
        engine.prompt(arrived(mm_features=media), [[]]),
    ]
    assert [prompt.reads and prompt.writes for prompt in prompts] == [shared, True, True]


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "after it was removed"])
def test_a_request_stands_for_nothing_once_another_adapter_has_its_adapters_id(configured, tmp_path, in_place):
    """The worker goes on with the new weights, before a request names them: its chunks are not stored as the old ones.

    vLLM still finds the types of what it is called with, whichever process calls.
    """
    config = configured(enable_lora=True, max_lora_rank=8)
    engine, loaded = compat.Engine(config, cache_of(config)), []
    engine.tell_tier(lambda: None)
    old, other = (adapter(tmp_path / name, fill) for name, fill in (("old", 1), ("new", 2)))
    other.load_inplace = in_place
    prompt = engine.prompt(arrived(lora_request=old), [[]])
    assert prompt.writes
    assert prompt.stands()
    core = SimpleNamespace(
        vllm_config=config, model_executor=SimpleNamespace(add_lora=lambda one: loaded.append(prompt.stands()))
    )
    EngineCore.add_lora(core, old)
    EngineCore.add_lora(core, other)
    assert loaded == [True, False]
    assert not engine.prompt(arrived(lora_request=old), [[]]).writes
    assert EngineCoreProc._convert_msgspec_args(EngineCore.__new__(EngineCore).add_lora, [["a", 1, "b"]])[0].lora_path


def test_an_adapter_is_told_by_what_was_loaded(configured, tmp_path):
    """Its folder has other files when a request first names it: what the engine computes is not of these."""
    config = configured(enable_lora=True, max_lora_rank=8)
    engine = compat.Engine(config, cache_of(config))
    engine.tell_tier(lambda: None)
    core = SimpleNamespace(vllm_config=config, model_executor=SimpleNamespace(add_lora=lambda _one: True))
    loaded = adapter(tmp_path, 1)
    assert EngineCore.add_lora(core, loaded)
    adapter(tmp_path, 2)
    assert not engine.prompt(arrived(lora_request=loaded), [[]]).writes


class TestExchangedPastVllm:
    """Somebody has the workers load other weights, by no way that vLLM's configuration tells of."""

    @pytest.fixture
    def made(self, configured, tmp_path):
        """Makes an engine of a model of its own: the engine, how its core calls workers, and how often it parted."""

        def make(**arguments):
            config = configured(
                model=str(write_model(tmp_path / f"llama-{len(list(tmp_path.iterdir()))}")), **arguments
            )
            engine, parted = compat.Engine(config, cache_of(config)), []
            engine.tell_tier(lambda: (engine.next_epoch(), parted.append(True)))

            def call(method, *args, done=lambda *_: None, **kwargs):
                executor = SimpleNamespace(collective_rpc=done)
                EngineCore.collective_rpc(
                    SimpleNamespace(vllm_config=config, model_executor=executor), method, args=args, kwargs=kwargs
                )

            return engine, call, parted

        return make

    @staticmethod
    def suffix(engine):
        return engine.prompt(arrived(), [[]]).suffix

    @pytest.mark.parametrize(
        "method", ["update_weight_cuda_ipc", "resetWeights", load_weights, partial(load_weights, torch.zeros(1 << 20))]
    )
    def test_keys_are_others_from_then_on(self, made, caplog, method):
        """Whatever an extension's method is called, as long as weights are in its name; the log says it once."""
        engine, call, parted = made()
        call(method)
        first = self.suffix(engine)
        call(method)
        assert len({b"", first, self.suffix(engine)}) == 3, "each time"
        assert (len(parted), engine.exchanges_weights) == (2, True)
        assert caplog.text.count("shares chunks with no other") == 1

    @pytest.mark.parametrize("method", ["update_weights", "reload_weights"])
    def test_also_when_the_exchange_failed(self, made, method):
        """Some of them may have been loaded, even of the same files; who called hears of it."""
        engine, call, parted = made()

        def fail(*_):
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            call(method, done=fail)
        assert parted
        assert self.suffix(engine)

    @pytest.mark.parametrize(
        "method", ["compute_weight_checksums", "init_weight_transfer_engine", "update_config", "profile"]
    )
    def test_nothing_changes_if_weights_do_not(self, made, method):
        """Other calls, and those that only read them."""
        engine, call, parted = made()
        call(method)
        assert (parted, engine.exchanges_weights, self.suffix(engine)) == ([], False, b"")

    def test_the_same_files_loaded_again_are_the_same_weights(self, made):
        """As after a sleep of level 2. Not if others were loaded between, or if files are named."""
        _, call, parted = made()
        call("reload_weights")
        assert not parted
        call("reload_weights", weights_path="/elsewhere")
        call("reload_weights")
        assert len(parted) == 2

    @pytest.mark.parametrize("method", ["reload_weights", "load_model"])
    def test_other_files_are_other_weights(self, made, method):
        """The model's folder has been written anew since the engine started."""
        engine, call, parted = made()
        write_model(Path(engine.vllm_config.model_config.model), seed=1)
        call(method)
        assert parted

    def test_files_that_cannot_be_read_are_other_weights(self, made):
        """The folder is gone."""
        engine, call, parted = made()
        shutil.rmtree(engine.vllm_config.model_config.model)
        call("reload_weights")
        assert parted

    def test_workers_may_be_told_of_another_model_to_load(self, made):
        """By `update_config`: then the files that the engine started with show nothing."""
        _, call, parted = made()
        call("update_config", overrides={"model_config": object()})
        assert not parted
        call("reload_weights")
        assert parted

    @pytest.mark.parametrize(("commit", "same"), [("c0ffee", True), ("decade", False), (None, False)])
    def test_a_hubs_branch_may_have_other_files_by_now(self, made, tmp_path, commit, same):
        """The commit in the hub's cache, where the worker has just had it from, decides."""
        engine, call, parted = made()
        model, hub = engine.vllm_config.model_config, tmp_path / "hub"
        engine.vllm_config.load_config.download_dir = str(hub)
        model.model, model.revision, model.hf_config._commit_hash = "maker/llama", None, "c0ffee"
        engine._weights = identity.known_weights(engine.vllm_config)
        if commit:
            kept = hub / "models--maker--llama"
            for path, text in ((f"snapshots/{commit}/config.json", "{}"), ("refs/main", commit)):
                (kept / path).parent.mkdir(parents=True)
                (kept / path).write_text(text)
        call("reload_weights")
        assert bool(parted) is not same

    def test_another_engine_of_the_process_hears_nothing(self, made):
        """It keeps its weights."""
        (_, call, parted), (_, _, others) = made(), made()
        call("update_weights")
        assert (len(parted), others) == (1, [])

    def test_a_trainers_engine_parts_too(self, made, caplog):
        """VLLM empties no cache for `/update_weights`. It shares with no other anyway, as the log says at its start."""
        _, call, parted = made(weight_transfer_config=WeightTransferConfig())
        call("update_weights")
        assert len(parted) == 1
        assert "gave this engine" not in caplog.text

    def test_vllm_still_finds_the_types_of_what_it_is_called_with(self):
        """Whichever process calls."""
        compat._listen()
        called = EngineCore.__new__(EngineCore).collective_rpc
        assert EngineCoreProc._convert_msgspec_args(called, ["sleep", 1.0, (), None]) == ("sleep", 1.0, (), None)


def test_a_steps_requests_and_their_tokens():
    """New ones and running ones."""
    new = NewRequestData("new", [1] * 9, [], None, None, ([],), 4, None)
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens = ["old"], [100]
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs, output.scheduled_cached_reqs = [new], cached
    output.num_scheduled_tokens = {"new": 5, "old": 1}
    assert list(compat.scheduled(output)) == [("new", 4, 9), ("old", 100, 101)]


def test_a_regions_name_is_taken_from_that_region_alone(tmp_path):
    """Not from one that came later under the same name; and nobody tries again."""
    path = tmp_path / "region"
    descriptors = [os.open(path, os.O_CREAT | os.O_RDWR)]
    first = SimpleNamespace(mmap_path=str(path), fd=descriptors[0], _creator=True)
    compat.disown(first)
    assert first._creator, "its file has a name, which its creator is to remove"
    compat.unlink(first)
    assert not path.exists()
    assert not first._creator
    path.touch()
    compat.unlink(first)
    assert path.exists()
    os.close(descriptors[0])
