"""The state of tiers over several stores, from the stores' own words. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiertune_agent.fields import Json, read
from tiertune_agent.records import grouped, sum_of_all
from tiertune_agent.tuners.base import present

LEVELS = {"ok": "ok", "slow": "warn", "recovering": "warn", "dead": "bad"}


@dataclass(frozen=True)
class Health:
    """A state that one or more stores share; ``stores`` is empty where all do."""

    state: str
    reason: str
    level: str
    stores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fill:
    """Bytes held of those allowed (None: no bound, or not told)."""

    resident: float
    capacity: float | None


def health(store: Json, tier: str) -> Health:
    if not store["reachable"]:
        return Health("unknown", "the store does not answer", "warn")
    state = str(read(store, f"tiers.{tier}.health"))
    return Health(state, str(read(store, f"tiers.{tier}.reason") or ""), LEVELS.get(state, "info"))


def healths(stores: Sequence[Json], tier: str) -> tuple[Health, ...]:
    """Each state with its stores, the worst first."""
    owners = [store for store in stores if present(store, tier)]
    sharing = grouped(owners, lambda store: health(store, tier))
    order = ("bad", "warn", "info", "ok")
    return tuple(
        replace(one, stores=tuple(store["name"] for store in those) if len(those) < len(owners) else ())
        for one, those in sorted(sharing.items(), key=lambda item: order.index(item[0].level))
    )


def fill(store: Json, tier: str) -> Fill | None:
    resident = read(store, f"tiers.{tier}.resident_bytes")
    return None if resident is None else Fill(resident, read(store, f"tiers.{tier}.capacity_bytes"))


def fill_of_all(stores: Sequence[Json], tier: str) -> Fill | None:
    """Fill of the stores that answer, or of all if none does."""
    told = [store for store in stores if store["reachable"]] or stores
    fills = [held for store in told if (held := fill(store, tier))]
    if not fills:
        return None
    if tier == "remote" and all(read(store, "tiers.remote.chunks") is None for store in told):
        return max(fills, key=lambda one: one.resident)  # one server for all, which each store tells as its own
    return Fill(sum(one.resident for one in fills), sum_of_all(one.capacity for one in fills))
