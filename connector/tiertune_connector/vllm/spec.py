"""vLLM's tiering spec, with a CPU worker and a region that cannot leak."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import contextlib
from pathlib import Path

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiertune_connector.vllm.cpu_worker import CPUWorker


class TierTuneSpec(TieringOffloadingSpec):
    """Staging is vLLM's primary tier; beyond it there is one tier, TierTune's store."""

    _cpu: CPUWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """As vLLM's, and unlinks the region's file: every rank has mapped it by then, so no crash can leave it."""
        manager = super().get_manager()
        if self._scheduler_mmap is not None:
            with contextlib.suppress(FileNotFoundError):
                Path(self._scheduler_mmap.mmap_path).unlink()
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        self._cpu = self._cpu or self._cpu_worker(kv_caches)
        return self._cpu

    def _cpu_worker(self, kv_caches: CanonicalKVCaches) -> CPUWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CPUWorker(kv_caches, region, self.blocks_per_chunk)
