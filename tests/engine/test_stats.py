"""Our counters in vLLM's own Prometheus metrics: an undeclared name would end its API server."""

from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tiertune_connector.cost import Reason
from tiertune_connector.protocol.messages import TierReport
from tiertune_connector.vllm.connector import TierTuneConnector
from tiertune_connector.vllm.metrics import connector_stats, definitions, unregister
from tiertune_connector.vllm.stats import METRICS, RESULTS, TIERS, EngineStats


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return built(registry=registry)


def built(**fields):
    """As the API server builds them: by the connector's class alone, from what the operator wrote."""
    transfer = SimpleNamespace(
        kv_connector_extra_config={"socket": "/run/tiertune/store.sock", "staging": "1GiB"},
        kv_load_failure_policy="fail",
    )
    return TierTuneConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=transfer),
        {kind: partial(kind, **fields) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["llama", "0"], 1: ["llama", "1"]},
    )


def everything():
    """Counts once whatever EngineStats can count."""
    stats = EngineStats(chunk_tokens=128)
    stats.looked_up([*TIERS, "tape"], 9, late=True)
    stats.gated(
        TierReport(tier, 2, 256, fetched, reason, 0.1, 0.2, actual_s, outcome)
        for tier in TIERS
        for reason in [*Reason, "new"]
        for fetched, actual_s in [(0, None), (256, 0.1), (256, 0.9)]
        for outcome in ("won", "lost", "late", "failed", "skipped", "unknown")
    )
    for result in [*RESULTS, "new"]:
        stats.stored(result)
    return stats


def shipped(stats):
    """What arrives in the API server's process."""
    scheduler_stats = SchedulerStats(kv_connector_stats=stats.data)
    return MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(scheduler_stats)).kv_connector_stats


def stored(registry):
    labels = {"engine": "0", "model_name": "llama", "result": "stored"}
    return registry.get_sample_value("tiertune_engine_stored_chunks_total", labels)


def test_every_name_that_can_be_counted_is_declared(metrics, registry):
    """Shipped as vLLM ships it and observed by its own class, all of it is on /metrics with vLLM's labels and ours."""
    changes = everything().take(connected=True)
    assert {name for name, _ in changes} == {metric.name for metric in METRICS}, "everything() leaves something out"
    metrics.observe(shipped(connector_stats(changes)), engine_idx=1)
    text = generate_latest(registry).decode()
    assert 'tiertune_engine_store_connected{engine="1",model_name="llama"} 1.0' in text
    for metric in METRICS:
        samples = [line for line in text.splitlines() if line.startswith(f"tiertune_{metric.name}{{")]
        assert samples, metric.name
        assert all(f'{label}="' in samples[0] for label in metric.labels)


def test_increases_add_up_over_steps_and_ranks(metrics, registry):
    """Taken twice, merged as vLLM merges them, observed once."""
    stats = EngineStats(chunk_tokens=128)
    stats.stored("stored", 2)
    first = connector_stats(stats.take(connected=True))
    stats.stored("stored", 3)
    merged = OffloadingConnectorStats().aggregate(first).aggregate(connector_stats(stats.take(connected=True)))
    metrics.observe(merged.data)
    assert stored(registry) == 5


def test_no_change_is_no_stats():
    """Most steps have nothing to ship."""
    assert connector_stats({}) is None


def test_an_undeclared_name_is_fatal_in_vllm(metrics):
    """Why the first test is there."""
    stats = OffloadingConnectorStats()
    stats.increase_counter("tiertune_engine_invented", 1)
    with pytest.raises(AssertionError):
        metrics.observe(stats.data)


def test_names_and_labels_are_new_to_vllm():
    """No label of ours is one that vLLM sets itself; counters leave `_total` to the Prometheus client."""
    assert not {label for one in definitions().values() for label in one.labelnames} & {"model_name", "engine"}
    assert not [name for name in definitions() if name.endswith("_total")]


def test_a_process_may_have_one_engine_after_another():
    """Each registers all names with the process, after vLLM has taken back its own, and the later one's are shown."""
    stats = EngineStats(chunk_tokens=128)
    stats.stored("stored", 2)
    try:
        for _ in range(2):
            unregister_vllm_metrics()
            later = built()
        later.observe(connector_stats(stats.take(connected=True)).data)
        assert stored(REGISTRY) == 2
    finally:
        unregister_vllm_metrics()
        unregister()
