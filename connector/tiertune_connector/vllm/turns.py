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
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, iter_layer_specs
from vllm.v1.request import Request

Spoilt = Callable[[Request], bool]
"""Whether what a request computes now may not be what its keys stand for."""


def spoilt(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, goes_on: Spoilt) -> Spoilt | None:
    """None: with this engine that never happens. ``goes_on``: whether a request is in a later turn."""
    layers = (layer for group in kv_cache_config.kv_cache_groups for layer in iter_layer_specs(group.kv_cache_spec))
    recurrent = any(isinstance(layer, MambaSpec) for layer in layers)
    if not vllm_config.num_speculative_tokens or (vllm_config.scheduler_config.async_scheduling and not recurrent):
        return None
    return lambda request: (recurrent and request.resumable) or goes_on(request)


def guard(coordinator: Any, spoilt: Spoilt) -> None:  # noqa: ANN401 (its KVCacheCoordinator)
    """Keep what is spoilt from being found by other requests on the device."""
    cache = coordinator.cache_blocks

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if not spoilt(request):
            cache(request, num_computed_tokens)

    coordinator.cache_blocks = cache_blocks
