"""vLLM's KV events: for chunks that come from the store, and for those that a reset takes out of staging."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
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


class Announced:
    """Blocks in staging, as events announced them: vLLM's own do not say that a reset takes them all."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, Counter[bytes | int]] = defaultdict(Counter)
        """By group; each as often as it was announced, as chunks of several blocks may share some."""
        self._emptied = False

    def emptied(self, scheduler: OffloadingConnectorScheduler) -> None:
        """A reset has emptied staging: what was not announced yet never is."""
        for _ in scheduler.manager.take_events():
            pass
        self._emptied = True

    def told(self, events: Iterable[KVCacheEvent]) -> Iterator[KVCacheEvent]:
        """The connector's ``events``, behind the removals of what the last reset took."""
        if self._emptied:
            for group, blocks in self._blocks.items():
                if blocks:
                    yield BlockRemoved(block_hashes=list(blocks.elements()), medium=MEDIUM_CPU, group_idx=group)
            self._blocks.clear()
            self._emptied = False
        for event in events:
            blocks = self._blocks[event.group_idx]
            if isinstance(event, BlockStored):
                blocks.update(event.block_hashes)
            else:
                for block in event.block_hashes:
                    blocks[block] -= 1
                    if blocks[block] <= 0:
                        del blocks[block]
            yield event
