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

    def __init__(self, own: Collector) -> None:
        """``own``: what else is exported; samples of one family stand together, as the format requires."""
        self.rows = {}
        self._own = own

    def collect(self) -> Iterator[Family]:
        """One family per name, for prometheus_client."""
        families = {family.name: family for family in self._own.collect()}
        for source, rows in self.rows.items():
            for (name, labels), value in rows.items():
                if isinstance(value, float):
                    made = f"{PREFIX}{name}".removesuffix("_total")
                    family = families[made] = families.get(made) or _family(name)
                    family.add_sample(PREFIX + name, {**dict(labels), "store": source}, value)
        yield from families.values()


def _family(name: str) -> Family:
    metric = BY_NAME.get(name)  # a wrong name of one adapter's takes nobody's metrics away
    text = metric.help if metric else "Told by an observed source."
    return (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(PREFIX + name, text)
