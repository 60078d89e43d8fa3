"""Figures over rows; None: there are no rows."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any


def mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def worst(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def means_of_seeds(rows: Iterable[Mapping[str, Any]], by: Sequence[str]) -> Iterator[dict[str, float]]:
    """For each group of rows alike in ``by``: per run, the mean of their mean times to the first token."""
    alike = defaultdict(list)
    for row in rows:
        alike[tuple(row[name] for name in by)].append(row["ttft_mean_s"])
    for told in alike.values():
        yield {name: fmean(each[name] for each in told) for name in told[0]}
