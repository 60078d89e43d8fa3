"""The connector that `--kv-transfer-config` names."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from vllm.config import KVTransferConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats, PromMetric
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from tiertune_connector.vllm import compat, metrics
from tiertune_connector.vllm.offloading import Offloading
from tiertune_connector.vllm.probes import UnsupportedError
from tiertune_connector.vllm.step_timing import STEP, StepMetadata, WorkerTiming
from tiertune_connector.vllm.tier import TierTuneTier

logger = logging.getLogger(f"vllm.{__name__}")


class TierTuneConnector(OffloadingConnector):
    """vLLM's offloading with TierTune's store behind staging.

    It sets the load failure policy to "recompute", and `offload_prompt_only` to false (to true for a model with R-SWA),
    and says so in the log.
    """

    tier: TierTuneTier
    """The scheduler's side has it; a worker has none."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        _check_neighbours()
        self._engine = compat.Engine(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._engine.tell_tier(self.reset_cache, self._lose_steps)
        super().__init__(vllm_config, role, kv_cache_config)
        self._timing = WorkerTiming(())
        if self.connector_scheduler is not None:
            manager = self.connector_scheduler.manager
            (self.tier,) = manager.secondary_tiers
            self.tier.bind(manager.primary_tier)
            self._offloading = Offloading(self.connector_scheduler, drafts=self._engine.drafts)
            prompts_alone = str(self.connector_scheduler.config.offload_prompt_only).lower()
            logger.info(
                "TierTune: load failure policy is recompute, offload_prompt_only is %s, kv_role is not heeded",
                prompts_alone,
            )

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._offloading.keep_apart(kv_cache_manager.coordinator)
        kv_cache_manager.reset_prefix_cache = partial(self._reset, kv_cache_manager.reset_prefix_cache)

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        name = request.request_id
        self.tier.expect(name, self._engine.prompt(request, *self._offloading.asked(name)))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's, but in constant time while the store has not answered, or a load is under way."""
        name = request.request_id
        if self._offloading.transfers(name) or self.tier.must_wait(name, num_computed_tokens):
            return None, False
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None:
            self.tier.answered(name, num_computed_tokens + tokens)
        return tokens, later

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._offloading.allocated(blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        name = request.request_id
        self.tier.begun(name, self._offloading.on_device(name) + num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(self._offloading.before(scheduler_output))
        setattr(metadata, STEP, self.tier.given(compat.scheduled(scheduler_output)))
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, StepMetadata):
            self.tier.measured(metadata.seconds, metadata.gpus)
        if isinstance(metadata, OffloadingWorkerMetadata) and metadata.transfer_stats.load.bytes:
            self.tier.copied(metadata.transfer_stats.load.bytes, metadata.transfer_stats.load.time)
        if connector_output.invalid_block_ids:
            self._offloading.not_filled(connector_output.invalid_block_ids)
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        """As vLLM's; vLLM calls it even if running requests keep it from emptying the device's cache.

        The store keeps its chunks. But if the engine's weights are exchanged, no chunk from before is found any more:
        its caches are emptied at each exchange.
        """
        if self._offloading.under_way:
            self.tier.hold()
        if self._engine.exchanges_weights:
            self._engine.next_epoch()
            self._offloading.part()
            self.tier.part()
        with self._offloading.emptied():
            done = super().reset_cache()
        self.tier.promoted.clear()
        return done

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Ends a step: vLLM calls this for every output, but `update_connector_output` not for empty ones."""
        if self.connector_scheduler is not None:
            self.tier.telemetry.steps.output()
        return super().get_kv_connector_stats()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.connector_worker.spec.splits = self._engine.splits(kv_caches)
        super().register_kv_caches(kv_caches)
        self._timing = WorkerTiming(kv_caches.values())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._timing.begin(connector_metadata)

    def wait_for_save(self) -> None:
        self._timing.end()
        super().wait_for_save()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        return self._timing.add_to(super().build_connector_worker_meta())

    def take_events(self) -> Iterable[KVCacheEvent]:
        promoted, self.tier.promoted = self.tier.promoted, []
        for request, keys in promoted:
            self._offloading.describe(request, keys)
        return self._offloading.told(super().take_events())

    def _lose_steps(self) -> None:
        self.tier.telemetry.steps.lost()

    def _reset(self, empty: Callable[[], bool]) -> bool:
        """Whoever empties the device's cache alone, for new weights, does not want the old ones' chunks from here."""
        return empty() and (not self._engine.exchanges_weights or self.reset_cache() is not False)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Runs in the API server's process, which builds no connector."""
        compat.translate(vllm_config)
        metrics.unregister()
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _check_neighbours() -> None:
    """Raises UnsupportedError beside another `OffloadingConnector`, even one of TierTune.

    Workers alone know what is beside them.

    Both count under the same names, at which the API server ends. And vLLM's may copy blocks to its own staging while
    TierTune's loads into them: 0.32 orders copies within a connector only (`Offloading.allocated` does more for ours).
    """
    whole = get_current_vllm_config_or_none()
    transfer = whole.kv_transfer_config if whole is not None else None
    classes = _classes(transfer) if transfer is not None else ()
    offloading = [each.__name__ for each in classes if issubclass(each, OffloadingConnector)]
    if len(offloading) > 1:
        raise UnsupportedError(
            f"TierTune cannot serve in a MultiConnector with {' and '.join(offloading)}: one may store a block while"
            " another loads into it, and they count under the same names: leave one of them out"
        )


def _classes(transfer: KVTransferConfig) -> Iterator[type]:
    """Of the connectors in a `MultiConnector`, and of those in one of these, however deep."""
    for child in transfer.kv_connector_extra_config.get("connectors", []):
        inner = KVTransferConfig(**child)
        found = KVConnectorFactory.get_connector_class(inner)
        yield found
        if issubclass(found, MultiConnector):
            yield from _classes(inner)
