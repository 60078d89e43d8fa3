"""Prometheus text, asked by name: sums over what is not asked for, and None where nothing is told. Pure."""

from collections.abc import Iterable, Iterator
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families

from tiertune_agent.records import sum_known

Sample = tuple[dict[str, str], float]


class Exposition:
    """One answer of a ``/metrics``. Only what is wanted is parsed: an engine tells far more, and buckets above all."""

    def __init__(self, text: str, wanted: Iterable[str]) -> None:
        """``wanted``: names of samples, with ``_total``, ``_sum`` or ``_count``. ValueError where the text is none."""
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
        """As ``total``; 0 where the family is declared and has no such sample: prometheus_client tells it from then on.

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
