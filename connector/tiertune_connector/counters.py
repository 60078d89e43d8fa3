"""Counting: requests add to plain numbers, which are rendered only when somebody asks.

``Counters`` knows the catalogue: a name or label that is not declared there cannot be counted. Every thread counts in
cells of its own, without a lock; a reader adds them up.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tiertune_connector.catalogue import BY_NAME, METRICS, PREFIX, Kind, Metric
from tiertune_connector.documents import Json

log = logging.getLogger(__name__)
Labels = tuple[str, ...]
Gauge = tuple[str, Labels, float]
Values = dict[Labels, Sequence[float]]
"""Cells by labels: a number alone, or a histogram's count per bucket, the overflow's count, and the sum."""
Tables = dict[str, Values]
"""By name of the metric."""
_Table = dict[Labels, list[float]]
_REMEMBERED_SNAPSHOTS = 8
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_NAMESPACE = {metric.name: metric.labels.index("namespace") for metric in METRICS if "namespace" in metric.labels}
"""Place of that label, where a metric has it."""


class _Cells:
    """Counts of one thread at a time. Once it has ended, the next one adds to them, so that no sum ever falls."""

    def __init__(self) -> None:
        self.owner = threading.current_thread()
        self.tables: dict[str, _Table] = {metric.name: {} for metric in METRICS if metric.kind != "gauge"}


class _Mine(threading.local):
    """The calling thread's tables of cells."""

    def __init__(self, take: Callable[[], _Cells]) -> None:
        self.tables = take().tables


class Counters:
    """All metrics of one process. Thread-safe; ``add`` and ``observe`` cost a fraction of a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cells: list[_Cells] = []
        self._mine = _Mine(self._take_cells)
        self._gauge_sources: list[Callable[[], Iterable[Gauge]]] = []
        self._snapshots: dict[int, Tables] = {}
        self._sequence = 0

    def add(self, name: str, labels: Labels, amount: float = 1.0) -> None:
        """Add ``amount`` to a counter; KeyError if it is not declared, ValueError if it has more or fewer labels."""
        values = self._mine.tables[name]
        try:
            values[labels][0] += amount
        except KeyError:
            values[labels] = _cell(name, "counter", labels, amount)

    def observe(self, name: str, labels: Labels, value: float) -> None:
        """Put a value into a histogram; errors are those of ``add``.

        A reader may see the value's count a moment before its sum.
        """
        values = self._mine.tables[name]
        try:
            cell = values[labels]
        except KeyError:
            cell = values[labels] = _cell(name, "histogram", labels)
        cell[bisect_left(BY_NAME[name].buckets, value)] += 1
        cell[-1] += value

    def forget(self, namespace: str) -> None:
        """Drop what was counted of a namespace; what is counted of it after that begins at 0."""
        with self._lock:
            all_cells = list(self._cells)
        for cells in all_cells:
            for name, values in cells.tables.items():
                if name in _NAMESPACE:
                    for labels in [told for told in values.copy() if told[_NAMESPACE[name]] == namespace]:
                        values.pop(labels, None)

    @contextmanager
    def surviving(self, place: str, failure: str) -> Iterator[None]:
        """Catch what fails unexpectedly within: it is logged as this ``failure`` and counted by ``place``."""
        try:
            yield
        except Exception:
            log.exception(failure)
            self.add("internal_errors_total", (place,))

    def gauges_from(self, source: Callable[[], Iterable[Gauge]]) -> None:
        """Ask ``source`` for ``(name, labels, value)`` whenever gauges are rendered."""
        self._gauge_sources.append(source)

    def snapshot(self, since: int | None = None) -> tuple[int, Json]:
        """A sequence number and all metrics as ``{name: {"labels", "rows"}}``.

        With ``since``, a number returned lately, only rows that changed after it; with an unknown one, all.
        """
        now = self.tables()
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
            before = self._snapshots.get(since or 0, {})
            self._snapshots[sequence] = now
            self._snapshots.pop(sequence - _REMEMBERED_SNAPSHOTS, None)
        told = {}
        for name, values in now.items():
            known = before.get(name, {})
            if rows := [_row(labels, value) for labels, value in values.items() if known.get(labels) != value]:
                told[name] = {"labels": BY_NAME[name].labels, "rows": rows}
        return sequence, told

    def tables(self) -> Tables:
        """All values: the sums over threads, and gauges as they are now."""
        gauges: Tables = {}
        for source in self._gauge_sources:
            for name, labels, value in source():
                gauges.setdefault(name, {})[labels] = (value,)
        with self._lock:
            all_cells = list(self._cells)
        sums: Tables = {metric.name: {} for metric in METRICS if metric.kind != "gauge"}
        for cells in all_cells:
            for name, values in cells.tables.items():
                total = sums[name]
                for labels, cell in values.copy().items():
                    known = total.get(labels)
                    total[labels] = tuple(map(add, known, cell)) if known else tuple(cell)
        return sums | gauges

    def _take_cells(self) -> _Cells:
        """Cells for a thread's first event: those of a thread that has ended, or new ones."""
        with self._lock:
            for cells in self._cells:
                if not cells.owner.is_alive():
                    cells.owner = threading.current_thread()
                    return cells
            self._cells.append(_Cells())
            return self._cells[-1]


def _cell(name: str, kind: Kind, labels: Labels, first: float = 0.0) -> list[float]:
    """A new cell, once kind and labels have been checked: of a counter ``first``, of a histogram its counts and sum."""
    metric = BY_NAME[name]
    if metric.kind != kind:
        raise KeyError(name)
    if len(labels) != len(metric.labels):
        raise ValueError(f"{name} has labels {metric.labels}, not values {labels}")
    return [first] if kind == "counter" else [0.0] * (len(metric.buckets) + 2)


def _row(labels: Labels, cells: Sequence[float]) -> list[Any]:
    *counts, total = cells
    return [*labels, counts, total, sum(counts)] if counts else [*labels, total]


@dataclass(eq=False)
class PrometheusCollector(Collector):
    """Renders Counters for prometheus_client; every sample carries the store's name."""

    counters: Counters
    store: str

    def collect(self) -> Iterator[Family]:
        values = self.counters.tables()
        return (self._family(metric, values.get(metric.name, {})) for metric in METRICS)

    def _family(self, metric: Metric, values: Values) -> Family:
        family: Any = _FAMILIES[metric.kind](PREFIX + metric.name, metric.help, labels=["store", *metric.labels])
        bounds = (*map(str, metric.buckets), "+Inf")
        for labels, (*counts, total) in values.items():
            buckets = [list(zip(bounds, accumulate(counts), strict=True))] if counts else []
            family.add_metric([self.store, *labels], *buckets, total)
        return cast("Family", family)
