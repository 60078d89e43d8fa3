"""Which sizes of the tiers are simulated beside the present ones."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiertune_agent.fields import capacity_of, read
from tiertune_agent.records import Snapshot
from tiertune_agent.tuners.base import present
from tiertune_connector.tuning import LOCAL
from tiertune_connector.whatif.chain import Shape

TIMES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the present size."""
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""The remote's shares of a split budget: in what is simulated, and in the replay's ``best_split``."""
LEAST_BYTES = 2**30
"""Multiplied in place of a size of zero, so that a tier that was sized away can come back."""
EMPTY = 1
"""maxmemory of a remote that is to hold nothing, because 0 means unbounded to Redis."""


class Split(NamedTuple):
    """One budget that DRAM of all hosts and the remote share."""

    budget: int
    """Bytes."""
    hosts: int


def median_shape(fleet: Sequence[Snapshot], remote: int) -> Shape:
    """The present sizes of the median host, and of the ``remote`` tier."""
    dram, disk = (sorted(capacity_of(snapshot.tuning, tier) for snapshot in fleet) for tier in LOCAL)
    return Shape(dram[len(dram) // 2], disk[len(disk) // 2], remote)


def held(fleet: Sequence[Snapshot], tier: str) -> int:
    """Bytes that all hosts may hold in a local tier."""
    return sum(capacity_of(snapshot.tuning, tier) for snapshot in fleet)


def remote_bytes(fleet: Sequence[Snapshot], before: int | None = None) -> int:
    """Capacity of the remote tier; if unbounded, a power of two that is at least what the stores hold.

    ``before``: its last value, used while it does not answer its stores, or some stores do not answer.
    """
    there = [read(one.status, "tiers.remote") for one in fleet if present(one.status, "remote")]
    if not there:
        return 0
    parts = any(tier.get("chunks") is not None for tier in there)  # a directory: each reports its own part
    bounds = [int(tier["capacity_bytes"]) for tier in there if tier.get("capacity_bytes")]
    if not bounds:
        told = any(tier.get("health") == "ok" and tier.get("resident_bytes") is not None for tier in there)
        held_there = [int(tier.get("resident_bytes") or 0) for tier in there]
        stored = sum(held_there) if parts else max(held_there)
        local = sum(held(fleet, tier) for tier in LOCAL)
        return before if before and not told else 1 << max(stored, 4 * local, 1).bit_length()
    if parts:
        whole = sum(bounds)  # less the part of a store that does not answer, which is there
        return before if before and before / 2 < whole < before else whole
    return max(bounds) if max(bounds) > EMPTY else 0


def local_tiers(fleet: Sequence[Snapshot], now: Shape) -> tuple[str, ...]:
    """DRAM, and the disk if any store is configured with one, or the median host has one ``now``."""
    return LOCAL if now.disk or any(present(snapshot.status, "disk") for snapshot in fleet) else ("dram",)


class Grid:
    """Keeps the same shapes while they surround the present sizes, so that prospects can be compared.

    It varies one tier at a time, so there may be no shapes around sizes that it was not made for.
    """

    def __init__(self) -> None:
        self._of: object = None
        self._apart: Sequence[str] = ()
        """Tiers that are varied by themselves: not DRAM and remote if one budget is split between them."""
        self.shapes: list[Shape] = []

    def around(self, now: Shape, tiers: tuple[str, ...], split: Split | None = None) -> list[Shape]:
        """The present shape, shapes with one of the ``tiers`` at other sizes, and one without the remote.

        If DRAM and remote share one budget, splits of it replace other sizes of these two. A new grid is made if the
        old one does not hold, or tiers or split have changed.
        """
        if (tiers, split) != self._of or not self._holds(now):
            self._of = tiers, split
            self._apart = [tier for tier in tiers if split is None or tier == "disk"]
            splits = () if split is None else _splits(now, split)
            self.shapes = sorted({now, now._replace(remote=0), *_sizes(now, self._apart), *splits})
        return self.shapes

    def _holds(self, now: Shape) -> bool:
        """Whether the shapes surround the present sizes of each tier; splits alone only have to span them."""
        if self._apart:
            return now in self.shapes and all(self._surrounds(now, tier) for tier in self._apart)
        by_tier = zip(now, *self.shapes, strict=True)
        return all(min(others) <= size <= max(others) for size, *others in by_tier)

    def _surrounds(self, now: Shape, tier: str) -> bool:
        """Whether there are larger and smaller sizes of the tier alone; going without it is no size."""
        size = getattr(now, tier)
        others = [getattr(shape, tier) for shape in self.shapes if shape._replace(**{tier: size}) == now]
        return size < max(others) and (not size or any(0 < other < size for other in others))


def _sizes(now: Shape, tiers: Sequence[str]) -> Iterator[Shape]:
    for tier in tiers:
        size = getattr(now, tier) or LEAST_BYTES
        yield from (now._replace(**{tier: round(times * size)}) for times in TIMES)


def _splits(now: Shape, split: Split) -> Iterator[Shape]:
    for share in SHARES:
        dram = int((1 - share) * split.budget / split.hosts)
        yield now._replace(dram=dram, remote=split.budget - split.hosts * dram)
