"""What one metric event costs: its time over a microsecond."""

from statistics import median
from time import perf_counter
from typing import Any

from tiertune_connector.counters import Counters

EVENTS = 200
"""Events in one go: so few that most goes are not interrupted."""
GOES = 20
"""Goes in each round."""
EVENT_S = 1e-6


def measure(rounds: int) -> dict[str, Any]:
    """``metric_event`` of the dearer kind, a count or a histogram's observation; 1 is a microsecond."""
    counters = Counters()

    def count() -> None:
        counters.add("tier_transfer_bytes_total", ("dram", "read"), 4096)

    def observe() -> None:
        counters.observe("tier_operation_seconds", ("dram", "read", "ok"), 0.003)

    seconds: dict[Any, list[float]] = {count: [], observe: []}
    for _ in range(GOES * rounds):
        for event, taken in seconds.items():
            start = perf_counter()
            for _ in range(EVENTS):
                event()
            taken.append((perf_counter() - start) / EVENTS)
    return {"overhead": {"metric_event": max(map(median, seconds.values())) / EVENT_S}}
