"""What a window is worth: seconds, bytes, money. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tiertune_agent.records import FLEET, GIB, Rates, Window
from tiertune_connector.tuning import LOCAL, SLOWER

_SECONDS = ("saved_seconds_total", "lost_seconds_total")
_MOVED, _HELD = "tier_transfer_bytes_total", "tier_resident_bytes"


@dataclass(frozen=True)
class Entry:
    """One window's share of an hour's account. ``seconds`` are those observed; None is not known."""

    hour: datetime
    seconds: float
    saved: float | None
    """This and the next in engine seconds."""
    lost: float | None
    resident: float | None
    """Bytes at the end of the window."""
    transferred: float | None
    """Bytes to and from the tier."""
    amounts: Mapping[str, float | None]
    """Money, none below 0: what the engine seconds saved are worth and those lost, and what rent and network cost."""

    @property
    def money(self) -> float | None:
        """What remains; None where a part of it is not known."""
        saved, *costs = (self.amounts[kind] for kind in ("saved", "lost", "rent", "network"))
        known = [cost for cost in costs if cost is not None]
        return None if saved is None or len(known) < len(costs) else saved - sum(known)


def entry(window: Window, rates: Rates) -> Entry | None:
    """The hour is that in which the window began, so that hours add up to the counters. None: of no tier.

    Money is what the engine seconds saved (less those lost) are worth, less the rent of the resident bytes and, for the
    remote tier, the network. What is not told of a remote is not known, and neither is its rent.

    Stores tell seconds and traffic by tier alone, and what a local tier holds by pool alone: it is booked there, and in
    the other's row it is not known. Nor is what nobody counts: what engines read of DRAM, and what they hold.
    """
    if not window.tier:
        return None
    remote, pool = window.tier == "remote", bool(window.namespace)
    elsewhere = (pool or window.store == FLEET) and not window.observed
    told = window.gauge if elsewhere else window.known
    saved, lost = map(told, _SECONDS)
    transferred = told(_MOVED) if window.tier in SLOWER else window.gauge(_MOVED)
    resident = window.known(_HELD) if pool and window.tier in LOCAL else window.gauge(_HELD)
    apart = resident is None and not pool and (rates.remote_apart if remote else not window.observed)
    rent = 0.0 if apart else rates.gib_hour.get(window.tier, 0.0) * window.seconds / 3600 / GIB
    gpu = 0.0 if elsewhere else rates.gpu_hour / 3600
    network = rates.network_gib / GIB if remote and not elsewhere else 0.0
    return Entry(
        hour=hour_of(window.start),
        seconds=window.seconds,
        saved=saved,
        lost=lost,
        resident=resident,
        transferred=transferred,
        amounts={
            "saved": _worth(saved, gpu),
            "lost": _worth(lost, gpu),
            "rent": _worth(resident, rent),
            "network": _worth(transferred, network),
        },
    )


def hour_of(at: datetime) -> datetime:
    """When it began."""
    return at.replace(minute=0, second=0, microsecond=0)


def _worth(amount: float | None, price: float) -> float | None:
    """What is free costs nothing, however much it is."""
    if amount is None:
        return None if price else 0.0
    return amount * price
