"""All that differs between vLLM's versions, and all that is read from its objects and configuration."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, iter_layer_specs
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics
from vllm.v1.request import Request

from tiertune_connector.cost import TOKENS_ONLY, ModelShape
from tiertune_connector.keys import tenant_digest
from tiertune_connector.units import format_size
from tiertune_connector.vllm import identity, probes, regions
from tiertune_connector.vllm.facts import Facts, Group, Prompt
from tiertune_connector.vllm.lora import AdapterDigests
from tiertune_connector.vllm.probes import UnsupportedError
from tiertune_connector.vllm.settings import for_vllm, parse
from tiertune_connector.vllm.sizes import SizePlan, plan

logger = logging.getLogger(f"vllm.{__name__}")
EPOCH_BYTES = 8
RELOADING = frozenset({"reload_weights", "load_model"})
"""Without arguments: a worker loads its model's files again."""
KEEPING = frozenset(
    {
        *("compute_weight_checksums", "supports_draft_weight_updates"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    }
)
"""Those of vLLM's methods with weights in their name that leave them as they are."""
TENANT_KEY = "TIERTUNE_TENANT_KEY"
"""Environment variable: the key of the digest that stands for a salt, so that nobody can guess salts by digests."""
FAR = 1 << 24
"""Tokens of context beyond the window of any layer that has one."""


class Engine:
    """An engine's configuration: read, checked, and translated for vLLM's tiering, in place."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Raises UnsupportedError for an engine that cannot be served, ValueError for wrong settings."""
        self.settings = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_version(allow_untested=self.settings.allow_untested)
        check_hosts(vllm_config)
        check_model(vllm_config, kv_cache_config)
        self.vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._plan = self._planned()
        translate(vllm_config, self._plan)
        self.config = build_offloading_config(vllm_config, kv_cache_config)
        found = [
            Group(group.group_id, tokens, _window_chunks(identity.layer_spec(kv_cache_config, group.group_id), tokens))
            for group, tokens in zip(self.config.groups, self._plan.chunk_tokens, strict=True)
        ]
        # The store follows one chain of chunks: that of a group whose hits are prefixes, if there is one.
        self.groups = tuple(sorted(found, key=lambda group: group.window_chunks is not None))
        """First the group whose chunks make the chain."""
        self._tenant_key = os.fsencode(os.environ.get(TENANT_KEY, ""))
        self.adapters = AdapterDigests(identity.adapters(vllm_config))
        self._adapters_encode = identity.adapters_encode(vllm_config)
        media, cached = vllm_config.model_config.multimodal_config, vllm_config.cache_config.enable_prefix_caching
        self._numbers_media = media is not None and media.mm_processor_cache_gb == 0 and not cached
        """Whether images and the like are not hashed: keys then hold a number with another meaning in each process."""
        self.exchanges_weights = identity.exchanges_weights(vllm_config)
        self.drafts = vllm_config.num_speculative_tokens or 0
        """Tokens that it speculates."""
        self._epoch = b""
        """Of the weights, as part of all keys: what was stored before an exchange is no longer found."""

    def tell_tier(self, exchanged: Callable[[], object], lost: Callable[[], object] = lambda: None) -> None:
        """Call before vLLM's own constructor on the scheduler's side, which makes the tier; the log gets the sizes.

        ``exchanged`` is called when somebody has exchanged the weights, ``lost`` when no output comes of steps given.
        """
        own, planned = self.settings.staging, self._plan
        if own is not None and own < planned.prompt_bytes:
            logger.warning(
                "TierTune: staging of %s holds less than the longest prompt, which takes %s; the formula gives %s",
                *map(format_size, (own, planned.prompt_bytes, planned.staging_bytes)),
            )
        logger.info(
            "TierTune: chunks of %s tokens, %s; staging of %s",
            planned.chunk_tokens[0],
            format_size(planned.row_bytes),
            format_size(own or planned.staging_bytes),
        )
        facts = self.facts()
        (tier,) = self.vllm_config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
        tier["facts"] = facts
        self._weights, self._exchanged, self._lost = facts.namespace.weights, exchanged, lost
        _hearing.add(self)
        _listen()

    def next_epoch(self) -> None:
        """What was stored so far is no longer found."""
        self._epoch = os.urandom(EPOCH_BYTES)

    def called(self, method: str, *, plainly: bool) -> None:
        """The workers were called by ``method``, ``plainly`` if without arguments and all did it.

        If it may have exchanged their weights, what was stored before is no longer found, and other engines find no
        more of what is stored: they may have other weights.
        """
        if method == "update_config":  # which may name another model to load next
            self._weights = ""
        name = method.lower()
        if ("weight" not in name and name not in RELOADING) or name in KEEPING:
            return
        if not self.exchanges_weights:
            if plainly and name in RELOADING and identity.still_has(self.vllm_config, self._weights):
                return
            logger.warning(
                "TierTune: %s gave this engine other weights, or may have: until it is started again it shares chunks"
                " with no other",
                method,
            )
        self._part()

    def faulted(self) -> None:
        """A step failed, and vLLM means to go on (`enable_fault_tolerance`), with all requests aborted.

        It takes for computed what that step was to compute, and never hears which copies the step ended.
        """
        logger.warning("TierTune: this engine had a fault: until it is started again it shares chunks with no other")
        self._lost()
        self._part()

    def _part(self) -> None:
        self.exchanges_weights = True
        self._exchanged()

    def splits(self, kv_caches: Mapping[str, Any]) -> list[int]:
        """By group, in how many kernels' blocks its pages are, on the worker's side with its layers' ``kv_caches``.

        1 also where that makes no difference to a page's bytes: with one head in it, or all heads of a token together.
        """

        def of_layer(cache: Any) -> int:  # noqa: ANN401 (a torch.Tensor: block, head, token, content)
            alike = cache.dim() != 4 or cache.shape[1] == 1 or cache.stride(1) < cache.stride(2)
            return 1 if alike else int(cache.shape[0] // self._kv_cache_config.num_blocks)

        return [
            max((of_layer(kv_caches[name]) for name in group.layer_names if name in kv_caches), default=1)
            for group in self.config.groups
        ]

    def facts(self) -> Facts:
        """What the tier must know about the engine."""
        return Facts(
            namespace=identity.namespace(
                self.vllm_config,
                self._kv_cache_config,
                self.config,
                self.groups[0].chunk_tokens,
                self.settings.epoch,
                splits=regions.notes(self.config.engine_id, self.config.parallel.world_size),
            ),
            shape=model_shape(self.vllm_config),
            groups=self.groups,
            step_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
            decode_tokens=1 + self.drafts,
            ahead=self.vllm_config.max_concurrent_batches - 1,
        )

    def prompt(self, request: Request, keys: Mapping[int, list[OffloadKey]], most: int | None = None) -> Prompt:
        """What the tier must know about a request; ``keys`` by group, as `Offloading.asked` gives them.

        At most ``most`` tokens may be loaded for it: if these are no chunk of some group, vLLM loads nothing.
        """
        adapter = self.adapters.contents(request.lora_request)
        # vLLM keeps encoded media by the name alone of the adapter that encoded them.
        media = request.mm_features and (self._numbers_media or (request.lora_request and self._adapters_encode))
        known = adapter is not None and not media
        salt = request.cache_salt or ""
        allowed = known and (salt != "" or self.settings.isolation == "shared")
        loads = most is None or most >= max(group.chunk_tokens for group in self.groups)
        return Prompt(
            tokens=request.num_prompt_tokens,
            keys=[keys[group.index] for group in self.groups],
            suffix=(adapter or b"") + self._epoch,
            stands=partial(self.adapters.stands, request.lora_request, adapter),
            tenant=tenant_digest(salt, self._tenant_key),
            reads=allowed and loads and not request.skip_reading_prefix_cache,
            writes=allowed,
            headers=request.trace_headers,
        )

    def _planned(self) -> SizePlan:
        config = build_offloading_config(self.vllm_config, self._kv_cache_config)
        planned = plan(
            [group.tokens_per_block for group in config.groups],
            config.worker_kv_bytes_per_block * (1 if config.replicated_layout else config.parallel.world_size),
            batched_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
            prompt_tokens=self.vllm_config.model_config.max_model_len,
            chunk_tokens=self.settings.chunk_tokens,
        )
        own = self.settings.staging
        if own is not None and own < planned.row_bytes:
            raise UnsupportedError(
                f"kv_connector_extra_config.staging: {format_size(own)} hold no chunk of {planned.chunk_tokens[0]}"
                f" tokens, which takes {format_size(planned.row_bytes)}: the formula gives"
                f" {format_size(planned.staging_bytes)}"
            )
        return planned


_hearing = WeakSet[Engine]()
"""This process's engines."""


def _engines(core: Any) -> list[Engine]:  # noqa: ANN401 (vLLM's EngineCore)
    """Those of ``core``; a MultiConnector gives its connectors a copy of the configuration."""
    own = core.vllm_config.scheduler_config
    return [engine for engine in _hearing if engine.vllm_config.scheduler_config is own]


@cache
def _listen() -> None:
    """Have engines hear of an adapter when it is loaded, of other weights, and of faults.

    vLLM loads an adapter past the scheduler, maybe long before a request names it. If it gets the id of another, which
    it replaces or which was removed, requests under way go on with it.
    """
    from vllm.v1.engine.core import EngineCore  # workers do without
    from vllm.v1.fault_tolerance import EngineCoreSentinel

    load, call, fail = EngineCore.add_lora, EngineCore.collective_rpc, EngineCoreSentinel.on_fault

    @wraps(load)  # vLLM reads its parameters' types
    def add_lora(core: Any, lora_request: LoRARequest) -> bool:  # noqa: ANN401 (vLLM's EngineCore)
        with contextlib.ExitStack() as loading:
            for engine in _engines(core):
                loading.enter_context(engine.adapters.loading(lora_request))
            return load(core, lora_request)

    @wraps(call)
    def collective_rpc(core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        name, done = getattr(getattr(method, "func", method), "__name__", str(method)), False
        try:
            answers = call(core, method, timeout, args, kwargs)
            done = True
        finally:  # what failed may have loaded some
            for engine in _engines(core):
                engine.called(name, plainly=done and not args and not kwargs)
        return answers

    @wraps(fail)
    def on_fault(sentinel: Any, exc: Exception) -> None:  # noqa: ANN401 (vLLM's)
        fail(sentinel, exc)
        for engine in _engines(sentinel.engine):
            engine.faulted()

    EngineCore.add_lora, EngineCore.collective_rpc = add_lora, collective_rpc
    EngineCoreSentinel.on_fault = on_fault


def translate(vllm_config: VllmConfig, plan: SizePlan | None = None) -> None:
    """Write into vLLM's configuration what follows from ours; without ``plan``, enough for its metrics."""
    transfer = vllm_config.kv_transfer_config
    transfer.kv_connector_extra_config = for_vllm(transfer.kv_connector_extra_config, plan)
    transfer.kv_load_failure_policy = "recompute"


@cache
def check_version(*, allow_untested: bool = False) -> None:
    """Raises UnsupportedError for a vLLM that is too new, too old, or lacks what the adapter counts on."""
    root = Path(vllm.__file__).parent
    if warning := probes.check(str(vllm.__version__), root, allow_untested=allow_untested):
        logger.warning("%s", warning)


def check_hosts(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedError if one engine's ranks may be on several hosts: staging is one host's memory."""
    parallel = vllm_config.parallel_config
    says = "TierTune needs all ranks of an engine on one host, for staging is the memory of one host"
    if parallel.nnodes_within_dp > 1:
        raise UnsupportedError(f"{says}; this engine spans {parallel.nnodes_within_dp} nodes")
    if parallel.world_size > 1 and (parallel.use_ray or parallel.distributed_executor_backend == "external_launcher"):
        backend = parallel.distributed_executor_backend
        raise UnsupportedError(f"{says}; {backend} does not say where they are: use distributed_executor_backend mp")


def check_model(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises UnsupportedError for a model whose keys and values cannot be shared.

    Those of a prompt's head are not enough or depend on its tail, or vLLM does not offload a kind of its layers.
    """
    model = vllm_config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise UnsupportedError(
            "TierTune cannot serve this pooling model: its answer needs the hidden states of all of a prompt, and"
            " what is fetched has none (vLLM supports no prefix caching of it, either): start it without TierTune"
        )
    layers = (layer for group in kv_cache_config.kv_cache_groups for layer in iter_layer_specs(group.kv_cache_spec))
    if any(getattr(layer, "non_causal", False) for layer in layers):
        raise UnsupportedError(
            "TierTune cannot serve a model whose tokens attend to later ones of their prompt (prefix LM): prompts that"
            " begin alike have other keys and values: start it without TierTune"
        )
    if model.is_diffusion:
        raise UnsupportedError(
            "TierTune cannot serve a diffusion model: vLLM takes the blocks of an answer for computed whose keys and"
            " values were never written (diffusion_read_only): start it without TierTune"
        )
    whole = not (vllm_config.cache_config.enable_prefix_caching or vllm_config.scheduler_config.enable_chunked_prefill)
    if current_platform.is_cpu() and model.use_mla and whole:
        raise UnsupportedError(
            "TierTune cannot serve a model with MLA on a CPU where vLLM computes whole prompts only (no prefix caching"
            " and no chunked prefill: as without AMX): it answers wrong behind a fetched one: start it without TierTune"
        )
    if vllm_config.aux_output_config.enabled:
        raise UnsupportedError(
            "TierTune cannot serve an engine that returns routed experts: what is fetched has none, and vLLM ends where"
            " they lack: leave out enable_return_routed_experts, or TierTune"
        )
    for group in kv_cache_config.prefix_cacheable_groups:
        _window_chunks(next(iter(iter_layer_specs(group.kv_cache_spec))), 1)


def model_shape(vllm_config: VllmConfig) -> ModelShape:
    """FLOPs per rank by vLLM's own count, as the two terms of a ModelShape; TOKENS_ONLY where it cannot count them.

    The width follows from the count, too: latents in a cache (MLA) are wider than the heads that are computed, and
    layers with a window, or without attention, do not attend to all of a long context.
    """
    metrics = ModelMetrics(vllm_config)
    if not metrics.is_enabled():
        return TOKENS_ONLY
    tokens, layers = 1024, vllm_config.model_config.get_num_layers(vllm_config.parallel_config)

    def flops(context: int) -> int:
        return metrics.get_num_flops(ExecutionContext.from_single_request(tokens, context, is_prefill=True))

    attending = flops(2 * FAR) - flops(FAR)  # of the tokens, to as much context more: 4 L d for each pair
    return ModelShape(
        params=max((flops(FAR) - attending) / (2 * tokens), 1.0),
        layers=layers,
        width=round(attending / (4 * layers * tokens * FAR)),
    )


def scheduled(output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """(request, first token, end token) of every request in the step."""
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    present = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request, first in (*((one.req_id, one.num_computed_tokens) for one in new), *present):
        yield request, first, first + output.num_scheduled_tokens[request]


def room(staging: CPUOffloadingManager) -> int:
    """Chunks of staging that are free or may leave."""
    return staging._get_num_free_chunks() + staging._num_evictable_cache_chunks  # noqa: SLF001


def unlink(region: SharedOffloadRegion) -> None:
    """Unlink the file of a region that every rank has mapped; a later file of that name stays."""
    path = Path(region.mmap_path)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == os.fstat(region.fd).st_ino:
            segments = getattr(region, "_segments", None)  # 0.33 may cut a region into several files
            for name in [name for name, _, _ in segments] if segments else [region.mmap_path]:
                Path(name).unlink(missing_ok=True)
    disown(region)


def disown(region: SharedOffloadRegion) -> None:
    """Nothing is left to unlink for a region whose file has no name any more: vLLM would try, and log a traceback."""
    if region.fd is not None and os.fstat(region.fd).st_nlink == 0:
        region._creator = False  # noqa: SLF001


def _window_chunks(spec: Any, chunk_tokens: int) -> int | None:  # noqa: ANN401 (vLLM's KVCacheSpec)
    try:  # 0.33
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_sliding_window_size_in_chunks
    except ImportError:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import get_sliding_window_size_in_chunks
    try:
        return get_sliding_window_size_in_chunks(spec, chunk_tokens)
    except AssertionError as error:
        raise UnsupportedError(f"vLLM does not offload layers of {type(spec).__name__}") from error
