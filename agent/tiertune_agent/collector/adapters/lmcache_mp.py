"""The metrics of an LMCache server in multi-process mode (0.5.6): L1 is DRAM, L2 a disk or something remote. Pure.

OpenTelemetry shows a counter from its first event on: an absent one is unknown, unless another one of the same event
is there. Completed requests include failed ones, so stores are counted by their chunks. Throughput histograms begin at
5 GB/s, lifecycle histograms are a sample of 1 %: neither is read. Copying a chunk to L2 counts as a read of L1: above
an L2, of the reads of L1 only those of chunks that came from L2 are known.
"""

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import MOST, STAGE, Hints, Mapped, one_tier, times
from tiertune_agent.records import sum_known

HIT_L2 = "lmcache_mp_lookup_hit_l2_tokens_total"
L2_BYTES = "lmcache_mp_l2_usage_bytes"
ON_DISK = ("fs", "fs_native", "raw_block", "dax")
"""Adapters that keep bytes on a disk of the host; others are shared, or elsewhere."""


def mapped(told: Exposition, hints: Hints) -> Mapped:
    """Map all models and tenants together."""
    made = Mapped(tiers={"dram": "L1"})
    adapters = told.split(L2_BYTES, "l2_name")
    below = one_tier("disk" if own in ON_DISK else "remote" for own in adapters)
    if by_salt := told.split("lmcache_mp_lookups_requests_total", "cache_salt"):
        plain = by_salt.get("", 0.0)
        made.put("requests_total", sum(by_salt.values()) - plain, salted="yes")
        made.put("requests_total", plain, salted="no")
    asked = told.total("lmcache_mp_lookup_requested_tokens_total")
    hit = told.total("lmcache_mp_lookup_hit_l1_tokens_total")
    made.put("prompt_tokens_total", asked, stage=STAGE)
    made.found("dram", hit, asked)
    _l1(told, made, hints, above=bool(adapters))
    if below:
        made.tiers[below] = f"L2: {', '.join(adapters)}"
        made.found(below, told.total(HIT_L2), None if asked is None or hit is None else asked - hit)
        made.put("tier_resident_bytes", told.total(L2_BYTES), tier=below)
        _l2(told, made, below, hints)
    elif adapters:
        made.found_somewhere(told.total(HIT_L2))
        made.unknown.append(f"hits and transfers of L2 by adapter: there are {', '.join(adapters)}")
    if hints.chunk_bytes is None:
        made.unknown.append("bytes moved: only chunks are counted (chunk_bytes in the settings gives their size)")
    made.unknown += [
        "capacity and latency of L2: the server does not tell them",
        "seconds saved and lost: the server does not measure what recomputing would have cost",
    ]
    made.models = told.values("model_name")
    return made


def _l1(told: Exposition, made: Mapped, hints: Hints, *, above: bool) -> None:
    held = told.total("lmcache_mp_l1_memory_usage_bytes")
    ratios = list(told.split("lmcache_mp_l1_usage_ratio", "l1_tag").values())
    made.put("tier_resident_bytes", held, tier="dram")
    if held and len(ratios) == 1 and ratios[0] > 0:  # a mean of several would need their sizes
        capacity = held / ratios[0]
        whole = round(capacity) if 0 < capacity < MOST else None
        made.put("tier_capacity_bytes", whole, tier="dram", state="effective")
    read = _from_l2(told) if above else told.total("lmcache_mp_l1_read_chunks_total")
    written = told.total("lmcache_mp_l1_write_chunks_total")
    refused = told.total("lmcache_mp_l1_allocation_failure_chunks_total")
    stored = 0.0 if written is None and refused else written
    made.chunks("dram", tried=sum_known((written, refused)), written=stored, read=read)
    made.moved("dram", None if above else times(read, hints), times(written, hints))
    evicted = told.total("lmcache_mp_l1_evicted_chunks_total")
    made.put("tier_evictions_total", evicted, tier="dram", algorithm="", reason="unknown")
    made.failed("dram", "write", "no_room", refused)
    made.failed("dram", "read", "failed", told.total("lmcache_mp_l1_read_failure_chunks_total"))


def _l2(told: Exposition, made: Mapped, tier: str, hints: Hints) -> None:
    tried = told.total("lmcache_mp_l2_store_submitted_objects_chunks_total")
    stored = told.total("lmcache_mp_l2_store_completed_objects_chunks_total")
    loaded = _from_l2(told)
    if tried is not None:  # the same part of the server counts both
        stored = stored or 0.0
    made.chunks(tier, tried=tried, written=stored, read=loaded)
    made.moved(tier, times(loaded, hints), times(stored, hints))
    evicted = told.total("lmcache_mp_l2_evicted_objects_chunks_total")
    made.put("tier_evictions_total", evicted, tier=tier, algorithm="", reason="unknown")
    made.failures(tier, "read", told.split("lmcache_mp_l2_prefetch_failure_chunks_total", "reason"))


def _from_l2(told: Exposition) -> float | None:
    """Chunks that were loaded from L2, all of them through L1."""
    loaded = told.total("lmcache_mp_l2_prefetch_load_completed_chunks_total")
    return loaded if told.total("lmcache_mp_l2_prefetch_lookup_objects_chunks_total") is None else loaded or 0.0
