"""Exports metrics for sources that do not export ours themselves, with the names that stores use, by source."""

from collections.abc import Iterator, Mapping

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tiertune_agent.collector.counters import Rows
from tiertune_connector.catalogue import BY_NAME, PREFIX


class ObservedRows(Collector):
    """The last rows of each source. A source that does not answer has none: an old value is worth nothing."""

    rows: Mapping[str, Rows]
    """By source; always replaced as a whole, as it may be collected at any time."""

    def __init__(self) -> None:
        self.rows = {}

    def collect(self) -> Iterator[Family]:
        """One family per name, for prometheus_client."""
        families: dict[str, Family] = {}
        for source, rows in self.rows.items():
            for (name, labels), value in rows.items():
                if isinstance(value, float):
                    family = families.setdefault(name, _family(name))
                    family.add_sample(PREFIX + name, {**dict(labels), "store": source}, value)
        yield from families.values()


class Merged(Collector):
    """Several collectors as one: samples of a family that several have stand together, as the format requires."""

    def __init__(self, *collectors: Collector) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


def _family(name: str) -> Family:
    metric = BY_NAME.get(name)
    text = metric.help if metric else "Told by an observed source."
    if name.endswith("_total"):
        return CounterMetricFamily(PREFIX + name, text)
    return GaugeMetricFamily(PREFIX + name, text)
