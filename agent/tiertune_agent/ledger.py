"""What a window is worth: seconds, bytes, money. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tiertune_agent.records import Rates, Window

GIB = 2**30


@dataclass(frozen=True)
class Entry:
    """One window's share of an hour's account. ``seconds`` are those observed."""

    hour: datetime
    seconds: float
    saved: float
    lost: float
    resident: float
    """Bytes at the end of the window."""
    transferred: float
    amounts: Mapping[str, float]
    """Money, none below 0: what the engine seconds saved are worth and those lost, and what rent and network cost."""

    @property
    def money(self) -> float:
        """What remains."""
        return self.amounts["saved"] - sum(self.amounts[kind] for kind in ("lost", "rent", "network"))


def entry(window: Window, rates: Rates) -> Entry | None:
    """The hour is that in which the window began, so that hours add up to the counters. None: of no tier.

    Money is what the engine seconds saved (less those lost) are worth, less the rent of the resident bytes and, for the
    remote tier, the network.
    """
    if not window.tier:
        return None
    saved, lost = window.total("saved_seconds_total"), window.total("lost_seconds_total")
    resident = window.gauge("tier_resident_bytes") or 0.0
    transferred = window.total("tier_transfer_bytes_total")
    rent = rates.gib_hour.get(window.tier, 0.0) * resident / GIB * window.seconds / 3600
    network = rates.network_gib * transferred / GIB if window.tier == "remote" else 0.0
    return Entry(
        hour=window.start.replace(minute=0, second=0, microsecond=0),
        seconds=window.seconds,
        saved=saved,
        lost=lost,
        resident=resident,
        transferred=transferred,
        amounts={
            "saved": saved / 3600 * rates.gpu_hour,
            "lost": lost / 3600 * rates.gpu_hour,
            "rent": rent,
            "network": network,
        },
    )
