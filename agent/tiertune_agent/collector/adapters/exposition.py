"""Prometheus text, queried by name: sums over labels that are not given, None if there is nothing. Pure."""

from collections.abc import Iterable, Iterator
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families

from tiertune_agent.records import sum_known

Sample = tuple[dict[str, str], float]


class Exposition:
    """One answer of a ``/metrics``. Parses only what is wanted: an engine reports far more, mostly buckets."""

    def __init__(self, text: str, wanted: Iterable[str]) -> None:
        """``wanted``: names of samples, with ``_total``, ``_sum`` or ``_count``. ValueError if it is no such text."""
        names = frozenset(wanted)
        self._samples: dict[str, list[Sample]] = {}
        self._declared: set[str] = set()
        try:
            for family in text_string_to_metric_families("\n".join(_lines(text, names)) + "\n"):
                counts = family.type == "counter" and not family.name.endswith("_total")
                self._declared.add(f"{family.name}_total" if counts else family.name)
                for sample in family.samples:
                    if isfinite(sample.value):
                        self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"it is no Prometheus text: {error}") from error

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that carry these labels."""
        return sum_known(value for told, value in self._samples.get(name, ()) if labels.items() <= told.items())

    def counted(self, name: str, **labels: str) -> float | None:
        """As ``total``, but 0 if the family is declared without such a sample, which appears with its first count.

        For counters whose label values are known from elsewhere.
        """
        found = self.total(name, **labels)
        return 0.0 if found is None and name in self._declared else found

    def split(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of a label."""
        sums: dict[str, float] = {}
        for told, value in self._samples.get(name, ()):
            if label in told:
                sums[told[label]] = sums.get(told[label], 0.0) + value
        return sums

    def declares(self, name: str) -> bool:
        """Whether the family is there, with or without samples."""
        return name in self._declared or name in self._samples

    def values(self, label: str) -> tuple[str, ...]:
        """All values of a label."""
        found = {told[label] for samples in self._samples.values() for told, _ in samples if told.get(label)}
        return tuple(sorted(found))


def _lines(text: str, names: frozenset[str]) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            if line.split(" ", 3)[2] in names:
                yield line
        elif not line.startswith("#") and line.partition("{")[0].partition(" ")[0] in names:
            yield line
