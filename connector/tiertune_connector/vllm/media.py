"""Images and the like of requests whose first tokens came from the store."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput


def keep(scheduler: Any, output: SchedulerOutput) -> None:  # noqa: ANN401 (its Scheduler)
    """Call before a step goes to the workers: what a new request's images are made of is sent along, always.

    0.32 leaves it out for images in tokens that need not be computed. But the request may be preempted and have to
    compute them after all, and nothing is sent a second time: then the engine ends. vLLM alone has mostly encoded such
    an image before, and still knows what came of it; an engine that fetches its tokens has never seen it.
    """
    for new in output.scheduled_new_reqs:
        new.mm_features = scheduler._req_status[new.req_id].req.mm_features  # noqa: SLF001
