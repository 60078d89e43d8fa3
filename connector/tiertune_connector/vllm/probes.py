"""What the adapter relies on in vLLM, looked up in vLLM's source without running it. Imports no vLLM.

The same check runs on the installed vLLM at every start and, in the tests, on the source of a version that is not
installed.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

TESTED = ("0.32",)
"""Releases of the vLLM that the tests run."""
PROBED = ("0.33",)
"""Releases of a vLLM whose source has all that is named here; tests run their code, but not their kernels."""


class UnsupportedError(RuntimeError):
    """This engine cannot be served; the message says why."""


NEEDS = {
    "v1/kv_offload/tiering/base.py": {
        "SecondaryTierManager.__init__": "offloading_spec primary_kv_view tier_type backpressure_detector",
        "SecondaryTierManager": (
            "block_size_bytes serve_external_requests on_schedule_end on_request_finished shutdown"
        ),
        "JobResult": "job_id success successful_keys transfer_time transfer_bytes",
        "TransferJob": "job_id keys chunk_ids req_context",
        "ParentManager.create_store_job": "keys req_context",
        "ParentManager.lookup": "key req_context",
    },
    "v1/kv_offload/tiering/manager.py": {
        "TieringOffloadingManager": "primary_tier secondary_tiers take_events",
        "TieringOffloadingManager.prepare_store": "keys req_context",
        "TieringOffloadingManager.complete_store": "keys req_context success",
    },
    "v1/kv_offload/tiering/spec.py": {
        "TieringOffloadingSpec": "get_manager create_worker secondary_tier_configs _scheduler_mmap _engine_id",
    },
    "v1/kv_offload/cpu/spec.py": {
        "CPUOffloadingSpec": "get_worker num_chunks kv_bytes_per_chunk cpu_page_size_per_worker replicated_layout",
    },
    "v1/kv_offload/cpu/gpu_worker.py": {"CPUOffloadingWorker": "_mmap_region"},
    "v1/kv_offload/cpu/manager.py": {
        "CPUOffloadingManager": "lookup touch _get_num_free_chunks _num_evictable_cache_chunks"
    },
    "v1/kv_offload/cpu/shared_offload_region.py": {
        "SharedOffloadRegion.__init__": "engine_id num_chunks rank kv_bytes_per_chunk cpu_page_size",
        "SharedOffloadRegion": "mmap_path fd _creator create_next_worker_view cleanup",
    },
    "v1/kv_offload/cpu/common.py": {"CPULoadStoreSpec": "chunk_ids"},
    "v1/kv_offload/base.py": {
        "OffloadingWorker": "",
        "OffloadingSpec": "config extra_config blocks_per_chunk get_worker",
        "CanonicalKVCaches": "tensors group_data_refs",
        "CanonicalKVCacheTensor": "tensor page_size_bytes",
        "CanonicalKVCacheRef": "tensor_idx page_size_bytes",
        "GPULoadStoreSpec": "group_sizes block_indices",
        "BlockIDsLoadStoreSpec": "block_ids",
        "TransferResult": "job_id success transfer_size transfer_time",
        "ReqContext": "req_id get_offload_key_position",
        "LookupResult": "HIT MISS RETRY",
        "OffloadingMetricMetadata": "documentation labelnames",
    },
    "v1/kv_offload/config.py": {
        "OffloadingConfig": (
            "groups worker_kv_bytes_per_block engine_id model cache parallel extra_config replicated_layout "
            "canonical_layout kv_cache_layout"
        ),
        "OffloadingGroupConfig": "tokens_per_block layer_names group_id",
        "OffloadingCacheConfig": "blocks_per_chunk",
        "OffloadingParallelConfig": "rank world_size tp_size pp_size pcp_size dcp_size",
    },
    "distributed/kv_transfer/kv_connector/v1/offloading/config.py": {
        "build_offloading_config": "vllm_config kv_cache_config"
    },
    "distributed/kv_transfer/kv_connector/v1/offloading_connector.py": {
        "OffloadingConnector.__init__": "vllm_config role kv_cache_config",
        "OffloadingConnector": (
            "connector_scheduler on_new_request get_num_new_matched_tokens build_connector_meta get_kv_connector_stats "
            "build_prom_metrics reset_cache request_finished take_events register_kv_caches wait_for_save "
            "build_connector_worker_meta update_connector_output connector_worker"
        ),
    },
    "distributed/kv_transfer/kv_connector/v1/base.py": {
        "KVConnectorBase_V1": "bind_connector_metadata bind_kv_cache_manager"
    },
    "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py": {
        "OffloadingConnectorScheduler": (
            "_req_status _jobs _events_tracker manager config _current_batch_load_jobs _current_batch_jobs_to_flush "
            "_current_batch_allocated_block_ids"
        ),
        "SchedulerOffloadConfig": "kv_group_configs offload_prompt_only",
        "RequestOffloadState": (
            "req group_states max_load_tokens max_offload_tokens num_locally_computed_tokens transfer_jobs "
            "update_offload_keys"
        ),
        "RequestGroupState": "offload_keys block_ids next_stored_chunk_idx",
        "GroupOffloadConfig": "group_idx tokens_per_block tokens_per_chunk sliding_window_size_in_chunks kv_cache_spec",
        "TransferJobStatus": "keys is_store",
    },
    "distributed/kv_transfer/kv_connector/v1/offloading/worker.py": {"OffloadingConnectorWorker": "spec"},
    "distributed/kv_transfer/kv_connector/v1/offloading/events.py": {
        "OffloadingEventsTracker": "record_lookup self_describing_enabled"
    },
    "distributed/kv_transfer/kv_connector/v1/offloading/common.py": {
        "TransferJob": "req_id",
        "OffloadingWorkerMetadata": "completed_jobs transfer_stats aggregate",
    },
    "distributed/kv_transfer/kv_connector/v1/offloading/metrics.py": {
        "OffloadingConnectorStats": "increase_counter set_gauge is_empty aggregate"
    },
    "distributed/kv_events.py": {
        "BlockStored": "block_hashes group_idx",
        "BlockRemoved": "block_hashes medium group_idx",
    },
    "v1/outputs.py": {"KVConnectorOutput": "invalid_block_ids kv_connector_worker_meta"},
    "distributed/kv_transfer/kv_connector/factory.py": {
        "KVConnectorFactory": "_registry register_connector get_connector_class",
    },
    "v1/core/kv_cache_utils.py": {
        "resolve_none_hash_seed": "",
        "KVCacheBlock": "block_id is_null",
    },
    "v1/kv_cache_interface.py": {
        "iter_layer_specs": "",
        "FullAttentionSpec": "non_causal",
        "KVCacheConfig": "num_blocks prefix_cacheable_groups",
    },
    "config/model.py": {
        "ModelConfig": (
            "runner_type is_prefix_caching_supported is_diffusion use_mla code_revision model_class_overrides "
            "model_impl trust_remote_code architecture"
        )
    },
    "model_executor/models/registry.py": {
        "_ModelRegistry": "models",
        "_LazyRegisteredModel": "module_name class_name",
        "_RegisteredModel": "model_cls",
    },
    "config/vllm.py": {
        "VllmConfig": "aux_output_config max_concurrent_batches num_speculative_tokens",
        "get_current_vllm_config_or_none": "",
    },
    "config/lora.py": {"LoRAConfig": "lora_dtype target_modules enable_tower_connector_lora"},
    "config/attention.py": {
        "AttentionConfig": "backend backend_per_kind use_prefill_query_quantization disable_flashinfer_q_quantization"
    },
    "config/multimodal.py": {
        "MultiModalConfig": (
            "mm_processor_kwargs media_io_kwargs video_pruning_rate video_pruning_method mm_encoder_attn_dtype "
            "mm_encoder_fp8_scale_path"
        ),
    },
    "config/aux_output.py": {"AuxOutputConfig": "enabled"},
    "transformers_utils/config.py": {"iter_rope_parameters": ""},
    "utils/hashing.py": {"get_hash_fn_by_name": ""},
    "v1/core/kv_cache_manager.py": {"KVCacheBlocks": "blocks", "KVCacheManager": "coordinator reset_prefix_cache"},
    "v1/core/kv_cache_coordinator.py": {"KVCacheCoordinator.cache_blocks": "request num_computed_tokens"},
    "config/scheduler.py": {"SchedulerConfig": "async_scheduling enable_chunked_prefill"},
    "v1/core/sched/output.py": {
        "CachedRequestData": "req_ids num_computed_tokens",
        "NewRequestData": "req_id num_computed_tokens mm_features",
        "SchedulerOutput": (
            "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens preempted_req_ids finished_req_ids "
            "kv_connector_block_state"
        ),
        "KVConnectorBlockState": "boundary_state_offloads",
    },
    "v1/request.py": {
        "Request": (
            "request_id num_prompt_tokens num_computed_tokens is_finished cache_salt lora_request trace_headers "
            "block_hashes mm_features streaming_queue"
        ),
    },
    "v1/engine/core.py": {
        "EngineCore": "vllm_config",
        "EngineCore.add_lora": "lora_request",
        "EngineCore.collective_rpc": "method timeout args kwargs",
    },
    "v1/fault_tolerance/engine_core_sentinel.py": {
        "EngineCoreSentinel": "engine",
        "EngineCoreSentinel.on_fault": "exc",
    },
    "lora/request.py": {"LoRARequest": "lora_name lora_int_id lora_path load_inplace"},
    "v1/metrics/perf.py": {
        "ModelMetrics": "is_enabled get_num_flops",
        "ExecutionContext.from_single_request": "",
    },
}
"""By file: its classes and functions (`Class`, `function` or `Class.method`), with what each must have.

A function parameters; a class fields and methods, and what its methods set on `self`.
"""


def check_source(root: Path) -> list[str]:
    """What the vLLM package in ``root`` lacks, one line each; empty if nothing."""
    return [f"{path}: {problem}" for path, needed in NEEDS.items() for problem in _problems(root / path, needed)]


def check(version: str, root: Path, *, allow_untested: bool) -> str:
    """Whether to run with the vLLM of ``version`` in ``root``: returns a warning, or ""; UnsupportedError if not.

    ``allow_untested`` is about the version alone: a vLLM that lacks anything is refused all the same.
    """
    release = ".".join(version.partition("+")[0].split(".")[:2])
    tested, probed = ", ".join(TESTED), ", ".join(PROBED)
    says = f"TierTune was tested with vLLM {tested} and checked against the source of {probed}; this is vLLM {version}"
    if release not in (*TESTED, *PROBED) and not allow_untested:
        raise UnsupportedError(f"{says}. To run with it all the same, set allow_untested to true.")
    if lacking := check_source(root):
        raise UnsupportedError(f"vLLM {version} lacks what TierTune counts on: {'; '.join(lacking)}")
    return "" if release in TESTED else says


def _problems(path: Path, needed: Mapping[str, str]) -> Iterator[str]:
    try:
        source = dict(_named(ast.parse(path.read_text(encoding="utf-8")).body))
    except (OSError, SyntaxError):
        yield from (f"no such file, for {name}" for name in needed)
        return
    for name, has in needed.items():
        node = source.get(name)
        if node is None:
            yield f"no {name}"
            continue
        kind, there = ("parameter ", _parameters(node)) if isinstance(node, ast.FunctionDef) else ("", _members(node))
        yield from (f"{name} has no {kind}{one}" for one in has.split() if one not in there)


def _named(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Functions, classes and their methods, by name."""
    for node in _statements(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _named(node.body, f"{prefix}{node.name}.")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse, *getattr(node, "finalbody", [])])


def _parameters(node: ast.FunctionDef) -> set[str]:
    """Those that have a place of their own; `*args` and `**kwargs` take anything."""
    return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _members(node: ast.ClassDef) -> set[str]:
    members = set[str]()
    for part in _statements(node.body):
        if isinstance(part, ast.FunctionDef):
            attributes = [each for each in ast.walk(part) if isinstance(each, ast.Attribute)]
            members.add(part.name)
            members.update(
                each.attr for each in attributes if isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name)
            )
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            members.update(each.id for each in targets if isinstance(each, ast.Name))
    return members
