"""Who shares chunks with whom: namespaces of real configurations."""

import json
import shutil
from dataclasses import replace
from functools import reduce

import pytest
import torch
import vllm
from vllm.config import MultiModalConfig, WeightTransferConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from e2e.vllm_model import write_model
from engine.conftest import BLOCK, cache_of, full_attention
from tiertune_connector.vllm.compat import Engine
from tiertune_connector.vllm.identity import adapters, adapters_encode, namespace

NAME = {"served_model_name": "llama"}


def identify(config, cache=None):
    cache = cache or cache_of(config)
    engine = Engine(config, cache)
    return namespace(config, cache, engine.config, engine.groups, engine.settings.epoch)


@pytest.fixture
def changed(configured):
    """Makes the digest of an engine whose configuration has become another once its cache was made.

    Fields are named by their path, dots written ``__``; ``of`` are EngineArgs'.
    """

    def digest(of=None, **fields):
        config = configured(**NAME, **(of or {}))
        cache = cache_of(config)
        for path, value in fields.items():
            *parents, last = path.split("__")
            setattr(reduce(getattr, parents, config), last, value)
        return identify(config, cache).digest

    return digest


@pytest.fixture
def usual(configured):
    return identify(configured(**NAME))


def test_the_same_model_elsewhere_is_the_same(configured, usual, model, tmp_path):
    """Another engine, another path, other sizes of caches and batches: the chunks are exchangeable."""
    copy = shutil.copytree(model, tmp_path / "copy")
    settings = {"socket": "/elsewhere.sock", "chunk_tokens": 64, "stage": "decode"}
    other = configured(model=str(copy), engine_id="other", extra=settings, max_num_seqs=3, max_model_len=1024, **NAME)
    assert identify(other).digest == usual.digest


@pytest.mark.parametrize(
    "changed",
    [
        {"served_model_name": "other"},
        {"dtype": "bfloat16"},
        {"block_size": 64},
        {"extra": {"chunk_tokens": 128}},
        {"extra": {"chunk_tokens": 64, "epoch": 1}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"hf_overrides": {"rope_theta": 500.0}},
    ],
    ids=str,
)
def test_what_changes_the_bytes_or_their_keys_is_another_namespace(configured, usual, changed):
    """Name, dtype, block, chunk, epoch, hash algorithm, and what overrides the model's own configuration."""
    assert identify(configured(**(NAME | changed))).digest != usual.digest


class TestLength:
    """What `max_model_len` decides of the bytes."""

    @pytest.fixture
    def told(self, configured, model, tmp_path):
        """Of an engine whose model has ``fields`` in its config.json, with any length."""

        def digest(length=2048, **fields):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            shutil.copytree(model, folder)
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))
            config = configured(model=str(folder), **NAME)
            cache = cache_of(config)
            config.model_config.max_model_len = length
            return identify(config, cache).digest

        return digest

    def test_long_rope_is_told_by_its_side_of_the_length_that_was_trained(self, told):
        """vLLM turns every key by the long factors where longer prompts are allowed: those engines share nothing."""
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
        phi = {"rope_parameters": rope | {"original_max_position_embeddings": 1024}}
        assert told(2048, **phi) == told(1025, **phi) != told(1024, **phi) == told(512, **phi)

    def test_llama_4_is_told_by_its_temperature(self, told):
        """From a length on it depends on the position, unless a generation config says whether it does."""
        llama = {"attn_temperature_tuning": True}
        assert told(1024, **llama) == told(32768, **llama) != told(32769, **llama) == told(40000, **llama)

    def test_a_generation_config_that_says_so_decides_the_temperature(self, told, configured, monkeypatch):
        """Then the length is nothing to it."""
        config = type(configured(**NAME).model_config)
        monkeypatch.setattr(config, "try_get_generation_config", lambda _: {"attn_temperature_tuning": False})
        assert told(1024, attn_temperature_tuning=True) == told(40000, attn_temperature_tuning=True)

    @pytest.mark.parametrize("kind", ["dynamic", "made up"])
    def test_where_it_is_not_known_what_depends_on_it_the_length_is_told(self, changed, kind):
        """A rope that may be made for the length, as that of some models is, or one that is not known."""
        rope = {"model_config__hf_text_config__rope_parameters": {"rope_type": kind, "factor": 2.0}}
        one, same, other = (changed({"max_model_len": length}, **rope) for length in (2048, 2048, 1024))
        assert one == same != other

    def test_images_that_are_sized_by_it_are_told_by_it(self, changed, usual):
        """As Nemotron's processor cuts them."""
        kind = {"model_config__model_arch_config__architectures": ["NemotronH_Nano_VL_V2"]}
        digests = {changed(model_config__max_model_len=length, **kind) for length in (1024, 2048)}
        assert len(digests | {usual.digest}) == 3

    def test_a_length_that_was_fitted_to_the_memory_is_another(self, changed):
        """The model was made with a longer one."""
        tuned = {"model_config__hf_text_config__attn_temperature_tuning": True}
        one, other = (changed(model_config__original_max_model_len=asked, **tuned) for asked in (1024, -1))
        assert one != other

    def test_a_drafters_keys_depend_on_it_too(self, changed, tmp_path):
        """It is told whatever the model itself makes of its length."""
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
        drafter = write_model(tmp_path / "drafter", seed=1)
        speculative = {"model": str(drafter), "method": "draft_model", "num_speculative_tokens": 2}
        rope = {"original_max_position_embeddings": 1024, **rope}
        text = {"speculative_config__draft_model_config__hf_text_config__rope_parameters": rope}
        of = {"speculative_config": speculative}
        one, other = (changed(of, model_config__max_model_len=length, **text) for length in (1024, 2048))
        assert one != other


def test_a_configuration_from_elsewhere_is_part_of_it(configured, usual, model, tmp_path):
    """Its contents, wherever it lies; with the model's own in its place all is as ever."""

    def digest(folder, **fields):
        folder.mkdir()
        own = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(own | fields))
        return identify(configured(hf_config_path=str(folder), **NAME)).digest

    digests = [digest(tmp_path / "a", rope_theta=500.0), digest(tmp_path / "b", rope_theta=600.0), usual.digest]
    assert len(set(digests)) == 3
    assert digest(tmp_path / "c", rope_theta=500.0) == digests[0]
    assert identify(configured(hf_config_path=str(model), **NAME)).digest == usual.digest


def test_a_hub_models_commit_is_not_that_of_a_configuration_from_elsewhere(configured, monkeypatch):
    """Of its weights nothing is known then: the engine shares with no other."""
    config = configured(**NAME)
    monkeypatch.setattr(config.model_config, "model", "someone/llama")
    monkeypatch.setattr(config.model_config, "hf_config_path", "someone/configurations")
    config.model_config.hf_config._commit_hash = "0123abcd"
    assert identify(config).weights.startswith("engine:")


@pytest.mark.parametrize(("ranks", "different"), [(1, 1), (2, 2)])
def test_how_tokens_are_dealt_out_to_ranks_is_part_of_it(changed, ranks, different):
    """Under context parallelism; without it the setting says nothing."""
    digests = {
        changed(parallel_config__decode_context_parallel_size=ranks, parallel_config__cp_kv_cache_interleave_size=size)
        for size in (1, 16)
    }
    assert len(digests) == different


@pytest.mark.parametrize(("stages", "different"), [(1, 1), (2, 2)])
def test_which_layers_a_pipeline_stage_has_is_part_of_it(changed, monkeypatch, stages, different):
    """Where an operator deals them out: another way may make rows of the same size. Without stages it is nothing."""
    digests = set()
    for dealt in ("1,3", "2,2"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", dealt)
        digests.add(changed(parallel_config__pipeline_parallel_size=stages))
    assert len(digests) == different


def test_what_a_recurrent_state_is_made_of_is_part_of_it(configured):
    """Other numbers of as many bits, or the same ones in another order, make pages of as many bytes."""
    digests = set()
    for dtype, shape in ((torch.bfloat16, (4, 8)), (torch.float16, (4, 8)), (torch.float16, (8, 4))):
        config = configured(**NAME)
        layer = MambaSpec(block_size=BLOCK, shapes=(shape,), dtypes=(dtype,))
        digests.add(identify(config, cache_of(config, {"layers.0.mixer": layer})).digest)
    assert len(digests) == 3


def test_how_an_engine_quantises_is_part_of_it(changed, usual):
    """Beyond the method's name, which many ways have in common."""
    assert changed(model_config__quantization_config={"ignore": ["lm_head"]}) != usual.digest


def test_other_weights_under_the_same_name_are_another_namespace(configured, usual, tmp_path):
    """A new revision of a model is told by its files."""
    other = identify(configured(model=str(write_model(tmp_path / "other", seed=1)), **NAME))
    assert other.weights != usual.weights
    assert other.digest != usual.digest


def test_a_hub_model_is_told_by_its_commit(configured, usual, monkeypatch):
    """Its files are wherever the cache has them."""
    config = configured(**NAME)
    monkeypatch.setattr(config.model_config, "model", "someone/llama")
    config.model_config.hf_config._commit_hash = "0123abcd"
    assert identify(config).weights == "0123abcd"


def test_how_media_are_processed_is_part_of_it(configured, usual, tmp_path, model):
    """Settings of the engine and files beside the weights change what an image becomes, and not its hash."""

    def digest(folder=model, **fields):
        config = configured(model=str(folder), **NAME)
        config.model_config.multimodal_config = MultiModalConfig(**fields)
        return identify(config).digest

    other = shutil.copytree(model, tmp_path / "other")
    (other / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}')
    pruned = [digest(video_pruning_rate=0.5, video_pruning_method=method) for method in ("evs", "vidcom2")]
    digests = [digest(), digest(mm_processor_kwargs={"do_rescale": False}), digest(other), usual.digest, *pruned]
    assert len(set(digests)) == 6
    assert digest() == digests[0]


def test_how_an_encoder_computes_is_part_of_it(configured, tmp_path):
    """In 8 bits, and by which scales, wherever they lie: as of the model itself."""

    def digest(dtype, scales=None):
        config = configured(**NAME)
        media = config.model_config.multimodal_config = MultiModalConfig()
        media.mm_encoder_attn_dtype, media.mm_encoder_fp8_scale_path = dtype, scales
        return identify(config).digest

    scales, same = tmp_path / "scales.json", tmp_path / "same.json"
    scales.write_text("{}")
    same.write_text("{}")
    digests = [digest(None), digest("fp8"), digest("fp8", str(scales))]
    assert digest("fp8", str(same)) == digests[-1]
    scales.write_text('{"0": 1}')
    assert len({*digests, digest("fp8", str(scales))}) == 4


def test_the_hash_seed_is_part_of_it(configured, monkeypatch):
    """Engines whose hashes begin otherwise have other keys for the same tokens."""
    pytest.importorskip("xxhash")
    digests = set()
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        digests.add(identify(configured(prefix_caching_hash_algo="xxhash", **NAME)).hash_seed)
    assert len(digests) == 2


@pytest.mark.parametrize("fields", [{"num_kv_heads": 4}, {"head_size": 128}, {"dtype": torch.float16}])
def test_another_layout_of_the_cache_is_another_namespace(configured, usual, fields):
    """Pages of other bytes, as tensor parallelism or a quantised cache makes them."""
    config = configured(**NAME)
    layers = {f"model.layers.{index}.attn": full_attention(**fields) for index in range(4)}
    assert identify(config, cache_of(config, layers)).digest != usual.digest


def test_layouts_in_memory_are_part_of_it(changed, usual):
    """The same pages with their parts in another order."""
    assert changed(cache_config__kv_cache_layout="BLHNC") != usual.digest


def test_a_release_of_vllm_shares_with_itself_alone(configured, usual, monkeypatch):
    """Nothing else tells how its kernels fill a page; a patch of it leaves that as it is."""
    digests, installed = [], ".".join(vllm.__version__.split(".")[:2])
    for version in (f"{installed}.9", "0.31.0"):
        monkeypatch.setattr("vllm.__version__", version)
        digests.append(identify(configured(**NAME)).digest)
    assert digests[0] == usual.digest != digests[1]


def test_engines_whose_keys_told_less_share_nothing_with_those_of_today(configured, usual, monkeypatch):
    """A mend of what keys tell apart would else leave earlier engines' chunks under keys that now mean others."""
    monkeypatch.setattr("tiertune_connector.vllm.identity.KEYS", 0)
    assert identify(configured(**NAME)).digest != usual.digest


def test_instruction_sets_are_part_of_it_on_the_cpu(configured, usual, monkeypatch):
    """K and V are packed as they like it."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert identify(configured(**NAME)).digest != usual.digest


def test_amx_is_part_of_it_on_the_cpu(configured, usual, monkeypatch):
    """torch calls hosts with it and without it AVX512 alike, and vLLM packs K and V of bfloat16 otherwise with it."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert identify(configured(**NAME)).digest != usual.digest


def test_backends_of_single_kinds_of_layers_are_part_of_it(configured, usual):
    """They are set beside the one of all layers, or in its place."""
    config = configured(**NAME)
    digests = {usual.digest}
    for backend in (AttentionBackendEnum.ROCM_ATTN, AttentionBackendEnum.ROCM_AITER_FA):
        config.attention_config.backend_per_kind = {"full_attention": backend}
        digests.add(identify(config).digest)
    assert len(digests) == 3


def test_how_a_backend_fills_a_page_is_part_of_it(configured, usual):
    """A page of as many bytes, with all keys before all values; vLLM picks a backend by what is installed."""
    config = configured(**NAME)
    cache = cache_of(config)
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    content = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    group.kv_cache_spec = replace(spec, num_head_slots=2, state_content_bytes=content)
    assert group.kv_cache_spec.page_size_bytes == spec.page_size_bytes
    assert identify(config, cache).digest != usual.digest


def test_a_drafter_is_part_of_it(configured, usual, tmp_path):
    """Its layers' keys and values lie in the same chunks."""
    digests = set()
    for seed in (1, 2):
        drafter = write_model(tmp_path / f"drafter-{seed}", seed=seed)
        speculative = {"model": str(drafter), "method": "draft_model", "num_speculative_tokens": 2}
        config = configured(speculative_config=speculative, **NAME)
        digests.add(identify(config).digest)
    assert len(digests | {usual.digest}) == 3


@pytest.mark.parametrize("unknown", ["made up", "no shards", "overrides by a function"])
def test_weights_that_cannot_be_told_are_the_engines_own(configured, model, tmp_path, unknown):
    """No two engines take each other's for theirs."""
    arguments = dict(NAME)
    if unknown == "made up":
        arguments["load_format"] = "dummy"
    elif unknown == "no shards":
        folder = tmp_path / "bare"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text())))
        arguments["model"] = str(folder)
    else:
        arguments["hf_overrides"] = lambda config: config
    digests = {identify(configured(engine_id=engine, **arguments)).digest for engine in ("a", "b")}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "unknown",
    [
        {"of": {"load_format": "dummy"}},
        {"cache_config__calculate_kv_scales": True},
        {"weight_transfer_config": WeightTransferConfig()},
    ],
    ids=["weights", "scales", "exchanged"],
)
def test_an_engine_that_shares_with_none_does_not_share_with_its_next_run(changed, unknown):
    """Nor with one on another host that an operator gave the same id: of these, too, nobody knows what they have."""
    assert changed(**unknown) != changed(**unknown)


def test_engines_that_apply_adapters_otherwise_tell_it(configured):
    """To some modules only, or in another type than the model's; how many adapters there may be does not matter."""
    lora = {"enable_lora": True, "max_lora_rank": 8}
    assert adapters(configured()) == adapters(configured(**lora)) == adapters(configured(max_loras=4, **lora)) == ""
    others = [{"lora_target_modules": ["q_proj"]}, {"lora_target_modules": []}, {"lora_dtype": "bfloat16"}]
    assert len({adapters(configured(**lora, **other)) for other in others} - {""}) == 3
    one, other = ({"lora_target_modules": names} for names in (["q_proj", "v_proj"], ["v_proj", "q_proj"]))
    assert adapters(configured(**lora, **one)) == adapters(configured(**lora, **other))


def test_adapters_of_the_vision_tower_encode_images(configured):
    lora = {"enable_lora": True, "max_lora_rank": 8}
    told = [adapters_encode(configured(**more)) for more in ({}, lora, {**lora, "enable_tower_connector_lora": True})]
    assert told == [False, False, True]
