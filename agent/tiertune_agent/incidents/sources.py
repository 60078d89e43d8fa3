"""What is wrong with an observed source, as far as it reports: pure detectors over its state and its windows."""

from collections.abc import Iterator

from tiertune_agent.collector.adapters.mapped import CHUNKS
from tiertune_agent.fields import read
from tiertune_agent.incidents.detectors import FEW, never_read, without_capacity
from tiertune_agent.records import Snapshot, Window, Windows, covered_s
from tiertune_connector.tuning import TIERS
from tiertune_connector.units import format_duration

BELOW = ("staging", *TIERS)
"""Tiers that somebody pays for."""
TRIED_IN = 2
"""Least number of windows in which nothing was stored: what is under way is not lost yet."""


def incidents(snapshot: Snapshot, hour: Windows, lately: Windows) -> dict[str, str]:
    """A message with figures for each kind; empty: nothing is wrong.

    ``hour``: windows of the last hour, summed up; ``lately``: the last ones, one by one; oldest first.
    """
    told: dict[str, list[str]] = {"tier_dead": [], "tier_unused": []}
    for tier in BELOW:
        if tier in (snapshot.status.get("tiers") or {}):
            told["tier_dead"] += stores_nothing(snapshot, tier, [one for one in lately if one.tier == tier])
            told["tier_unused"] += without_capacity(tier, read(snapshot.status, f"tiers.{tier}.capacity_bytes"))
            told["tier_unused"] += never_read(tier, [one for one in hour if one.tier == tier])
    return {kind: "; ".join(found) for kind, found in told.items()}


def stores_nothing(snapshot: Snapshot, tier: str, windows: Windows) -> Iterator[str]:
    """A message if chunks are sent to the tier and none arrives; looks back until it has seen enough of them."""
    tried, looked = 0.0, list[Window]()
    for window in reversed(windows):
        sent, arrived = window.known(CHUNKS, operation="try"), window.known(CHUNKS, operation="write")
        if sent is None:  # only failures are reported
            sent = window.total("tier_errors_total", operation="write")
        if arrived is None:
            arrived = window.known("tier_transfer_bytes_total", operation="write")
        if not sent:
            continue
        if arrived is None or arrived > 0:
            return
        looked.append(window)
        tried += sent
        if tried >= FEW and len(looked) >= TRIED_IN:
            own = read(snapshot.status, f"tiers.{tier}.reason")
            yield (
                f"{tier} ({own}) is dead: the last {tried:.0f} chunks or jobs that were sent there in "
                f"{format_duration(covered_s(looked))} failed or were never reported as stored"
            )
            return
