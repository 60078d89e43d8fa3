"""A store's present state and contents, as gauges of the catalogue."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tiertune_connector.cost import FetchEstimate
from tiertune_connector.counters import Gauge
from tiertune_connector.slower.lane import Lanes
from tiertune_connector.store.accounts import Accounts
from tiertune_connector.store.health import Health
from tiertune_connector.tiers.breaker import STATES, Breakers
from tiertune_connector.tiers.directory import DirectoryTier
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier

if TYPE_CHECKING:
    from tiertune_connector.tiers.shares import Held


def of_costs(costs: Mapping[str, FetchEstimate]) -> Iterator[Gauge]:
    """What a fetch from each tier is expected to take."""
    for name, estimate in costs.items():
        yield "fetch_estimate_t0_seconds", (name,), estimate.t0_s
        yield "fetch_estimate_bytes_per_second", (name,), estimate.bytes_per_s
        yield "fetch_estimate_age_seconds", (name,), estimate.age_s
        yield "fetch_estimate_queue_seconds", (name,), estimate.queue_s
        yield "fetch_estimate_doubt", (name,), estimate.doubt


def of_tiers(lanes: Lanes, health: Health) -> Iterator[Gauge]:
    """Health of every tier, and of each server where one has several; queues of the slower ones."""
    for tier in ("dram", *lanes):
        now, _ = health.told(tier)
        yield from (("tier_health", (tier, state), float(state == now)) for state in STATES)
    for name, lane in lanes.items():
        yield "write_behind_queued", (name,), lane.writers.queued()
        for server, breaker in lane.breaker.servers.items() if isinstance(lane.breaker, Breakers) else ():
            yield from (
                ("tier_server_health", (name, server, state), float(state == breaker.state)) for state in STATES
            )


def of_directory(directory: DirectoryTier | None) -> Iterator[Gauge]:
    """This store's own part of a remote directory, of all namespaces together: parts of several stores add up."""
    usage = directory.known if directory else None
    if usage and usage.resident_bytes is not None:
        yield "tier_resident_bytes", ("remote", "", ""), usage.resident_bytes
        if usage.capacity_bytes is not None:
            for state in ("desired", "effective"):
                yield "tier_capacity_bytes", ("remote", state, "", ""), usage.capacity_bytes


def of_pools(accounts: Accounts, dram: DramTier, disk: DiskTier | None) -> Iterator[Gauge]:
    """Bytes held, pinned and allowed of every local pool."""
    for tier in (dram, disk) if disk else (dram,):
        pools: Mapping[str, Held] = tier.pools.copy()
        for digest, held in pools.items():
            labels = accounts.pool_labels(digest)
            yield "tier_resident_bytes", (tier.name, *labels), held.resident_bytes
            yield "tier_pinned_bytes", (tier.name, *labels), held.pool.pinned * held.stride
            yield "tier_capacity_bytes", (tier.name, "desired", *labels), held.allowed * held.stride
            yield "tier_capacity_bytes", (tier.name, "effective", *labels), held.effective * held.stride
    yield "quarantined_slots", (), float(sum(len(pool.quarantined) for pool in dram.pools.values()))
