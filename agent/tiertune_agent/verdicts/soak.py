"""How long a change is watched: at least until its tier could have filled once. Pure."""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from tiertune_agent.records import Windows, covered_s, grouped, total

LONGEST_S = 6 * 3600.0
"""A tier that fills more slowly is judged before it is full: its ghosts were warm all along."""


def fill_seconds(windows: Windows, capacity: float, chunk_bytes: Mapping[str, float]) -> float | None:
    """Seconds that storing ``capacity`` bytes takes at the rate of these windows of one tier; None: nothing was stored.

    ``chunk_bytes`` by namespace. Slower tiers count what is written; for DRAM it follows from what came and went.
    """
    written = total(windows, "tier_transfer_bytes_total", operation="write")
    went = (window.total("tier_evictions_total") * chunk_bytes.get(window.namespace, 0.0) for window in windows)
    stored = written or _came(windows) + sum(went)
    return capacity * covered_s(windows) / stored if stored > 0 else None


def slowest(fills: Sequence[float | None], tier: str) -> float | None:
    """Fill time of several stores from that of each: they fill the one remote together, other tiers each its own."""
    known = [seconds for seconds in fills if seconds]
    if not known:
        return None
    return 1 / sum(1 / seconds for seconds in known) if tier == "remote" else max(known)


def soak_seconds(policy_s: float, fill_s: float | None) -> float:
    """The policy's soak, or one fill time of at most LONGEST_S if that is longer."""
    return max(policy_s, min(fill_s or 0.0, LONGEST_S))


def _came(windows: Windows) -> float:
    """Bytes by which the pools grew: from the first window to the last, and as fast in half of either."""
    came = 0.0
    for first, *between, last in (mine for mine in grouped(windows, attrgetter("namespace")).values() if len(mine) > 1):
        grew = (last.gauge("tier_resident_bytes") or 0.0) - (first.gauge("tier_resident_bytes") or 0.0)
        halves_s = (first.seconds + last.seconds) / 2
        came += max(0.0, grew) * (1 + halves_s / (halves_s + sum(window.seconds for window in between)))
    return came
