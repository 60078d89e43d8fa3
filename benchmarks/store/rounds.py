"""Paths and their baselines, timed in turns: a machine that slows down slows both."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

Once = Callable[[int], None]
"""Does the operation of that number once."""
WARM = 3
"""First rounds, which are not kept."""


def interleaved(
    paths: Mapping[str, Once], rounds: int, *, warm: int = WARM, between: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each path in each round, every second round backwards; ``between`` comes before each, untimed."""
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(warm + rounds):
        for name in list(paths)[:: 1 if number % 2 else -1]:
            between()
            start = perf_counter()
            paths[name](number)
            took_s = perf_counter() - start
            if number >= warm:
                seconds[name].append(took_s)
    return seconds


def ratio(ours: Sequence[float], baseline: Sequence[float], baseline_name: str, nbytes: int) -> dict[str, Any]:
    """As `bench.json` tells a path: medians, and our speed over the baseline's."""
    mine, theirs = median(ours), median(baseline)
    return {
        "gb_per_s": nbytes / mine / 1e9,
        "baseline": baseline_name,
        "baseline_gb_per_s": nbytes / theirs / 1e9,
        "ratio": theirs / mine,
        "samples": len(ours),
    }


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
