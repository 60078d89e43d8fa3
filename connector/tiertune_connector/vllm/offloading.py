"""vLLM's scheduler of offloading: what 0.32 gets wrong is set right before it is told, and asked of it here alone."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import Request

from tiertune_connector.vllm import windows


class Offloading:
    """Guards what it stores, loads and hands to workers. Runs on the scheduler thread."""

    def __init__(self, scheduler: Any, *, drafts: int = 0) -> None:  # noqa: ANN401 (its own)
        """``scheduler`` is its `OffloadingConnectorScheduler`; ``drafts``: tokens that the engine speculates."""
        self._scheduler, self._drafts = scheduler, drafts
        self._requests: dict[str, Any] = scheduler._req_status  # noqa: SLF001 (vLLM has no public way to any of this)
        self._announced: defaultdict[int, Counter[bytes | int]] = defaultdict(Counter)
        """Blocks in staging by group, each as often as it was announced, as chunks of several may share some."""
        self._emptied = False
        windows.guard(scheduler)
        self._complete, scheduler.manager.complete_store = scheduler.manager.complete_store, self._complete_store

    def keep_apart(self, coordinator: Any) -> None:  # noqa: ANN401 (its KVCacheCoordinator)
        """Keep sessions with drafts from requests with the same prefix, as `before` keeps them out of staging.

        A request that goes on with more input (`resumable`) begins a turn with what the turn before has left. With
        drafts vLLM 0.32 takes over too much: tokens that are not in its text, in whose places the next input stands, or
        a recurrent layer's state before the accepted drafts. So the bytes are not what their keys stand for: another
        request would find them in the device's own cache, and store them.
        """
        cache = coordinator.cache_blocks

        def cache_blocks(request: Request, num_computed_tokens: int) -> None:
            if not _spoilt(request):
                cache(request, num_computed_tokens)

        if self._drafts:
            coordinator.cache_blocks = cache_blocks

    @property
    def under_way(self) -> bool:
        """Whether the worker has copies between device and staging to do."""
        return bool(self._scheduler._jobs)  # noqa: SLF001

    def transfers(self, request: str) -> bool:
        """Whether the worker has copies to do for a request: until they are done, vLLM does not look for its chunks."""
        return bool(self._requests[request].transfer_jobs)

    def on_device(self, request: str) -> int:
        """Tokens of a request that the device had when vLLM's scheduler last asked."""
        return self._requests[request].num_locally_computed_tokens

    def asked(self, request: str) -> tuple[dict[int, list[OffloadKey]], int | None]:
        """Keys of the whole chunks of a request that vLLM's scheduler knows, by group, and tokens to load at most.

        The latter its client may set (`max_load_tokens`); None: any number.
        """
        status = self._requests[request]
        status.update_offload_keys()  # vLLM builds keys only when it looks for them
        groups = zip(self._scheduler.config.kv_group_configs, status.group_states, strict=True)
        return {config.group_idx: list(state.offload_keys) for config, state in groups}, status.max_load_tokens

    def allocated(self, blocks: KVCacheBlocks) -> None:
        """Blocks are given to a request: what is still to be copied from them to staging is copied before this step.

        By itself vLLM does so only for blocks that it loads into, or that are computed at once: another connector of a
        `MultiConnector` would load into the others while they are copied.
        """
        self._scheduler._current_batch_allocated_block_ids.update(  # noqa: SLF001
            block.block_id for group in blocks.blocks for block in group if not block.is_null
        )

    def before(self, output: SchedulerOutput) -> SchedulerOutput:
        """Call before vLLM's scheduler is told a step: returns the step as it can take it."""
        for new in output.scheduled_new_reqs:
            self._begin(new)
        for name in output.finished_req_ids:
            self._bound(name)
        if self._drafts:
            for name in (*output.num_scheduled_tokens, *output.finished_req_ids):
                status = self._requests.get(name)
                if status is not None and _spoilt(status.req):
                    status.max_offload_tokens = 0
        return self._without_loading(self._without_tails(output))

    def not_filled(self, blocks: Collection[int]) -> None:
        """Another connector failed to fill ``blocks``: jobs that store for requests that have one of them fail.

        A connector of a `MultiConnector` may fill blocks in the very step that computes with them. It reports a failure
        only with that step's output. Then vLLM recomputes the blocks, or ends the request, which stores nothing more,
        because vLLM takes it for computed. But by then the worker has been told to copy them to staging, where requests
        with the same prefix would find them, wherever in the prompt they are.
        """
        empty = frozenset(blocks)
        for status in self._requests.values():
            if all(empty.isdisjoint(state.block_ids) for state in status.group_states):
                continue
            for job in (self._scheduler._jobs[number] for number in status.transfer_jobs):  # noqa: SLF001
                if job.is_store:
                    job.keys = _Spoilt(job.keys)
            if status.req.is_finished():
                status.max_offload_tokens = 0

    def part(self) -> None:
        """What present requests compute is no longer copied to staging: it may be made of weights that are gone."""
        for status in self._requests.values():
            status.max_offload_tokens = 0

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Around vLLM's own reset: it refuses one until a step has told which jobs the reset before left to end."""
        windows.emptied(self._scheduler)
        scheduler = self._scheduler
        before, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()  # noqa: SLF001
        try:
            yield
        finally:
            scheduler._current_batch_jobs_to_flush |= before  # noqa: SLF001
        for _ in scheduler.manager.take_events():  # what was not announced yet never is
            pass
        self._emptied = True

    def describe(self, request: str, keys: Collection[OffloadKey]) -> None:
        """Let the events of ``keys``, which were loaded for ``request``, name their tokens and blocks.

        vLLM records those when a lookup hits in staging, and announces a loaded chunk at the end of the step that saw
        the load end. While a request's load is under way it is not looked up, so without this call the chunk would be
        announced without tokens, and its removal with blocks that nobody had heard of. Call it before `told`. A request
        that is gone is ignored: nothing is known of it any more.
        """
        tracker, status = self._scheduler._events_tracker, self._requests.get(request)  # noqa: SLF001
        if not tracker.self_describing_enabled or status is None:
            return
        wanted = set(keys)
        for config, state in zip(self._scheduler.config.kv_group_configs, status.group_states, strict=True):
            for index, key in enumerate(state.offload_keys):
                if key in wanted:
                    tracker.record_lookup(status.req, config, index, key)

    def told(self, events: Iterable[KVCacheEvent]) -> Iterator[KVCacheEvent]:
        """VLLM's ``events``, behind the removals of what the last reset took out of staging: it tells of none."""
        if self._emptied:
            for group, blocks in self._announced.items():
                if blocks:
                    yield BlockRemoved(block_hashes=list(blocks.elements()), medium=MEDIUM_CPU, group_idx=group)
            self._announced.clear()
            self._emptied = False
        for event in events:
            blocks = self._announced[event.group_idx]
            if isinstance(event, BlockStored):
                blocks.update(event.block_hashes)
            else:
                for block in event.block_hashes:
                    blocks[block] -= 1
                    if blocks[block] <= 0:
                        del blocks[block]
            yield event

    def _begin(self, new: Any) -> None:  # noqa: ANN401 (its NewRequestData)
        """A request is new, or has more input (`resumable`), and its blocks are told whole.

        vLLM already knows blocks of the latter, and appends the told ones to these: what comes then would be stored
        from the wrong blocks.

        What images are made of is sent along, always. vLLM leaves it out for images in tokens that need not be
        computed. But the request may be preempted and have to compute them after all, and nothing is sent a second
        time: then the engine ends. vLLM alone has mostly encoded such an image before, and still knows what came of it;
        an engine that fetches its tokens has never seen it.
        """
        status = self._requests[new.req_id]
        new.mm_features = status.req.mm_features
        for state in status.group_states:
            state.block_ids.clear()

    def _bound(self, name: str) -> None:
        """A request has ended: only what it has computed is stored.

        vLLM takes it as computed up to its last token unless it was aborted. But an error may end it amid its prompt,
        or the output of a step that was under way when it was preempted: then its blocks may be another request's by
        now.
        """
        status = self._requests.get(name)
        if status is not None and status.req.is_finished():  # else another of its name has begun
            asked, computed = status.max_offload_tokens, status.req.num_computed_tokens
            status.max_offload_tokens = computed if asked is None else min(asked, computed)

    def _without_tails(self, output: SchedulerOutput) -> SchedulerOutput:
        """VLLM fails if a prompt's partial chunk ends after `max_offload_tokens`.

        Any sender of a request to a recurrent model may set that.
        """
        state = output.kv_connector_block_state
        if state is None or not state.boundary_state_offloads:
            return output
        kept = {}
        for name, ends in state.boundary_state_offloads.items():
            status = self._requests.get(name)
            most = status.max_offload_tokens if status else None
            kept[name] = [each for each in ends if most is None or each[2] <= most]
        return replace(output, kv_connector_block_state=replace(state, boundary_state_offloads=kept))

    def _without_loading(self, output: SchedulerOutput) -> SchedulerOutput:
        """VLLM fails if something is loaded for a request that the step preempted.

        A request that a reset preempted may come again in that very step, and find what it needs in staging.
        """
        loading = {job.req_id for job in self._scheduler._current_batch_load_jobs.values()}  # noqa: SLF001
        preempted = output.preempted_req_ids or set()
        return replace(output, preempted_req_ids=preempted - loading) if loading & preempted else output

    def _complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, *, success: bool = True) -> None:
        """VLLM by itself lets no job fail."""
        self._complete(keys, req_context, success and not isinstance(keys, _Spoilt))


def _spoilt(request: Request) -> bool:
    """Whether what a request computes beside drafts may not be what its keys stand for: it is, or was, resumable."""
    return request.streaming_queue is not None


class _Spoilt(set[OffloadKey]):
    """Keys of a job that copies to staging something else than the keys stand for."""
