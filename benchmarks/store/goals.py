"""What each figure must reach, and what it aims at."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    must: float
    aim: float

    def reached(self, value: float) -> bool:
        """What aims higher than it must be is to be high; what aims lower, low."""
        return value >= self.must if self.aim > self.must else value <= self.must


PATHS = {
    "dram_load_32m": Goal(0.70, 0.85),
    "dram_load_8m": Goal(0.60, 0.75),
    "dram_load_3m": Goal(0.45, 0.60),
    "dram_store_32m": Goal(0.60, 0.80),
    "dram_store_8m": Goal(0.50, 0.65),
    "disk_read_32m": Goal(0.80, 0.90),
    "disk_write_32m": Goal(0.50, 0.80),
    "redis_get_32m": Goal(0.50, 0.70),
    "redis_set_32m": Goal(0.35, 0.60),
    "redis_get_32m_vs_redispy": Goal(5, 9),
    "redis_set_32m_vs_redispy": Goal(4, 8),
}
"""Times the baseline's speed."""
FAULTS = Goal(64, 0)
"""Minor faults of an operation of 32 MiB, of client and store together."""
LOOKUP_P50_US = Goal(100, 40)
LOOKUP_P99 = Goal(5, 3)
"""Times a bare echo's."""
OVERHEAD = {"bookkeeping_32m": Goal(0.02, 0.01), "metric_event": Goal(1.0, 0.2)}


def judged(document: Mapping[str, Any]) -> Iterator[tuple[str, float, Goal]]:
    """Every figure of `bench.json` that has a goal."""
    for name, path in document.get("paths", {}).items():
        yield name, path["ratio"], PATHS[name]
    if lookup := document.get("lookup"):
        yield "lookup p50, us", lookup["p50_us"], LOOKUP_P50_US
        yield "lookup p99, x echo", lookup["p99_us"] / lookup["echo_p99_us"], LOOKUP_P99
    for name, count in document.get("faults_per_op", {}).items():
        yield f"faults of {name}", count, FAULTS
    for name, share in document.get("overhead", {}).items():
        yield name, share, OVERHEAD[name]
