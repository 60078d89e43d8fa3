"""Processors that this process may keep busy: those it is bound to, or its container's share of their time."""

import os
from collections.abc import Iterator
from pathlib import Path

from tiertune_connector.cgroups import groups, text

_QUOTA_AND_PERIOD = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
"""In version 1 of control groups; version 2 has both in ``cpu.max``."""


def usable_processors(system: Path = Path("/")) -> int:
    """Their number, at least 1; 2.5 count as 2. ``system`` has ``proc`` and ``sys``."""
    return max(1, int(min(len(os.sched_getaffinity(0)), *_shares(system), float("inf"))))


def _shares(system: Path) -> Iterator[float]:
    """Shares set in our control group and those around it."""
    for folder in groups("cpu", system):
        both = text(folder / "cpu.max").split()
        quota, period = both or [text(folder / name).strip() for name in _QUOTA_AND_PERIOD]
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
