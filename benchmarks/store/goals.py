"""What each figure must reach, and what it aims at."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.goals import Goal

PATHS = {
    "dram_load_32m": Goal("at least", 0.70, 0.85),
    "dram_load_8m": Goal("at least", 0.60, 0.75),
    "dram_load_3m": Goal("at least", 0.45, 0.60),
    "dram_store_32m": Goal("at least", 0.60, 0.80),
    "dram_store_8m": Goal("at least", 0.50, 0.65),
    "disk_read_32m": Goal("at least", 0.80, 0.90),
    "disk_write_32m": Goal("at least", 0.50, 0.80),
    "redis_get_32m": Goal("at least", 0.50, 0.70),
    "redis_set_32m": Goal("at least", 0.35, 0.60),
    "redis_get_32m_vs_redispy": Goal("at least", 5, 9),
    "redis_set_32m_vs_redispy": Goal("at least", 4, 8),
}
"""Times the baseline's speed."""
FAULTS = Goal("at most", 64, 0)
"""Minor faults of an operation of 32 MiB, of client and store together."""
LOOKUP_P50_US = Goal("at most", 100, 40)
LOOKUP_P99 = Goal("at most", 5, 3)
"""Times a bare echo's."""
OVERHEAD = {"bookkeeping_32m": Goal("at most", 0.02, 0.01), "metric_event": Goal("at most", 1.0, 0.2)}
LIVE = {"resize": Goal("at most", 3, 1.5), "switch": Goal("at most", 3, 1.5)}
"""Tail of lookups during the change, as a multiple of quiet ones'."""
SWITCH_STEP_US = Goal("at most", 5000, 1000)
"""Processor time of the longest step of a switch: a request waits for at most one step."""


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
        if name in OVERHEAD:
            yield name, share, OVERHEAD[name]
    for name, told in document.get("live", {}).items():
        yield f"{name} lookup p99, x quiet", told["ratio"], LIVE[name]
        if name == "switch":
            yield "switch longest step, us", told["step_us"], SWITCH_STEP_US
