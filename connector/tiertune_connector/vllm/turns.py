"""Keeps later turns of sessions with drafts out of staging and the store, and from requests with the same prefix.

A request that goes on with more input (`resumable`) begins a turn with what the turn before has left. With drafts vLLM
0.32 takes over too much. Without asynchronous scheduling a turn that ends within its accepted drafts leaves tokens
computed that are not in its text: the next input stands in their places. In a recurrent layer the next turn begins with
the state before the accepted drafts, and the states that the first turn leaves were seen to be wrong, too: of such a
session nothing is kept. In both cases the bytes are not what their keys stand for. The device's own cache must not have
such blocks, either: another request would find them there, and store them.
"""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, iter_layer_specs
from vllm.v1.request import Request

Later = Callable[[Request], bool]
"""Whether a request is in a later turn."""


def spoilt(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether an engine's later turns may be spoilt."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return bool(vllm_config.num_speculative_tokens) and (recurrent(kv_cache_config) or not ahead)


def recurrent(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a model has recurrent layers."""
    layers = (layer for group in kv_cache_config.kv_cache_groups for layer in iter_layer_specs(group.kv_cache_spec))
    return any(isinstance(layer, MambaSpec) for layer in layers)


def guard(coordinator: Any, later: Later) -> None:  # noqa: ANN401 (its KVCacheCoordinator)
    """Keep what ``later`` turns compute from being found by other requests on the device."""
    cache = coordinator.cache_blocks

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if not later(request):
            cache(request, num_computed_tokens)

    coordinator.cache_blocks = cache_blocks


def bound(scheduler: Any, output: SchedulerOutput, later: Later) -> None:  # noqa: ANN401 (its Scheduler)
    """Call before vLLM's scheduler stores what a step computes: it stores no more of requests in ``later`` turns."""
    for name in (*output.num_scheduled_tokens, *output.finished_req_ids):
        status = scheduler._req_status.get(name)  # noqa: SLF001
        if status is not None and later(status.req):
            status.max_offload_tokens = 0
