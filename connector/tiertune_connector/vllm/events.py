"""vLLM's KV events for chunks that come from the store."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections.abc import Collection

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import OffloadKey


def describe(scheduler: OffloadingConnectorScheduler, request: str, keys: Collection[OffloadKey]) -> None:
    """Let the events of ``keys``, which were loaded for ``request``, name their tokens and blocks.

    vLLM records those when a lookup hits in staging, and announces a loaded chunk at the end of the step that saw the
    load end. While a request's load is under way it is not looked up, so without this call the chunk would be announced
    without tokens, and its removal with blocks that nobody had heard of. Call it before `take_events`. A request that
    is gone is ignored: nothing is known of it any more.
    """
    tracker, status = scheduler._events_tracker, scheduler._req_status.get(request)  # noqa: SLF001
    if not tracker.self_describing_enabled or status is None:
        return
    wanted = set(keys)
    for config, state in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
        for index, key in enumerate(state.offload_keys):
            if key in wanted:
                tracker.record_lookup(status.req, config, index, key)
