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


def means_of_seeds(rows: Iterable[Mapping[str, Any]], by: Sequence[str], figure: str) -> Iterator[dict[str, float]]:
    """``figure`` of the rows, a mapping of numbers: the mean of each number over the rows that are alike in ``by``."""
    alike = defaultdict(list)
    for row in rows:
        alike[tuple(row[name] for name in by)].append(row[figure])
    for told in alike.values():
        yield {name: fmean(each[name] for each in told) for name in told[0]}
