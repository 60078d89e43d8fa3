"""What was computed on blocks that another connector failed to fill, kept out of staging and of the store.

A connector of a `MultiConnector` that fills blocks in the step that computes with them tells only with that step's
output that it could not. Then vLLM computes them anew, or ends the request; but the worker has been told by then to
copy them to staging, for whoever begins alike.
"""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext


class Spoiled(set[OffloadKey]):
    """Keys of a job that copies something else to staging than they tell."""


def guard(scheduler: Any) -> None:  # noqa: ANN401 (its Scheduler)
    """From now on spoiled jobs fail when they end; vLLM knows no job that does."""
    complete = scheduler.manager.complete_store

    def complete_store(keys: Collection[OffloadKey], req_context: ReqContext, *, success: bool = True) -> None:
        complete(keys, req_context, success and not isinstance(keys, Spoiled))

    scheduler.manager.complete_store = complete_store


def spoil(scheduler: Any, blocks: Collection[int]) -> None:  # noqa: ANN401 (its Scheduler)
    """Nothing came into ``blocks``: what requests that have one are storing is not stored, wherever in the prompt.

    One that has ended meanwhile stores nothing more: vLLM takes it for computed.
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
