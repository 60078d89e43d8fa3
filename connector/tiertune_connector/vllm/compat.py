"""All that differs between vLLM's versions, and all that is read of its configuration."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import inspect
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics

from tiertune_connector.cost import TOKENS_ONLY, ModelShape
from tiertune_connector.keys import Namespace
from tiertune_connector.vllm import weights

logger = logging.getLogger(f"vllm.{__name__}")
TESTED = ((0, 32),)
"""(major, minor) that the tests run."""
PROBES = ((SecondaryTierManager.__init__, "backpressure_detector"), (JobResult, "successful_keys"))
"""A callable and a parameter that the adapter counts on."""


class UnsupportedError(RuntimeError):
    """This engine cannot be served."""


def check_version() -> None:
    """Raises UnsupportedError for a vLLM that the adapter was not tested with, or that lacks what it counts on."""
    version = tuple(vllm.__version_tuple__[:2])
    if version not in TESTED:
        tested = ", ".join(".".join(map(str, known)) for known in TESTED)
        raise UnsupportedError(f"TierTune was tested with vLLM {tested}, not with {vllm.__version__}")
    lacking = [name for target, name in PROBES if name not in inspect.signature(target).parameters]
    if lacking:
        raise UnsupportedError(f"vLLM {vllm.__version__} lacks what TierTune counts on: {', '.join(lacking)}")


def check_model(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises UnsupportedError for what this first adapter leaves out."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise UnsupportedError(f"TierTune takes models with one group of full attention layers, not {kinds}")
    if vllm_config.parallel_config.nnodes_within_dp > 1:
        raise UnsupportedError("TierTune needs all ranks of an engine on one host: staging is the host's memory")


def namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadingConfig) -> Namespace:
    """All that two engines must share to read each other's chunks; what cannot be told makes the engine's its own."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    return Namespace(
        model=_served_name(model),
        weights=_weights(model) or _only(config, "its weights are not known"),
        lora=_only(config, "LoRA adapters are told by name alone") if vllm_config.lora_config else "",
        dtype=f"{model.dtype} {config.model.dtype} {model.quantization or ''}".strip(),
        kv_layout=_layout(vllm_config, kv_cache_config, config),
        parallel=json.dumps(
            [
                config.parallel.tp_size,
                config.parallel.pp_size,
                config.parallel.pcp_size,
                config.parallel.dcp_size,
                config.parallel.world_size,
                config.replicated_layout,
            ]
        ),
        chunk_tokens=chunk_tokens(config),
        hash_algorithm=algorithm,
        hash_seed=resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
    )


def chunk_tokens(config: OffloadingConfig) -> int:
    return config.groups[0].tokens_per_block * config.cache.blocks_per_chunk


def model_shape(vllm_config: VllmConfig, kv_bytes: int) -> ModelShape:
    """FLOPs per rank by vLLM's own count, as the two terms of a ModelShape; TOKENS_ONLY where it cannot count them."""
    metrics = ModelMetrics(vllm_config)
    if not metrics.is_enabled():
        return TOKENS_ONLY
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tokens = 1024
    linear_flops = metrics.get_num_flops(ExecutionContext.from_single_request(tokens, 0, is_prefill=True))
    return ModelShape(
        params=max(linear_flops / (2 * tokens), 1.0),
        layers=model.get_num_layers(parallel),
        width=model.get_num_attention_heads(parallel) * model.get_head_size(),
        kv_bytes=kv_bytes,
    )


def scheduled(output: SchedulerOutput) -> Iterator[tuple[int, int]]:
    """(first token, end token) of every request in the step."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.num_computed_tokens, new.num_computed_tokens + counts[new.req_id]
    cached = output.scheduled_cached_reqs
    for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield computed, computed + counts[request]


def _served_name(model: Any) -> str:  # noqa: ANN401 (vLLM's ModelConfig)
    name = model.served_model_name
    return str(name[0] if isinstance(name, list) else name or model.model)


def _weights(model: Any) -> str:  # noqa: ANN401 (vLLM's ModelConfig)
    folder = Path(model.model)
    if folder.is_dir():
        return weights.digest(folder)
    return str(getattr(model.hf_config, "_commit_hash", None) or "")


def _only(config: OffloadingConfig, reason: str) -> str:
    logger.warning("TierTune: this engine shares chunks with no other: %s", reason)
    return f"engine:{config.engine_id}"


def _layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadingConfig) -> str:
    groups = [
        [
            type(group.kv_cache_spec).__name__,
            group.kv_cache_spec.block_size,
            group.kv_cache_spec.page_size_bytes,
            len(group.layer_names),
        ]
        for group in kv_cache_config.kv_cache_groups
    ]
    # On the CPU, K and V are packed as the instruction set likes it.
    isa = torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else ""
    runner = "v2" if vllm_config.use_v2_model_runner else "v1"
    return json.dumps(
        [groups, config.kv_cache_layout, config.canonical_layout, runner, current_platform.device_type, isa]
    )
