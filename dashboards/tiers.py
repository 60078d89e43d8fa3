"""The dashboard "Tiers": what each tier holds, finds, evicts and moves, how quick it is, and what goes wrong in it."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.board import Rows, board
from dashboards.fleet import HIT, health
from dashboards.panels import AnyPanel, lines, stacked, steps
from dashboards.queries import POOL, Query, counted, portion, quantile, rate, ratio, select, total

NAME = "tiers"
EFFECTIVE = 'state="effective"'
TELLING = 'tier=~"dram|disk"'
"""Tiers that report whether evicted chunks were used."""


def dashboard() -> Dashboard:
    rows: Rows = [
        ("What tiers hold", _holding()),
        ("What tiers find", _finding()),
        ("What leaves", _leaving()),
        ("How quick they are", _moving()),
        ("What goes wrong", _failing()),
    ]
    return board(NAME, "tiers", "DRAM, disk and remote: are they of the right size, quick, and well?", rows)


def _holding() -> list[AnyPanel]:
    by = "store, tier"
    resident = total(select("tier_resident_bytes", POOL), by)
    capacity = total(select("tier_capacity_bytes", POOL, EFFECTIVE), by)
    return [
        lines(
            "Resident against capacity",
            "bytes",
            "Bytes held of the chosen namespaces, and bytes allowed.",
            Query(resident, "{{store}} {{tier}}: resident"),
            Query(capacity, "{{store}} {{tier}}: capacity"),
        ),
        lines(
            "Share of the capacity in use",
            "percentunit",
            "A tier that stays well below 1 is larger than its traffic needs.",
            Query(ratio(resident, capacity), "{{store}} {{tier}}"),
            span=6,
        ),
        lines(
            "Pinned",
            "bytes",
            "Bytes that a transfer uses: they cannot be evicted.",
            Query(total(select("tier_pinned_bytes", POOL), by), "{{store}} {{tier}}"),
            span=6,
        ),
    ]


def _finding() -> list[AnyPanel]:
    asked = rate("tier_lookup_tokens_total", POOL, by="tier")
    return [
        lines(
            "Hit ratio of each tier",
            "percentunit",
            "Of the tokens that a tier was asked for. A tier below one that hit is not asked.",
            Query(ratio(rate("tier_lookup_tokens_total", HIT, POOL, by="tier"), asked), "{{tier}}"),
        ),
        stacked(
            "Tokens found, by who computed them",
            "short",
            "Per second. self: the engine that asks; same_host, other_host: another one there.",
            Query(rate("tier_lookup_tokens_total", HIT, POOL, by="tier, origin"), "{{tier}}: {{origin}}"),
        ),
    ]


def _leaving() -> list[AnyPanel]:
    unused = rate("tier_evicted_unused_total", POOL, TELLING, by="tier")
    evicted = rate("tier_evictions_total", POOL, TELLING, 'algorithm!=""', by="tier")  # "": of an observed source
    return [
        lines(
            "Evictions",
            "short",
            "Chunks per second that left to make room, or because a tier was made smaller.",
            Query(
                rate("tier_evictions_total", POOL, by="tier, algorithm, reason"), "{{tier}}: {{reason}} ({{algorithm}})"
            ),
            span=8,
        ),
        lines(
            "Idle before eviction",
            "s",
            "Median seconds from a chunk's last use to its eviction. Seconds rather than minutes: the tier thrashes.",
            Query(quantile(0.5, "tier_evicted_idle_seconds", POOL, by="store, tier"), "{{store}} {{tier}}"),
            span=8,
        ),
        lines(
            "Evicted without any use",
            "percentunit",
            "Of the chunks that left DRAM or disk, how many nothing had read there: admission lets too much in.",
            Query(portion(unused, evicted), "{{tier}}"),
            span=8,
        ),
    ]


def _moving() -> list[AnyPanel]:
    by = "tier, operation"
    return [
        lines(
            "Operations, 99th percentile",
            "s",
            "Of single operations, whatever their outcome.",
            Query(quantile(0.99, "tier_operation_seconds", by=by), "{{tier}}: {{operation}}"),
            span=8,
        ),
        lines(
            "Bytes moved",
            "Bps",
            "Payload that was read and written.",
            Query(rate("tier_transfer_bytes_total", by=by), "{{tier}}: {{operation}}"),
            span=8,
        ),
        lines(
            "Estimated bandwidth",
            "Bps",
            "What a fetch from a tier gets, as learned from fetches and probes.",
            Query(f"avg by (store, tier) ({select('fetch_estimate_bytes_per_second')})", "{{store}} {{tier}}"),
            span=8,
        ),
    ]


def _failing() -> list[AnyPanel]:
    queued = select("write_behind_queued")
    return [
        health("Health of tiers", 12),
        lines(
            "Failed operations",
            "short",
            "Per second, by operation and reason.",
            Query(rate("tier_errors_total", by="tier, operation, reason"), "{{tier}}: {{operation}} ({{reason}})"),
        ),
        lines(
            "Not written behind",
            "short",
            "Chunks per second that a lower tier never got, by reason.",
            Query(counted(rate("write_behind_dropped_total", by="tier"), total(queued, "tier")), "{{tier}}: all"),
            Query(rate("write_behind_dropped_total", by="tier, reason"), "{{tier}}: {{reason}}"),
        ),
        steps(
            "Waiting to be written behind",
            "none",
            "Chunks in the queue. Full, it drops.",
            Query(total(queued, "store, tier"), "{{store}} {{tier}}"),
        ),
    ]
