"""What a window is worth, in seconds, bytes and money. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tiertune_agent.records import FLEET, GIB, Rates, Window, sum_of_all
from tiertune_connector.tuning import LOCAL, SLOWER

_SECONDS = ("saved_seconds_total", "lost_seconds_total")
_MOVED, _SPARED, _HELD = "tier_transfer_bytes_total", "tier_spared_bytes_total", "tier_resident_bytes"


@dataclass(frozen=True)
class Entry:
    """What one window adds to an hour's account. ``seconds``: observed ones; None anywhere: not known."""

    hour: datetime
    seconds: float
    saved: float | None
    """Engine seconds, as is ``lost``."""
    lost: float | None
    bytes: float | None
    """Resident bytes at the end of the window."""
    transferred: int | None
    """Bytes to and from the tier, but for what a codec kept off the network."""
    amounts: Mapping[str, float | None]
    """Money, none below 0: the worth of engine seconds saved and lost, and the cost of rent and network."""

    @property
    def money(self) -> float | None:
        """What is saved after all costs; None if a part of it is unknown."""
        saved, costs = self.amounts["saved"], sum_of_all(self.amounts[kind] for kind in ("lost", "rent", "network"))
        return None if saved is None or costs is None else saved - costs


def entry(window: Window, rates: Rates) -> Entry | None:
    """A window's entry, in the hour in which it began, so that hours add up to the counters. None: it has no tier.

    Money is the worth of engine seconds saved minus those lost, minus the rent of resident bytes and, for the remote
    tier, the network. What a remote does not report is unknown, and so is its rent.

    Stores report seconds and traffic per tier only, and what a local tier holds per pool only: each is booked there,
    and unknown in the other's row. What nobody counts is unknown too: what engines read from DRAM, and what they hold.
    """
    if not window.tier:
        return None
    remote, pool = window.tier == "remote", bool(window.namespace)
    elsewhere = (pool or window.store == FLEET) and not window.observed
    told = window.gauge if elsewhere else window.known
    saved, lost = map(told, _SECONDS)
    transferred = told(_MOVED) if window.tier in SLOWER else window.gauge(_MOVED)
    if transferred is not None:
        transferred = max(0.0, transferred - window.total(_SPARED))
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
        bytes=resident,
        transferred=None if transferred is None else round(transferred),
        amounts={
            "saved": _worth(saved, gpu),
            "lost": _worth(lost, gpu),
            "rent": _worth(resident, rent),
            "network": _worth(transferred, network),
        },
    )


def hour_of(at: datetime) -> datetime:
    """Start of the hour."""
    return at.replace(minute=0, second=0, microsecond=0)


def _worth(amount: float | None, price: float) -> float | None:
    """Money for an amount; None: unknown. What is free costs nothing."""
    if amount is None:
        return None if price else 0.0
    return amount * price
