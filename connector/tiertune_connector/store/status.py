"""What a store tells of its present state: for ``/v1/status``, and as gauges."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from tiertune_connector.counters import Gauge
from tiertune_connector.documents import Json
from tiertune_connector.tiers.breaker import STATES
from tiertune_connector.tuning import TIERS, LocalTier, Tuning

if TYPE_CHECKING:
    from tiertune_connector.store.tiered import TieredStore
    from tiertune_connector.tiers.shares import Held

_ESTIMATES = {
    "fetch_estimate_t0_seconds": "t0_s",
    "fetch_estimate_age_seconds": "age_s",
    "fetch_estimate_queue_seconds": "queue_s",
    "fetch_estimate_doubt": "doubt",
}
"""Fields of a `FetchEstimate`, by gauge; bandwidth is told for chunks of the recent mean size."""


def status(store: "TieredStore") -> Json:
    """What ``/v1/status`` tells: tiers with health and reason, pools with desired, applied and effective, quotas."""
    tiers: dict[str, Json] = {}
    for name in TIERS:
        state, reason = store.health.told(name)
        lane = store.lanes.get(name)
        tier = store.dram if name == "dram" else lane
        usage = tier.usage() if tier and state not in ("dead", "recovering") else None
        tiers[name] = {"health": state, "reason": reason} | (asdict(usage) if usage else {})
        if lane:
            servers = [
                {"server": server, "health": breaker.state, "reason": breaker.reason}
                for server, breaker in lane.breaker.servers.items()
            ]
            tiers[name] |= ({"servers": servers} if servers else {}) | (
                {"codec": lane.codec.writes} if lane.codec else {}
            )
    with store.dram.lock:
        tenants = store.quotas.document()
    return {
        "store": store.name,
        "bypass": store.tuning.bypass,
        "tuning_version": store.tuning.version,
        "tiers": tiers,
        "pools": _pools(store),
        "tenants": tenants,
    }


def _pools(store: "TieredStore") -> dict[str, Json]:
    """What DRAM and the disk hold, by namespace; the disk alone if no engine came since the store started."""
    told: dict[str, Json] = {}
    for tier, medium in store.pools.local.items():
        for digest, held in list(medium.pools.items()):
            served = store.namespaces.served(digest)
            told.setdefault(digest, {}).update(
                {
                    "model": store.namespaces.model(digest),
                    "epoch": served.epoch if served else None,
                    "chunk_bytes": held.chunk_bytes,
                    **store.observer.terms(digest),
                    tier: _sizes(store.tuning, digest, tier, held),
                }
            )
    return told


def _sizes(tuning: Tuning, digest: str, tier: LocalTier, held: "Held") -> Json:
    """Desired, applied and effective of one pool."""
    pool, stride = held.pool, held.stride
    return {
        "desired": {
            "capacity_bytes": tuning.pool(digest, tier).capacity_bytes,
            "eviction": tuning.algorithm(digest, tier),
        },
        "applied": {"capacity_bytes": held.allowed * stride, "eviction": pool.algorithm},
        "effective": {"capacity_bytes": held.effective * stride, "eviction": pool.algorithm},
        "resident_bytes": held.resident_bytes,
        "chunks": len(pool),
    }


def gauges(store: "TieredStore") -> list[Gauge]:
    """The store's gauges of the catalogue, except those that others provide."""
    told = [*_costs(store), *_tiers(store), *_directory(store)]
    with store.dram.lock:
        return [*told, *_sizes_of_pools(store), ("tuning_version", ("applied",), store.tuning.version)]


def _costs(store: "TieredStore") -> Iterator[Gauge]:
    """What a fetch from each tier is expected to take."""
    for name, estimate in store.health.costs({}, 0).items():
        chunk_bytes = store.lanes[name].transit.chunk_bytes if name in store.lanes else 0.0
        yield "fetch_estimate_bytes_per_second", (name,), estimate.speed(chunk_bytes)
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


def _sizes_of_pools(store: "TieredStore") -> Iterator[Gauge]:
    """Bytes held, pinned and allowed of every local pool."""
    for tier in store.pools.local.values():
        for digest, held in tier.pools.copy().items():
            labels = store.accounts.pool_labels(digest)
            yield "tier_resident_bytes", (tier.name, *labels), held.resident_bytes
            yield "tier_pinned_bytes", (tier.name, *labels), held.pool.pinned * held.stride
            yield "tier_capacity_bytes", (tier.name, "desired", *labels), held.allowed * held.stride
            yield "tier_capacity_bytes", (tier.name, "effective", *labels), held.effective * held.stride
    yield "quarantined_slots", (), sum(len(pool.quarantined) for pool in store.dram.pools.values())
