"""The connector that `--kv-transfer-config` names."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import logging
from collections.abc import Mapping
from types import MappingProxyType

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from tiertune_connector.vllm import compat
from tiertune_connector.vllm.settings import for_vllm
from tiertune_connector.vllm.tier import TierTuneTier

logger = logging.getLogger(f"vllm.{__name__}")


class TierTuneConnector(OffloadingConnector):
    """vLLM's offloading with TierTune's store behind staging.

    It sets the load failure policy to "recompute" and `offload_prompt_only` to false, and says so in the log.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        compat.check_version()
        compat.check_model(vllm_config, kv_cache_config)
        _translate(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            _translate(vllm_config, _tier_arguments(vllm_config, kv_cache_config))
        super().__init__(vllm_config, role, kv_cache_config)
        self._tier: TierTuneTier | None = None
        if self.connector_scheduler is not None:
            (self._tier,) = self.connector_scheduler.manager.secondary_tiers
            logger.info("TierTune: load failure policy is recompute, offload_prompt_only is false")

    @property
    def tier(self) -> TierTuneTier:
        """Of the scheduler's side."""
        assert self._tier is not None
        return self._tier

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        self.tier.expect(request.request_id, request.num_prompt_tokens)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's, but in constant time while the store has not answered."""
        if self.tier.waiting(request.request_id):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        self.tier.steps.given(list(compat.scheduled(scheduler_output)))
        return metadata

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Ends a step: vLLM asks for every output, also for empty ones, which `update_connector_output` misses."""
        if self._tier is not None:
            self._tier.steps.output()
        return super().get_kv_connector_stats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """In the API server's process, which builds no connector."""
        _translate(vllm_config)
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _translate(vllm_config: VllmConfig, tier: Mapping[str, object] = MappingProxyType({})) -> None:
    transfer = vllm_config.kv_transfer_config
    transfer.kv_connector_extra_config = for_vllm(transfer.kv_connector_extra_config, tier)
    transfer.kv_load_failure_policy = "recompute"


def _tier_arguments(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, object]:
    config = build_offloading_config(vllm_config, kv_cache_config)
    rank_bytes_per_token = config.worker_kv_bytes_per_block // config.groups[0].tokens_per_block
    return {
        "namespace": compat.namespace(vllm_config, kv_cache_config, config),
        "shape": compat.model_shape(vllm_config, rank_bytes_per_token * config.parallel.world_size),
    }
