"""Which sizes of the tiers are simulated beside the present ones."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tiertune_agent.fields import read
from tiertune_agent.records import Snapshot
from tiertune_connector.whatif.chain import Shape

TIMES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the present size."""
LEAST_BYTES = 2**30
"""Stands for a size of zero, so that a tier that was sized away can come back."""


def present(fleet: Sequence[Snapshot]) -> Shape:
    """The sizes that stand: of the median host, and of the remote tier."""
    dram, disk = (sorted(_capacity(snapshot, tier) for snapshot in fleet) for tier in ("dram", "disk"))
    return Shape(dram[len(dram) // 2], disk[len(disk) // 2], remote_bytes(fleet))


def remote_bytes(fleet: Sequence[Snapshot]) -> int:
    """Capacity of the remote tier; of one without a bound, a power of two that is at least what the stores hold."""
    told = [snapshot.status.get("tiers", {}).get("remote") or {} for snapshot in fleet]
    there = [tier for tier in told if tier.get("health", "absent") != "absent"]
    if not there:
        return 0
    bounds = [int(tier["capacity_bytes"]) for tier in there if tier.get("capacity_bytes")]
    if bounds:
        return max(bounds)
    held = sum(int(tier.get("resident_bytes") or 0) for tier in there)
    local = sum(_capacity(snapshot, tier) for snapshot in fleet for tier in ("dram", "disk"))
    return 1 << max(held, 4 * local, 1).bit_length()


def local_tiers(fleet: Sequence[Snapshot]) -> tuple[str, ...]:
    """DRAM, and the disk where any store is configured with one."""
    disks = [(snapshot.status.get("tiers") or {}).get("disk") or {} for snapshot in fleet]
    configured = any(disk.get("health", "absent") != "absent" for disk in disks)
    return ("dram", "disk") if configured or present(fleet).disk else ("dram",)


def grid(now: Shape, tiers: Sequence[str]) -> list[Shape]:
    """The present shape, each of the local ``tiers`` at other sizes, and no remote tier."""
    return sorted({now, replace(now, remote=0), *_sizes(now, tiers)})


class Grid:
    """A grid that stands still while the present sizes stay within it, so that prospects can be compared."""

    def __init__(self) -> None:
        self._tiers: tuple[str, ...] = ()
        self.shapes: list[Shape] = []

    def around(self, now: Shape, tiers: tuple[str, ...]) -> list[Shape]:
        """The shapes to simulate; a new grid where the present sizes have left the old one."""
        if not self.shapes or tiers != self._tiers or not self._holds(now):
            self._tiers = tiers
            self.shapes = grid(now, tiers)
        return self.shapes

    def _holds(self, now: Shape) -> bool:
        """Whether each tier is between sizes simulated, and there are larger ones."""
        for tier in ("dram", "disk", "remote"):
            sizes = sorted({getattr(shape, tier) for shape in self.shapes})
            size = getattr(now, tier)
            if size not in sizes and not sizes[0] < size < sizes[-1]:
                return False
        return True


def _sizes(now: Shape, tiers: Sequence[str]) -> Iterator[Shape]:
    for tier in tiers:
        size = getattr(now, tier) or LEAST_BYTES
        yield from (replace(now, **{tier: round(times * size)}) for times in TIMES)


def _capacity(snapshot: Snapshot, tier: str) -> int:
    return int(read(snapshot.tuning, f"tiers.{tier}.capacity_bytes") or 0)
