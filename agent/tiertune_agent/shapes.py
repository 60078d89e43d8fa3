"""Which sizes of the tiers are simulated beside the present ones."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tiertune_agent.fields import read
from tiertune_agent.policy import Policy
from tiertune_agent.records import Snapshot
from tiertune_connector.whatif.chain import Shape

TIMES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the present size."""
REMOTE_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Of one budget for DRAM and the remote tier."""


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


def split_bytes(policy: Policy, fleet: Sequence[Snapshot]) -> int | None:
    """What DRAM and the remote tier may take together; None: they have no budget in common that may be split."""
    if not policy.remote.manage or policy.budgets.total is None:
        return None
    return max(0, policy.budgets.total - sum(_capacity(snapshot, "disk") for snapshot in fleet))


def grid(now: Shape, hosts: int, budget_bytes: int | None = None) -> list[Shape]:
    """The present shape, each local tier at other sizes, no remote tier; and splits of ``budget_bytes``, if any."""
    shapes = {now, replace(now, remote=0), *_sizes(now)}
    if budget_bytes is not None:
        shapes.update(_splits(now, hosts, budget_bytes))
    return sorted(shapes)


class Grid:
    """A grid that stands still while the present sizes stay within it, so that prospects can be compared."""

    def __init__(self) -> None:
        self._terms: tuple[int, int] | None = None
        self.shapes: list[Shape] = []

    def around(self, now: Shape, hosts: int, budget_bytes: int | None = None) -> list[Shape]:
        """The shapes to simulate; a new grid where the present sizes have left the old one."""
        terms = (hosts, budget_bytes) if budget_bytes is not None else None
        if not self.shapes or terms != self._terms or not self._holds(now):
            self._terms = terms
            self.shapes = grid(now, hosts, budget_bytes)
        return self.shapes

    def _holds(self, now: Shape) -> bool:
        """Whether each tier is between sizes simulated, and there are larger ones."""
        for tier in ("dram", "disk", "remote"):
            sizes = sorted({getattr(shape, tier) for shape in self.shapes})
            size = getattr(now, tier)
            if size not in sizes and not sizes[0] < size < sizes[-1]:
                return False
        return True


def _sizes(now: Shape) -> Iterator[Shape]:
    for tier in ("dram", "disk"):
        size = getattr(now, tier)
        yield from (replace(now, **{tier: round(times * size)}) for times in TIMES if size)


def _splits(now: Shape, hosts: int, budget_bytes: int) -> Iterator[Shape]:
    for share in REMOTE_SHARES:
        remote = int(share * budget_bytes)
        yield replace(now, dram=(budget_bytes - remote) // max(1, hosts), remote=remote)


def _capacity(snapshot: Snapshot, tier: str) -> int:
    return int(read(snapshot.tuning, f"tiers.{tier}.capacity_bytes") or 0)
