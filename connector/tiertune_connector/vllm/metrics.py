"""The engine's counters in vLLM's own terms. A name that is counted but not declared ends vLLM's API server."""

from collections.abc import Mapping

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from tiertune_connector.catalogue import PREFIX
from tiertune_connector.vllm.stats import CONNECTED, METRICS, Key

KINDS = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """All that EngineStats can count; vLLM puts its labels `model_name` and `engine` before each one's own."""
    return {vllm_name(each.name): KINDS[each.kind](documentation=each.help, labelnames=each.labels) for each in METRICS}


def unregister() -> None:
    """Unregister the metrics of an earlier engine of this process: vLLM only does so for names with its own prefix."""
    names = definitions()
    for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 (as vLLM does)
        if getattr(collector, "_name", None) in names:
            REGISTRY.unregister(collector)


def connector_stats(changes: Mapping[Key, float]) -> OffloadingConnectorStats | None:
    """``changes`` for vLLM to carry to its API server; None if there are none."""
    stats = OffloadingConnectorStats()
    for (name, labels), value in changes.items():
        change = stats.set_gauge if (name, labels) == CONNECTED else stats.increase_counter
        change(vllm_name(name), value, labels)
    return None if stats.is_empty() else stats


def vllm_name(name: str) -> str:
    """Names are taken as they are; the Prometheus client puts `_total` behind a counter's."""
    return PREFIX + name.removesuffix("_total")
