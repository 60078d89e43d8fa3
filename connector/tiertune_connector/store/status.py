"""What ``/v1/status`` tells of a store: its tiers, pools and quotas."""

from collections.abc import Mapping
from dataclasses import asdict

from tiertune_connector.documents import Json
from tiertune_connector.store.tiered import TieredStore
from tiertune_connector.tiers.shares import Held
from tiertune_connector.tuning import TIERS, LocalTier, Tuning


def status(store: TieredStore) -> Json:
    """What ``/v1/status`` tells: tiers with health and reason, pools with desired, applied and effective, quotas."""
    tiers: dict[str, Json] = {}
    for name in TIERS:
        state, reason = store.health.told(name)
        tier = store.dram if name == "dram" else store.lanes.get(name)
        usage = tier.usage() if tier and state not in ("dead", "recovering") else None
        tiers[name] = {"health": state, "reason": reason} | (asdict(usage) if usage else {})
        if lane := store.lanes.get(name):
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


def _pools(store: TieredStore) -> dict[str, Json]:
    """What DRAM and the disk hold, by namespace; the disk alone if no engine came since the store started."""
    held: dict[str, dict[LocalTier, Held]] = {}
    for tier, medium in store.pools.local.items():
        for digest, pool in list(medium.pools.items()):
            held.setdefault(digest, {})[tier] = pool
    return {digest: _pool(store, digest, pools) for digest, pools in held.items()}


def _pool(store: TieredStore, digest: str, pools: Mapping[LocalTier, Held]) -> Json:
    served = store.namespaces.served(digest)
    told = {
        "model": store.namespaces.model(digest),
        "epoch": served.epoch if served else None,
        "chunk_bytes": next(iter(pools.values())).chunk_bytes,
        **store.observer.terms(digest),
    }
    return told | {tier: _sizes(store.tuning, digest, tier, held) for tier, held in pools.items()}


def _sizes(tuning: Tuning, digest: str, tier: LocalTier, held: Held) -> Json:
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
