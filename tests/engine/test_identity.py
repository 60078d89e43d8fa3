"""Who shares chunks with whom: namespaces of real configurations."""

import json
import shutil
from dataclasses import replace
from functools import reduce

import pytest
import torch
import vllm
from vllm.config import ModelConfig, MultiModalConfig, WeightTransferConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from e2e.vllm_model import write_model
from engine.conftest import BLOCK, cache_of, full_attention
from tiertune_connector.vllm.compat import Engine
from tiertune_connector.vllm.identity import namespace

NAME = {"served_model_name": "llama"}
AMX = torch.cpu._is_amx_tile_supported()
"""Whether this host has it."""
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 1024,
}  # fmt: skip


def identify(config, cache=None):
    cache = cache or cache_of(config)
    engine = Engine(config, cache)
    return namespace(config, cache, engine.config, engine.groups[0].chunk_tokens, engine.settings.epoch)


@pytest.fixture
def told(configured):
    """Makes the namespace of an engine whose configuration has become another once its cache was made.

    Fields are named by their path, dots written ``__``; ``of`` are EngineArgs'.
    """

    def made(of=None, **fields):
        config = configured(**(NAME | (of or {})))
        cache = cache_of(config)
        for path, value in fields.items():
            *parents, last = path.split("__")
            setattr(reduce(getattr, parents, config), last, value)
        return identify(config, cache)

    return made


@pytest.fixture
def usual(told):
    return told()


def drafting(folder, seed=1):
    """EngineArgs with a drafter."""
    drafter = write_model(folder / f"drafter-{seed}", seed=seed)
    return {"speculative_config": {"model": str(drafter), "method": "draft_model", "num_speculative_tokens": 2}}


def test_the_same_model_elsewhere_is_the_same(told, usual, model, tmp_path):
    """Another engine, another path, other sizes of caches and batches: the chunks are exchangeable."""
    copy = shutil.copytree(model, tmp_path / "copy")
    settings = {"socket": "/elsewhere.sock", "chunk_tokens": 64, "stage": "decode"}
    sizes = {"max_num_seqs": 3, "max_model_len": 1024}
    assert told({"model": str(copy), "engine_id": "other", "extra": settings, **sizes}) == usual


@pytest.mark.parametrize(
    "arguments",
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
def test_what_changes_the_bytes_or_their_keys_is_another_namespace(told, usual, arguments):
    """Name, dtype, block, chunk, epoch, hash algorithm, and what overrides the model's own configuration."""
    assert told(arguments).digest != usual.digest


@pytest.mark.parametrize(
    "fields",
    [
        {"model_config__quantization_config": {"ignore": ["lm_head"]}},
        {"cache_config__kv_cache_layout": "BLHNC"},
        {"model_config__model_class_overrides": {"LlamaForCausalLM": "elsewhere:Llama"}},
        {"model_config__code_revision": "other"},
        {"model_config__model_impl": "transformers"},
    ],
    ids=["quantised otherwise", "parts in another order", "another class", "another revision of the code", "impl"],
)
def test_what_fills_a_page_otherwise_is_part_of_it(told, usual, fields):
    """How an engine quantises, beyond the method's name, which many ways have in common; layouts in memory; code."""
    assert told(**fields) != usual


@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("tiertune_connector.vllm.identity.KEYS", 2),
        ("torch.backends.cpu.get_cpu_capability", lambda: "another"),
        ("torch.cpu._is_amx_tile_supported", lambda: not AMX),
    ],
    ids=["keys that told less", "instruction sets", "AMX"],
)
def test_what_no_configuration_has_is_part_of_it(told, usual, monkeypatch, place, other):
    """A mend of what keys tell apart would else leave earlier engines' chunks under keys that now mean others.

    On the CPU K and V are packed as instruction sets like it; torch calls hosts with AMX and without it AVX512 alike,
    and vLLM packs K and V of bfloat16 otherwise with it.
    """
    monkeypatch.setattr(place, other)
    assert told() != usual


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"dtype": "int4"}'),
        ("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"dtype": "int8"}'),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_CPU_INT4_W4A8", "0"),
        ("VLLM_B12X_MOE_FP4_FORCE_A16", "1"),
        ("VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", "1"),
        ("VLLM_ROCM_USE_AITER_MOE_SITUV2", "a16w4"),
        ("VLLM_USE_DEEP_GEMM_E8M0", "0"),
        ("VLLM_XPU_INC_WNA16_BACKEND", "w4a8"),
        ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4"),
        ("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "1"),
    ],
)
def test_what_the_environment_quantises_is_part_of_it(told, usual, monkeypatch, name, value):
    """No configuration has it: the method is of the same name, the weights and activations are of other types."""
    monkeypatch.setenv(name, value)
    assert told().dtype != usual.dtype


@pytest.mark.parametrize("name", ["VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM"])
def test_what_the_environment_quantises_for_aiter_is_part_of_it(told, monkeypatch, name):
    """Whichever is vLLM's default: 0.32 does, 0.33 does not."""
    dtypes = set()
    for value in "01":
        monkeypatch.setenv(name, value)
        dtypes.add(told().dtype)
    assert len(dtypes) == 2


def test_how_a_picked_backend_orders_a_page_is_part_of_it(told, usual, monkeypatch):
    """AITER's shuffled values lie in pages like those of ROCM_ATTN, which vLLM picks where AITER is not used."""
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert told().kv_layout != usual.kv_layout


def test_a_local_models_own_code_is_part_of_it(told, model, tmp_path):
    """Where it is run: mended beside the same weights, the model computes something else."""
    folders = [shutil.copytree(model, tmp_path / name) for name in ("old", "same", "new")]
    for folder, code in zip(folders, ("scale = 1", "scale = 1", "scale = 2"), strict=True):
        (folder / "modeling_llama.py").write_text(code)
    old, same, new = (told({"model": str(folder), "trust_remote_code": True}) for folder in folders)
    assert old == same != new
    old, same, new = (told({"model": str(folder)}) for folder in folders)
    assert old == same == new


class TestLength:
    """What `max_model_len` decides of the bytes."""

    @pytest.fixture
    def long(self, told, model, tmp_path):
        """Makes the namespace of an engine whose model has ``fields`` in its config.json, with any length."""

        def made(length, **fields):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            shutil.copytree(model, folder)
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))
            return told({"model": str(folder)}, model_config__max_model_len=length)

        return made

    def test_long_rope_is_told_by_its_side_of_the_length_that_was_trained(self, long):
        """vLLM turns every key by the long factors where longer prompts are allowed: those engines share nothing."""
        phi = {"rope_parameters": LONG_ROPE}
        assert long(2048, **phi) == long(1025, **phi) != long(1024, **phi) == long(512, **phi)

    def test_llama_4_is_told_by_its_temperature(self, long):
        """From a length on it depends on the position, unless a generation config says whether it does."""
        llama = {"attn_temperature_tuning": True}
        assert long(1024, **llama) == long(32768, **llama) != long(32769, **llama) == long(40000, **llama)

    def test_a_generation_config_that_says_so_decides_the_temperature(self, long, monkeypatch):
        """Then the length is nothing to it."""
        monkeypatch.setattr(ModelConfig, "try_get_generation_config", lambda _: {"attn_temperature_tuning": False})
        assert long(1024, attn_temperature_tuning=True) == long(40000, attn_temperature_tuning=True)

    @pytest.mark.parametrize("kind", ["dynamic", "made up"])
    def test_where_it_is_not_known_what_depends_on_it_the_length_is_told(self, told, kind):
        """A rope that may be made for the length, as that of some models is, or one that is not known."""
        rope = {"model_config__hf_text_config__rope_parameters": {"rope_type": kind, "factor": 2.0}}
        one, same, other = (told({"max_model_len": length}, **rope) for length in (2048, 2048, 1024))
        assert one == same != other

    def test_images_that_are_sized_by_it_are_told_by_it(self, told, usual):
        """As Nemotron's processor cuts them."""
        kind = {"model_config__model_arch_config__architectures": ["NemotronH_Nano_VL_V2"]}
        assert len({usual, *(told(model_config__max_model_len=length, **kind) for length in (1024, 2048))}) == 3

    def test_a_length_that_was_fitted_to_the_memory_is_another(self, told):
        """The model was made with a longer one."""
        tuned = {"model_config__hf_text_config__attn_temperature_tuning": True}
        one, other = (told(model_config__original_max_model_len=asked, **tuned) for asked in (1024, -1))
        assert one != other

    def test_a_drafters_keys_depend_on_it_too(self, told, tmp_path):
        """It is told whatever the model itself makes of its length."""
        text = {"speculative_config__draft_model_config__hf_text_config__rope_parameters": LONG_ROPE}
        of = drafting(tmp_path)
        one, other = (told(of, model_config__max_model_len=length, **text) for length in (1024, 2048))
        assert one != other


def test_a_configuration_from_elsewhere_is_part_of_it(told, usual, model, tmp_path):
    """Its contents, wherever it lies; with the model's own in its place all is as ever."""

    def beside(name, **fields):
        folder = tmp_path / name
        folder.mkdir()
        own = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(own | fields))
        return told({"hf_config_path": str(folder)})

    one, other = beside("a", rope_theta=500.0), beside("b", rope_theta=600.0)
    assert len({one, other, usual}) == 3
    assert beside("c", rope_theta=500.0) == one
    assert told({"hf_config_path": str(model)}) == usual


@pytest.mark.parametrize(("ranks", "different"), [(1, 1), (2, 2)])
def test_how_tokens_are_dealt_out_to_ranks_is_part_of_it(told, ranks, different):
    """Under context parallelism; without it the setting says nothing."""
    digests = {
        told(parallel_config__decode_context_parallel_size=ranks, parallel_config__cp_kv_cache_interleave_size=size)
        for size in (1, 16)
    }
    assert len(digests) == different


@pytest.mark.parametrize(("stages", "different"), [(1, 1), (2, 2)])
def test_which_layers_a_pipeline_stage_has_is_part_of_it(told, monkeypatch, stages, different):
    """Where an operator deals them out: another way may make rows of the same size. Without stages it is nothing."""
    digests = set()
    for dealt in ("1,3", "2,2"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", dealt)
        digests.add(told(parallel_config__pipeline_parallel_size=stages))
    assert len(digests) == different


def test_what_a_recurrent_state_is_made_of_is_part_of_it(configured):
    """Other numbers of as many bits, or the same ones in another order, make pages of as many bytes."""
    digests = set()
    for dtype, shape in ((torch.bfloat16, (4, 8)), (torch.float16, (4, 8)), (torch.float16, (8, 4))):
        config = configured(**NAME)
        layer = MambaSpec(block_size=BLOCK, shapes=(shape,), dtypes=(dtype,))
        digests.add(identify(config, cache_of(config, {"layers.0.mixer": layer})))
    assert len(digests) == 3


def test_other_weights_under_the_same_name_are_another_namespace(told, usual, tmp_path):
    """A new revision of a model is told by its files."""
    other = told({"model": str(write_model(tmp_path / "other", seed=1))})
    assert other.weights != usual.weights


@pytest.mark.parametrize(
    ("elsewhere", "weights"), [({}, "0123abcd"), ({"model_config__hf_config_path": "someone/else"}, "engine:")]
)
def test_a_hub_model_is_told_by_its_commit(told, elsewhere, weights):
    """Its files are wherever the cache has them. Of the weights beside a configuration from elsewhere nothing is known.

    That has a commit of its own: the engine shares with no other.
    """
    commit = {"model_config__hf_config___commit_hash": "0123abcd"}
    assert told(model_config__model="someone/llama", **commit, **elsewhere).weights.startswith(weights)


def test_how_media_are_processed_is_part_of_it(told, usual, tmp_path, model):
    """Settings of the engine and files beside the weights change what an image becomes, and not its hash."""

    def processing(folder=model, **fields):
        return told({"model": str(folder)}, model_config__multimodal_config=MultiModalConfig(**fields))

    other = shutil.copytree(model, tmp_path / "other")
    (other / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}')
    pruned = [processing(video_pruning_rate=0.5, video_pruning_method=method) for method in ("evs", "vidcom2")]
    scaled = processing(mm_processor_kwargs={"do_rescale": False})
    assert len({usual, processing(), processing(), scaled, processing(other), *pruned}) == 6


def test_how_an_encoder_computes_is_part_of_it(told, tmp_path):
    """In 8 bits, and by which scales, wherever they lie: as of the model itself."""

    def encoding(dtype, scales=None):
        media = MultiModalConfig()
        media.mm_encoder_attn_dtype, media.mm_encoder_fp8_scale_path = dtype, scales
        return told(model_config__multimodal_config=media)

    scales, same = tmp_path / "scales.json", tmp_path / "same.json"
    scales.write_text("{}")
    same.write_text("{}")
    before = {encoding(None), encoding("fp8"), encoding("fp8", str(scales)), encoding("fp8", str(same))}
    assert len(before) == 3
    scales.write_text('{"0": 1}')
    assert encoding("fp8", str(scales)) not in before


def test_the_hash_seed_is_part_of_it(told, monkeypatch):
    """Engines whose hashes begin otherwise have other keys for the same tokens."""
    pytest.importorskip("xxhash")
    seeds = set()
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        seeds.add(told({"prefix_caching_hash_algo": "xxhash"}).hash_seed)
    assert len(seeds) == 2


@pytest.mark.parametrize("fields", [{"num_kv_heads": 4}, {"head_size": 128}, {"dtype": torch.float16}])
def test_another_layout_of_the_cache_is_another_namespace(configured, usual, fields):
    """Pages of other bytes, as tensor parallelism or a quantised cache makes them."""
    config = configured(**NAME)
    layers = {f"model.layers.{index}.attn": full_attention(**fields) for index in range(4)}
    assert identify(config, cache_of(config, layers)) != usual


def test_a_release_of_vllm_shares_with_itself_alone(told, usual, monkeypatch):
    """Nothing else tells how its kernels fill a page; a patch of it leaves that as it is."""
    installed = ".".join(vllm.__version__.split(".")[:2])
    for version, same in ((f"{installed}.9", True), ("0.31.0", False)):
        monkeypatch.setattr("vllm.__version__", version)
        assert (told() == usual) is same


def test_backends_of_single_kinds_of_layers_are_part_of_it(told, usual):
    """They are set beside the one of all layers, or in its place."""
    backends = (AttentionBackendEnum.ROCM_ATTN, AttentionBackendEnum.ROCM_AITER_FA)
    others = {told(attention_config__backend_per_kind={"full_attention": backend}) for backend in backends}
    assert len({usual, *others}) == 3


def test_how_a_backend_fills_a_page_is_part_of_it(configured, usual):
    """A page of as many bytes, with all keys before all values; vLLM picks a backend by what is installed."""
    config = configured(**NAME)
    cache = cache_of(config)
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    content = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    group.kv_cache_spec = replace(spec, num_head_slots=2, state_content_bytes=content)
    assert group.kv_cache_spec.page_size_bytes == spec.page_size_bytes
    assert identify(config, cache) != usual


def test_a_drafter_is_part_of_it(told, usual, tmp_path):
    """Its layers' keys and values lie in the same chunks."""
    assert len({usual, *(told(drafting(tmp_path, seed)) for seed in (1, 2))}) == 3


@pytest.mark.parametrize(
    "unknown",
    [{"load_format": "dummy"}, None, {"hf_overrides": lambda config: config}],
    ids=["made up", "no shards", "overrides by a function"],
)
def test_weights_that_cannot_be_told_are_the_engines_own(told, model, tmp_path, unknown):
    """No two engines take each other's for theirs."""
    shutil.copy(model / "config.json", tmp_path)
    unknown = unknown or {"model": str(tmp_path)}
    assert len({told({"engine_id": engine, **unknown}) for engine in ("a", "b")}) == 2


@pytest.mark.parametrize(
    "unknown",
    [
        {"of": {"load_format": "dummy"}},
        {"cache_config__calculate_kv_scales": True},
        {"weight_transfer_config": WeightTransferConfig()},
    ],
    ids=["weights", "scales", "exchanged"],
)
def test_an_engine_that_shares_with_none_does_not_share_with_its_next_run(told, unknown):
    """Nor with one on another host that an operator gave the same id: of these, too, nobody knows what they have."""
    assert told(**unknown) != told(**unknown)
