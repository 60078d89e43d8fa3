"""A store's present state and contents, as gauges of the catalogue."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tiertune_connector.counters import Gauge
from tiertune_connector.tiers.breaker import STATES

if TYPE_CHECKING:
    from tiertune_connector.store.tiered import TieredStore
    from tiertune_connector.tiers.shares import Held

_ESTIMATES = {
    "fetch_estimate_t0_seconds": "t0_s",
    "fetch_estimate_bytes_per_second": "bytes_per_s",
    "fetch_estimate_age_seconds": "age_s",
    "fetch_estimate_queue_seconds": "queue_s",
    "fetch_estimate_doubt": "doubt",
}
"""Fields of a `FetchEstimate`, by gauge."""


def of_store(store: "TieredStore") -> list[Gauge]:
    """All gauges of the store, except those that others provide."""
    told = [*_costs(store), *_tiers(store), *_directory(store)]
    with store.dram.lock:
        return [*told, *_pools(store), ("tuning_version", ("applied",), store.tuning.version)]


def _costs(store: "TieredStore") -> Iterator[Gauge]:
    """What a fetch from each tier is expected to take."""
    for name, estimate in store.health.told_costs().items():
        yield from ((gauge, (name,), getattr(estimate, field)) for gauge, field in _ESTIMATES.items())


def _tiers(store: "TieredStore") -> Iterator[Gauge]:
    """Health of every tier, and of each server where one has several; queues of the slower ones."""
    for tier in ("dram", *store.lanes):
        now, _ = store.health.told(tier)
        yield from (("tier_health", (tier, state), float(state == now)) for state in STATES)
    for name, lane in store.lanes.items():
        yield "write_behind_queued", (name,), lane.writers.queued()
        for server, breaker in lane.breaker.servers.items():
            yield from (
                ("tier_server_health", (name, server, state), float(state == breaker.state)) for state in STATES
            )


def _directory(store: "TieredStore") -> Iterator[Gauge]:
    """This store's own part of a remote directory, of all namespaces together: parts of several stores add up."""
    usage = store.directory.known if store.directory else None
    if usage and usage.resident_bytes is not None:
        yield "tier_resident_bytes", ("remote", "", ""), usage.resident_bytes
        if usage.capacity_bytes is not None:
            for state in ("desired", "effective"):
                yield "tier_capacity_bytes", ("remote", state, "", ""), usage.capacity_bytes


def _pools(store: "TieredStore") -> Iterator[Gauge]:
    """Bytes held, pinned and allowed of every local pool."""
    for tier in store.pools.local.values():
        pools: Mapping[str, Held] = tier.pools.copy()
        for digest, held in pools.items():
            labels = store.accounts.pool_labels(digest)
            yield "tier_resident_bytes", (tier.name, *labels), held.resident_bytes
            yield "tier_pinned_bytes", (tier.name, *labels), held.pool.pinned * held.stride
            yield "tier_capacity_bytes", (tier.name, "desired", *labels), held.allowed * held.stride
            yield "tier_capacity_bytes", (tier.name, "effective", *labels), held.effective * held.stride
    yield "quarantined_slots", (), float(sum(len(pool.quarantined) for pool in store.dram.pools.values()))
