"""Every metric of the agent in one place. Declaring one registers it."""

from collections.abc import Container
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tiertune_agent.collector.exported import ObservedRows
from tiertune_connector.catalogue import PREFIX, SECONDS_BUCKETS, Metric

METRICS: tuple[Metric, ...] = (
    Metric("agent_decisions_total", "counter", "Decisions that entered a state.", ("tuner", "state")),
    Metric(
        "agent_change_timestamp_seconds",
        "gauge",
        "When the agent last changed a setting of a store, by what it became: its value, or up or down for figures.",
        ("tuner", "store", "tier", "setting", "change", "state"),
    ),
    Metric(
        "agent_money_total",
        "counter",
        "The ledger at the policy's prices: worth of engine seconds saved and lost, cost of rent and network.",
        ("store", "tier", "kind"),
    ),
    Metric("agent_loop_seconds", "histogram", "Seconds of one round of the loop.", (), SECONDS_BUCKETS),
    Metric("agent_last_success_timestamp_seconds", "gauge", "When a job last ended well.", ("job",)),
    Metric("agent_incidents", "gauge", "Open incidents.", ("kind",)),
    Metric("agent_job_errors_total", "counter", "Rounds of a job that ended in an unexpected error.", ("job",)),
    Metric("agent_samples_missed", "gauge", "Samples that stores dropped before they were read, for lack of room."),
    Metric("tier_capacity_bytes", "gauge", "Bytes that the remote may hold: desired or effective.", ("tier", "state")),
    Metric("tier_resident_bytes", "gauge", "Bytes that the remote holds.", ("tier",)),
    Metric(
        "tier_evictions_total",
        "counter",
        "Keys that the remote evicted while this agent led.",
        ("tier", "algorithm", "reason"),
    ),
    Metric(
        "observed_chunks_total",
        "counter",
        "Chunks of an observed source that reports no bytes: to be stored (try), stored (write), loaded (read).",
        ("store", "tier", "operation"),
    ),
    Metric("observed_wait_seconds_total", "counter", "Seconds that requests waited for chunks there.", ("store",)),
    Metric("observed_loaded_tokens_total", "counter", "Tokens of these chunks.", ("store",)),
    Metric(
        "observed_prefill_seconds_total", "counter", "Seconds of prefill of requests there, as they saw it.", ("store",)
    ),
    Metric("observed_prefill_tokens_total", "counter", "Tokens computed in these seconds.", ("store",)),
    Metric("agent_leader", "gauge", "1 where this agent leads, 0 where it stands by."),
)


_LABELS = {metric.name: metric.labels for metric in METRICS}


class AgentMetrics:
    """One process's values. A name that is not in the catalogue is a KeyError."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.observed = ObservedRows(self._registry)
        self._families = {metric.name: self._register(metric) for metric in METRICS}

    def count(self, name: str, *labels: str, amount: float = 1.0) -> None:
        self._child(name, *labels).inc(amount)

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """None: the value is not known, and not exported."""
        if value is not None:
            self._child(name, *labels).set(value)
        else:
            with suppress(KeyError):  # none was
                self._families[name].remove(*labels)

    def set_later(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, unless it is higher already. Looks at no other sample of the metric."""
        child = self._child(name, *labels)
        known = (sample.value for one in child.collect() for sample in one.samples)
        child.set(max(value, *known))

    def clear(self, name: str) -> None:
        """Remove all samples of a metric."""
        self._families[name].clear()

    def keep(self, name: str, label: str, values: Container[str]) -> None:
        """Remove the metric's samples whose ``label`` has none of these values."""
        place = _LABELS[name].index(label)
        for labels in self.told(name):
            if labels[place] not in values:
                self.set(name, None, *labels)

    def told(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of a gauge by its labels, in their order; of a counter those of any of its samples."""
        order = _LABELS[name]
        samples = (sample for one in self._families[name].collect() for sample in one.samples)
        return {tuple(sample.labels[each] for each in order): sample.value for sample in samples}

    def observe(self, name: str, seconds: float) -> None:
        self._child(name).observe(seconds)

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.observed)

    def _child(self, name: str, *labels: str) -> Any:  # noqa: ANN401 (a Counter, Gauge or Histogram, as declared)
        family = self._families[name]
        return family.labels(*labels) if labels else family

    def _register(self, metric: Metric) -> Counter | Gauge | Histogram:
        name = PREFIX + metric.name
        if metric.kind == "histogram":
            return Histogram(name, metric.help, metric.labels, buckets=metric.buckets, registry=self._registry)
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(name, metric.help, metric.labels, registry=self._registry)
