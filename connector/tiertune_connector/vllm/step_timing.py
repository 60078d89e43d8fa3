"""Device seconds of every step: measured by each rank's worker, carried to the scheduler with its other results."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from tiertune_connector.profile.timers import Mark, Timer, cuda_timer, gpu_uuid

STEP = "tiertune_step"
"""Attribute of a step's metadata: its number."""


@dataclass
class StepMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata, and the device seconds of steps that are over."""

    seconds: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Those of every rank, by the step's number."""
    gpus: tuple[str, ...] = ()
    """UUIDs."""

    def aggregate(self, other: OffloadingWorkerMetadata) -> "StepMetadata":
        merged = OffloadingWorkerMetadata.aggregate(self, other)
        seconds = dict(self.seconds)
        for number, ranks in getattr(other, "seconds", {}).items():
            seconds[number] = seconds.get(number, ()) + ranks
        gpus = (*self.gpus, *getattr(other, "gpus", ()))
        return StepMetadata(merged.completed_jobs, merged.transfer_stats, seconds, gpus)


class WorkerTiming:
    """Times the forward pass of one rank. Without CUDA it times nothing: the scheduler's wall time is better."""

    def __init__(self, caches: Iterable[torch.Tensor]) -> None:
        """``caches``: the KV caches of the rank; none on the scheduler's side."""
        device = next((cache.device for cache in caches if cache.is_cuda), None)
        self._timer: Timer[int] | None = cuda_timer(device) if device is not None else None
        self._gpus = (gpu_uuid(device),) if device is not None else ()
        self._mark: Mark[int] | None = None

    def begin(self, metadata: KVConnectorMetadata) -> None:
        number = getattr(metadata, STEP, None)
        if self._timer is not None and number is not None:
            self._mark = self._timer.start(number)

    def end(self) -> None:
        mark, self._mark = self._mark, None
        if self._timer is not None:
            self._timer.stop(mark)

    def add_to(self, metadata: OffloadingWorkerMetadata | None) -> OffloadingWorkerMetadata | None:
        """``metadata`` with the seconds of the steps that have ended since the last call.

        Never vLLM's own kind where there is a timer: that would drop the seconds of the ranks that it is merged with.
        """
        ended = self._timer.poll() if self._timer is not None else []
        if self._timer is None or (metadata is None and not ended):
            return metadata
        plain = metadata or OffloadingWorkerMetadata()
        seconds = {number: (took,) for number, took in ended}
        gpus, self._gpus = self._gpus, ()
        return StepMetadata(plain.completed_jobs, plain.transfer_stats, seconds, gpus)
