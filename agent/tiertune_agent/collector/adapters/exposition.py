"""Prometheus text, queried by name: sums over labels that are not given, None if there is nothing. Pure."""

from collections.abc import Iterable
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families

from tiertune_agent.records import added_up, grouped, sum_known

Sample = tuple[dict[str, str], float]
MOST_OF_LINE, MOST = 4 << 10, 4 << 20
"""Characters to parse, of a line and in all: it takes minutes to parse a line of 2 MiB, an hour for one of 10."""


class Exposition:
    """One answer of a ``/metrics``. Parses only what is asked for: an engine reports far more, mostly buckets."""

    def __init__(self, text: str, wanted: Iterable[str] = ()) -> None:
        """``wanted``: names of samples that are parsed at once, so that a nonsensical one is a ValueError here."""
        self._samples: dict[str, list[Sample]] = {}
        self._left = MOST
        lines = text.split("\n")  # a label may hold what Unicode takes for the end of a line
        self._declared = {line.split(" ", 3)[2] for line in lines if line.startswith("# TYPE ")}
        self._lines = grouped(lines, lambda line: line.partition("{")[0].partition(" ")[0])
        for name in wanted:
            self._of(name)

    def _of(self, name: str) -> list[Sample]:
        """Samples with this name, which ends with ``_total``, ``_sum`` or ``_count`` where they do.

        ValueError if they are no Prometheus text.
        """
        if name not in self._samples:
            lines = self._lines.get(name, ())
            self._left -= sum(map(len, lines))
            if self._left < 0 or max(map(len, lines), default=0) > MOST_OF_LINE:
                raise ValueError(f"it tells more of {name} than can be read in time")
            text = "\n".join(lines)
            try:
                samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            except (ValueError, KeyError, IndexError) as error:
                raise ValueError(f"it is no Prometheus text: {error}") from error
            self._samples[name] = [(sample.labels, sample.value) for sample in samples if isfinite(sample.value)]
        return self._samples[name]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that carry these labels."""
        return sum_known(value for told, value in self._of(name) if labels.items() <= told.items())

    def counted(self, name: str, **labels: str) -> float | None:
        """As ``total``, but 0 if the family is declared without such a sample, which appears with its first count.

        For counters whose label values are known from elsewhere.
        """
        found = self.total(name, **labels)
        return 0.0 if found is None and self.declares(name) else found

    def split(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of a label."""
        return added_up((told[label], value) for told, value in self._of(name) if label in told)

    def declares(self, name: str) -> bool:
        """Whether the family is there, with or without samples."""
        return name in self._declared or bool(self._of(name))

    def values(self, label: str) -> tuple[str, ...]:
        """All values of a label, in samples read so far."""
        found = {told[label] for samples in self._samples.values() for told, _ in samples if told.get(label)}
        return tuple(sorted(found))
