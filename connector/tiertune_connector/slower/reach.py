"""All that a host's store reaches, for those of its parts that deal with more than one tier."""

from dataclasses import dataclass

from tiertune_connector.slower.lane import Lanes
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tuning import InForce
from tiertune_connector.units import Clock


@dataclass(eq=False)
class Reach:
    """The tiers, what is in force for them, and the time."""

    dram: DramTier
    """Its lock is the store's."""
    disk: DiskTier | None
    """The medium of the disk's lane."""
    lanes: Lanes
    clock: Clock
    """Monotonic seconds."""
    tuning: InForce
