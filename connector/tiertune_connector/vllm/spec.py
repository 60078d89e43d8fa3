"""vLLM's tiering spec, with a CPU worker and a region that cannot leak."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import json
from collections.abc import Sequence
from functools import partial

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiertune_connector.vllm import compat, regions
from tiertune_connector.vllm.cpu_worker import CPUWorker
from tiertune_connector.vllm.probes import UnsupportedError


class TierTuneSpec(TieringOffloadingSpec):
    """Staging is vLLM's primary tier; beyond it there is one tier, TierTune's store."""

    splits: Sequence[int] | None = None
    """Of this rank's pages (`Engine.splits`): set it before the worker is made, and the scheduler learns of it."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._engine_id: str = regions.engine_id(config.engine_id, self.kv_bytes_per_chunk)

    def get_manager(self) -> OffloadingManager:
        """As vLLM's, and unlinks the region's file: every rank has mapped it by then, so no crash can leave it.

        UnsupportedError if ranks have rows of different sizes: vLLM would let one write over the rows of others.
        """
        if len(regions.held(self.config.engine_id)) > 1:
            raise UnsupportedError(
                "TierTune needs KV caches of one size on all ranks of an engine, for staging is cut alike for all:"
                " choose a pipeline_parallel_size that divides the model's layers evenly"
            )
        manager = super().get_manager()
        if self._scheduler_mmap is not None:
            compat.unlink(self._scheduler_mmap)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Before the region is made, regions that dead engines left are removed."""
        regions.sweep()
        with regions.making():
            return self._cpu_worker(kv_caches) if current_platform.is_cpu() else super().get_worker(kv_caches)

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = super().create_worker(kv_caches)
        self._keep(worker._mmap_region)  # noqa: SLF001 (made by vLLM)
        return worker

    def _cpu_worker(self, kv_caches: CanonicalKVCaches) -> CPUWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        self._keep(region)
        return CPUWorker(kv_caches, region, self.blocks_per_chunk)

    def _keep(self, region: SharedOffloadRegion) -> None:
        """Hold the region while this rank lives; its cleanup does not mind that the scheduler's side unlinks the file.

        What the scheduler is to know lies in it: by vLLM's handshake a connector beside this one would get it, too.
        """
        rank = self.config.parallel.rank
        regions.hold(region.fd, rank)
        if self.splits is not None:
            regions.note(region.fd, rank, json.dumps(self.splits))
        region.cleanup = partial(_cleanup, region)


def _cleanup(region: SharedOffloadRegion) -> None:
    compat.disown(region)
    SharedOffloadRegion.cleanup(region)
