"""Keeps sessions with drafts out of staging and the store, and from requests with the same prefix.

A request that goes on with more input (`resumable`) begins a turn with what the turn before has left. With drafts vLLM
0.32 takes over too much: tokens that are not in its text, in whose places the next input stands, or a recurrent layer's
state before the accepted drafts. So the bytes are not what their keys stand for. The device's own cache must not have
such blocks, either: another request would find them there, and store them.
"""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from typing import Any

from vllm.v1.request import Request


def spoilt(request: Request) -> bool:
    """Whether what a request computes beside drafts may not be what its keys stand for: it is, or was, resumable."""
    return request.streaming_queue is not None


def guard(coordinator: Any) -> None:  # noqa: ANN401 (its KVCacheCoordinator)
    """Keep what is spoilt from being found by other requests on the device."""
    cache = coordinator.cache_blocks

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if not spoilt(request):
            cache(request, num_computed_tokens)

    coordinator.cache_blocks = cache_blocks
