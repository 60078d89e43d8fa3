"""The namespace of an engine: all that two engines must share to read each other's chunks."""

# mypy: no-warn-return-any
# Where mypy runs, vLLM is not installed.

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import vllm
from huggingface_hub import try_to_load_from_cache
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.transformers_utils.config import iter_rope_parameters
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, iter_layer_specs
from vllm.v1.kv_offload.config import OffloadingConfig

from tiertune_connector.keys import Namespace
from tiertune_connector.vllm import weights

logger = logging.getLogger(f"vllm.{__name__}")
KEYS = 4
"""Version of what namespaces and keys tell apart, adapters' too. Raise it whenever they come to tell more: what earlier
engines stored may lie under keys that now mean other contents."""
FROM_FILES = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor", "mistral"})
"""Load formats whose weights are the model's safetensors files."""
ANY_LENGTH = frozenset(
    {
        *("default", "linear", "ntk", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"),
        *("proportional", "mllama4", "bailing_mrope", "openpangu"),
    }
)
"""Kinds of rotary embedding that rotate a key by its position, whatever `max_model_len` is."""
LLAMA_4_LONG = 32768
"""If `max_model_len` is larger, attention's temperature depends on the position (vLLM's models/llama4.py)."""
SIZED_BY_LENGTH = frozenset(
    {
        *("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3"),
        *("NemotronH_Omni_Reasoning_V3", "Dots3NoteForCausalLM"),
    }
)
"""Architectures whose processors make images or videos as large as `max_model_len` has room for."""
QUANTISING = {
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "auto",
    "VLLM_ROCM_USE_AITER_FP8BMM": True,
    "VLLM_ROCM_USE_AITER_FP4BMM": True,
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_XPU_INC_WNA16_BACKEND": "auto",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
}
"""Environment variables of vLLM that say how weights, or what they are multiplied with, are quantised; their defaults.

Batch invariance is one of them: its kernels quantise activations otherwise. So is the precision of float32 products.

Kernels that are set (`moe_backend`, `linear_backend`) are not told, though some of them quantise activations and some
do not: engines for prefill and for decode, which are to share, may well have different ones.
"""
ORDERING = {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": False}
"""Likewise those that say in which order a backend fills a page, where no backend is set and its size is the same."""
QUERIES = ("use_prefill_query_quantization", "disable_flashinfer_q_quantization")
"""Fields of vLLM's attention configuration that say whether queries are quantised; by default both are false."""
VLLMS_OWN = ("auto", "vllm")
"""Values of `model_impl`: Transformers' may order what is in a key otherwise (DeepSeek's, in its rotated part)."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files beside a local model's weights; a hub's commit covers them too."""


def namespace(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: OffloadingConfig,
    chunk_tokens: int,
    epoch: int,
    *,
    splits: Sequence[str] = (),
) -> Namespace:
    """If a part of it cannot be known, this engine shares its chunks with no other, and a warning says so.

    ``chunk_tokens`` of the leading group; ``epoch``: the operator's; ``splits``: what each rank says of how its pages
    are split, "" if it says nothing. An adapter's contents are part of requests' keys.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, config.parallel
    ranks, served = vllm_config.parallel_config, model.served_model_name
    # How a sequence's tokens are dealt to ranks, if they are; which layers each stage has, if somebody set that.
    dealt, stages = parallel.pcp_size * parallel.dcp_size > 1, parallel.pp_size > 1 and envs.VLLM_PP_LAYER_PARTITION
    queries = [name for name in QUERIES if getattr(vllm_config.attention_config, name)]
    algorithm, measured = str(cache.prefix_caching_hash_algo), getattr(cache, "calculate_kv_scales", False)
    return Namespace(
        model=str(served[0] if isinstance(served, list) else served or model.model),
        weights=(
            _only(config, reason)
            if (reason := _others_cannot_follow(vllm_config))
            else known_weights(vllm_config) or _only(config, "its weights are not known")
        ),
        dtype=_text(
            model.dtype,
            config.model.dtype,
            model.quantization,
            cache.kv_cache_dtype_skip_layers,
            # Scales that an engine measures on its first prompts are its own.
            _only(config, "it measures the scales of its KV cache") if measured else "",
            *filter(None, [model.quantization_config, _set_by_environment(QUANTISING), queries]),
        ),
        kv_layout=_layout(vllm_config, kv_cache_config, config, splits),
        parallel=_text(
            *(parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size),
            config.replicated_layout,
            *filter(None, [dealt and ranks.cp_kv_cache_interleave_size, stages]),
        ),
        chunk_tokens=chunk_tokens,
        hash_algorithm=algorithm,
        hash_seed=resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
        epoch=epoch,
    )


def _others_cannot_follow(vllm_config: VllmConfig) -> str:
    """Why what the engine computes does not follow from its files and settings; empty if it does."""
    if exchanges_weights(vllm_config):
        return "a trainer exchanges its weights, or it invents them"
    if len(_plugged(vllm_config.model_config)) == 1:
        return "the code of the model's class is in no package"
    # As a load test does; vLLM says itself that outputs are not valid then.
    return "its experts are picked at random" if envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY else ""


def layer_spec(kv_cache_config: KVCacheConfig, group: int) -> Any:  # noqa: ANN401 (vLLM's KVCacheSpec)
    """The spec of one layer of a group; layers that are wrapped together, as on workers, are of one kind."""
    return next(iter(iter_layer_specs(kv_cache_config.kv_cache_groups[group].kv_cache_spec)))


def exchanges_weights(vllm_config: VllmConfig) -> bool:
    """Whether a trainer sends the engine weights while it runs: by vLLM's ways, or into those it invents (`dummy`)."""
    invented = str(vllm_config.load_config.load_format) == "dummy"
    return invented or getattr(vllm_config, "weight_transfer_config", None) is not None


def adapters(vllm_config: VllmConfig) -> str:
    """What besides an adapter's contents decides what the engine computes with it; empty if nothing does."""
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    modules = None if lora.target_modules is None else sorted(lora.target_modules)
    kind = None if lora.lora_dtype == vllm_config.model_config.dtype else str(lora.lora_dtype)
    return "" if modules is None and kind is None else _text(modules, kind)


def adapters_encode(vllm_config: VllmConfig) -> bool:
    """Whether adapters also compute how images and the like are encoded."""
    return vllm_config.lora_config is not None and vllm_config.lora_config.enable_tower_connector_lora


def known_weights(vllm_config: VllmConfig) -> str:
    """Weights of the model, with what overrides its configuration or code, and of its draft model; empty if unknown."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    if callable(model.hf_overrides) or str(vllm_config.load_config.load_format) not in FROM_FILES:
        return ""
    own, length = _weights(model), model.max_model_len
    overrides = [_text(each) for each in (model.hf_overrides, _other_code(model)) if each]
    parts = [own, *overrides, _media(model), _lengths(model, length)]
    if drafts is not None:
        drafter = getattr(drafts, "draft_model_config", None)
        drafter_weights = _weights(drafter) if drafter is not None else "-"
        own = own and drafter_weights
        parts.append(_text(drafts.method, drafter_weights))
        if drafter is not None:
            parts.append(_lengths(drafter, length, drafter.max_model_len))
    return " ".join(part for part in parts if part) if own else ""


def still_has(vllm_config: VllmConfig, known: str) -> bool:
    """Whether the model's files are those that ``known`` tells; a hub's branch may have others by now. In doubt: no."""
    model = vllm_config.model_config
    try:
        if not Path(model.model).is_dir():
            folder = vllm_config.load_config.download_dir
            found = try_to_load_from_cache(model.model, weights.CONFIG, folder, model.revision)
            if not isinstance(found, str) or Path(found).parent.name != _commit(model):
                return False
        return known != "" and known_weights(vllm_config) == known
    except (OSError, ValueError):  # gone meanwhile, or no name that a hub could have
        return False


def _other_code(model: Any) -> dict[str, object]:  # noqa: ANN401 (vLLM's ModelConfig)
    """What runs in place of vLLM's own implementation, or may: a hub's commit covers the code beside its weights."""
    folders = (Path(each) for each in (model.model, model.hf_config_path) if each and model.trust_remote_code)
    files = [path for folder in folders for path in sorted(folder.glob("*.py")) if path.is_file()]
    code = {
        "revision": model.code_revision,
        "classes": model.model_class_overrides,
        "implementation": "" if model.model_impl in VLLMS_OWN else model.model_impl,
        "files": [f"{path.name} {_digest(path)}" for path in files],
        "plugin": _plugged(model),
    }
    return {name: each for name, each in code.items() if each}


def _plugged(model: Any) -> list[str]:  # noqa: ANN401 (vLLM's ModelConfig)
    """The model's class with the contents of its package, if a plugin brought it; empty if it is vLLM's own."""
    registered = ModelRegistry.models.get(model.architecture)
    imported = getattr(registered, "model_cls", None)
    if named := model.model_class_overrides.get(model.architecture):
        place = named
    elif imported is not None:
        place = f"{imported.__module__}:{imported.__qualname__}"
    else:
        place = f"{registered.module_name}:{registered.class_name}" if registered else "vllm"
    package = place.partition(":")[0].partition(".")[0]
    return [] if package == "vllm" else [place, *_sources(package)]


def _sources(package: str) -> list[str]:
    """All Python files of a package, or the one of a module, with their digests."""
    try:
        spec = find_spec(package)
    except ValueError:  # of `__main__`
        spec = None
    if spec is None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = {str(path.relative_to(folder)): path for folder in folders for path in sorted(folder.rglob("*.py"))}
    if not folders and spec.has_location:
        files = {package: Path(spec.origin or "")}
    return [f"{name} {_digest(path)}" for name, path in files.items() if path.is_file()]


def _set_by_environment(usual: Mapping[str, object]) -> dict[str, object]:
    """Those of vLLM's variables that are not as usual, as it reads them."""
    return {name: value for name, each in usual.items() if (value := getattr(envs, name, each)) != each}


def _media(model: Any) -> str:  # noqa: ANN401 (vLLM's ModelConfig)
    """What besides the weights decides how images and the like are encoded; vLLM hashes only what a request sets."""
    media = model.multimodal_config
    if media is None:
        return ""
    files = (Path(model.model) / name for name in PROCESSORS)
    digests = [_digest(path) for path in files if path.is_file()]
    rate, eight_bits, scales = media.video_pruning_rate, media.mm_encoder_attn_dtype, media.mm_encoder_fp8_scale_path
    pruning = [rate, media.video_pruning_method] if rate else rate
    encoder = [eight_bits, _digest(Path(scales)) if scales else None] if eight_bits else []
    return _text(media.mm_processor_kwargs, media.media_io_kwargs, pruning, digests, *encoder)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _lengths(model: Any, *lengths: int) -> str:  # noqa: ANN401 (vLLM's ModelConfig)
    """How each of ``lengths``, as `max_model_len`, changes a model's keys and values; empty if it does not.

    If the effect is not known, the length itself.
    """
    text, told = model.hf_text_config, list[object]()
    for rope in iter_rope_parameters(text):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind == "longrope" and original:
            told += [length > original for length in lengths]
        elif kind not in ANY_LENGTH:
            told += lengths
    if hasattr(text, "attn_temperature_tuning"):
        generation = model.try_get_generation_config() | model.override_generation_config
        told += [generation.get("attn_temperature_tuning", length > LLAMA_4_LONG) for length in lengths]
    if SIZED_BY_LENGTH.intersection(model.architectures):
        told += lengths
    # A length that was fitted to the memory is not the one that the model was made with.
    return _text(*told, model.original_max_model_len == -1) if told else ""


def _weights(model: Any) -> str:  # noqa: ANN401 (vLLM's ModelConfig)
    """Weights and configuration; if the latter is from elsewhere, a hub's commit identifies it, and not the weights."""
    folder, other = Path(model.model), model.hf_config_path
    commit = _commit(model)
    own = weights.digest(folder) if folder.is_dir() else ""
    if not other or other == model.model:
        return own if folder.is_dir() else commit
    config = weights.digest_of(Path(other) / weights.CONFIG, ()).hex() if Path(other).is_dir() else commit
    return f"{own} {config}" if own and config else ""


def _commit(model: Any) -> str:  # noqa: ANN401 (vLLM's ModelConfig)
    """Empty if the configuration is from no hub."""
    return str(getattr(model.hf_config, "_commit_hash", None) or "")


def _only(config: OffloadingConfig, reason: str) -> str:
    """Identity of this run of the engine: an operator may give its id to the next run, or to one on another host."""
    logger.warning("TierTune: this engine shares chunks with no other, nor with its own next run: %s", reason)
    return f"engine:{config.engine_id}:{os.urandom(8).hex()}"


def _layout(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadingConfig, splits: Sequence[str]
) -> str:
    attention, by_kind = vllm_config.attention_config, vllm_config.attention_config.backend_per_kind
    layers = [
        [
            group.group_id,
            type(spec).__name__,
            group.tokens_per_block,
            spec.page_size_bytes,
            len(group.layer_names),
            *_state(spec),
        ]
        for group in config.groups
        for spec in [layer_spec(kv_cache_config, group.group_id)]
    ]
    return _text(
        layers,
        config.worker_kv_bytes_per_block,
        config.cache.blocks_per_chunk,
        config.kv_cache_layout,
        config.canonical_layout,
        "v2" if vllm_config.use_v2_model_runner else "v1",
        current_platform.device_type,
        _device(),
        str(attention.backend),  # those that are set, because each may fill a page in another way
        *filter(None, [by_kind and _text(by_kind), _set_by_environment(ORDERING)]),
        # A backend's kernels may be picked by what it finds when it starts, so the pages that it made are looked at.
        *splits,
        *([] if all(splits) else [_only(config, "a rank does not say how its pages are split")]),
        ".".join(str(vllm.__version__).split(".")[:2]),  # its kernels decide how a page is filled, and say so nowhere
        f"keys {KEYS}",  # here, as every store knows this field
    )


def _device() -> str:
    """On the CPU, K and V are packed to suit the instruction set; elsewhere as the device's kernels do it.

    AMX is asked for apart: torch's CPU capability does not name it.
    """
    if not current_platform.is_cpu():
        return str(current_platform.get_device_capability())
    told = str(torch.backends.cpu.get_cpu_capability())
    return f"{told} AMX" if torch.cpu._is_amx_tile_supported() else told  # noqa: SLF001 (as vLLM asks)


def _state(spec: Any) -> list[object]:  # noqa: ANN401 (vLLM's KVCacheSpec)
    """What a recurrent layer's page is made of: pages of equal size may hold other types of numbers, or another order.

    For attention, what the backend makes of a page, if that is not K and V of each head side by side.
    """
    if isinstance(spec, MambaSpec):
        return [spec.shapes, str(spec.dtypes)]
    slots, content = getattr(spec, "num_head_slots", None), getattr(spec, "state_content_bytes", None)
    return [slots, content] if slots or content else []


def _text(*parts: object) -> str:
    return json.dumps(parts, sort_keys=True, default=str)
