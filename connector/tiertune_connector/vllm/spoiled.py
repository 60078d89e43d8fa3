"""Keeps out of staging and the store what was computed on blocks that another connector failed to fill.

A connector of a `MultiConnector` may fill blocks in the very step that computes with them. It reports a failure only
with that step's output. Then vLLM recomputes the blocks, or ends the request. But by then the worker has been told to
copy them to staging, where requests with the same prefix would find them.
"""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext


class Spoiled(set[OffloadKey]):
    """Keys of a job that copies to staging something else than the keys stand for."""


def guard(scheduler: Any) -> None:  # noqa: ANN401 (its Scheduler)
    """From now on spoiled jobs fail when they end; vLLM by itself lets none fail."""
    complete = scheduler.manager.complete_store

    def complete_store(keys: Collection[OffloadKey], req_context: ReqContext, *, success: bool = True) -> None:
        complete(keys, req_context, success and not isinstance(keys, Spoiled))

    scheduler.manager.complete_store = complete_store


def spoil(scheduler: Any, blocks: Collection[int]) -> None:  # noqa: ANN401 (its Scheduler)
    """``blocks`` were not filled: store jobs of requests that have one of them fail, wherever in the prompt.

    A request that has ended meanwhile stores nothing more, because vLLM takes it for computed.
    """
    empty = frozenset(blocks)
    for status in scheduler._req_status.values():  # noqa: SLF001
        if all(empty.isdisjoint(state.block_ids) for state in status.group_states):
            continue
        for job in (scheduler._jobs[number] for number in status.transfer_jobs):  # noqa: SLF001
            if job.is_store:
                job.keys = Spoiled(job.keys)
        if status.req.is_finished():
            status.max_offload_tokens = 0
