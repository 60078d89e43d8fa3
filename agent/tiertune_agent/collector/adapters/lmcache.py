"""The metrics of LMCache within the engine's workers (0.5.6). Pure.

It reports what it found as a whole, not by tier; if it has only one, the settings can name it. Disk and remote count
as present once they were used, as their gauges also say 0 if there is none; ``remote_cache_usage`` is never filled, and
not read.

Each worker of an engine looks up, and loads its part of, the same prompts: of requests, tokens and waits that of one
worker is the engine's. Bytes and chunks are each worker's own.
"""

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import STAGE, Hints, Mapped

FOUND = "lmcache:num_lookup_hits_total"
IN_ENGINE = "lmcache:num_vllm_hit_tokens_total"
ON_DISK = "lmcache:local_storage_usage"


def mapped(told: Exposition, hints: Hints) -> Mapped:
    """Map all workers behind the address together."""
    made = Mapped(tiers={"dram": "LocalCPU"})
    made.put("requests_total", _of_one(told, "lmcache:num_lookup_requests_total"), salted="unknown")
    prompts = _of_one(told, "lmcache:num_prompt_tokens_total")
    made.put("prompt_tokens_total", prompts, stage=STAGE)
    if in_engine := _of_one(told, IN_ENGINE):
        made.tiers["gpu"] = "the engine's prefix cache"
        made.found("gpu", in_engine, prompts, origin="self")
    made.put("tier_resident_bytes", told.total("lmcache:local_cache_usage"), tier="dram")
    evicted = told.total("lmcache:local_cpu_evict_keys_count_total")
    made.put("tier_evictions_total", evicted, tier="dram", algorithm="", reason="room")
    made.failed("dram", "write", "no_room", told.total("lmcache:local_cpu_evict_failed_count_total"))
    if on_disk := told.total(ON_DISK):
        made.tiers["disk"] = "LocalDisk"
        made.put("tier_resident_bytes", on_disk, tier="disk")
    if told.total("lmcache:num_remote_read_requests_total") or told.total("lmcache:num_remote_write_requests_total"):
        made.tiers["remote"] = "its remote backend"
        read = told.total("lmcache:num_remote_read_bytes_total")
        made.moved("remote", read, told.total("lmcache:num_remote_write_bytes_total"))
        made.failed("remote", "read", "failed", told.total("lmcache:get_blocking_failed_count"))
        made.failed("remote", "write", "failed", told.total("lmcache:put_failed_count"))
    found = _of_one(told, FOUND)
    if hints.tier:
        made.tiers.setdefault(hints.tier, "named in the settings")
        made.found(hints.tier, found, _of_one(told, "lmcache:num_lookup_tokens_total"))
    else:
        made.found_somewhere(found)
        made.unknown.append("hits by tier: they are told as a whole (tier in the settings names the only one)")
    made.waited(_of_one(told, "lmcache:time_to_retrieve_sum"), found)
    made.unknown += [
        "capacity, and what disk and remote evicted: it does not tell them",
        "seconds saved and lost: it does not measure what recomputing would have cost",
    ]
    made.models = told.values("model_name")
    return made


def _of_one(told: Exposition, name: str) -> float | None:
    """Of the worker that has counted most: each counts the same, and some look up nothing."""
    return max(told.split(name, "worker_id").values(), default=None)
