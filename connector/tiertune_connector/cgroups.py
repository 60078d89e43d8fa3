"""Control groups of this process: its own and the groups around it, all of whose limits hold for it."""

import os
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")
"""Has ``proc`` and ``sys``."""
_QUOTA_AND_PERIOD = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
"""In version 1 of control groups; version 2 has both in ``cpu.max``."""


def groups(controller: str) -> Iterator[Path]:
    """Folders of this process's groups, own first, in version 2 and in version 1's hierarchy of a ``controller``.

    Some may not exist: in a container the own group may have the name that the host gives it, yet lie where the
    outermost one should. If the own group is unknown, only the outermost ones.
    """
    tops = SYSTEM / "sys/fs/cgroup", SYSTEM / "sys/fs/cgroup" / controller
    told = text(SYSTEM / "proc/self/cgroup").splitlines()
    if not told:
        yield from tops
    for line in told:
        number, controllers, own = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            top = tops[number != "0"]
            group = top / own.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def number(path: Path) -> int | None:
    """The number in a file; None if there is none, as for a group without a limit."""
    told = text(path).strip()
    return int(told) if told.isdecimal() else None


def text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_processors() -> int:
    """Processors that this process may keep busy: those it is bound to, or its container's share of their time.

    At least 1; 2.5 count as 2.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), *_shares(), float("inf"))))


def _shares() -> Iterator[float]:
    """Shares set in our control group and those around it."""
    for folder in groups("cpu"):
        both = text(folder / "cpu.max").split()
        quota, period = both or [text(folder / name).strip() for name in _QUOTA_AND_PERIOD]
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
