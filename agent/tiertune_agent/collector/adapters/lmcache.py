"""The metrics of LMCache within the engine's workers (0.5.6). Pure.

It reports what it found as a whole, not by tier; if it has only one, the settings can name it. Disk and remote count
as present once they were used, as their gauges also say 0 if there is none; ``remote_cache_usage`` is never filled, and
not read.
"""

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import STAGE, START, Hints, Mapped

_P = "lmcache:"
LOOKUPS, ASKED, FOUND = (f"{_P}num_{what}_total" for what in ("lookup_requests", "lookup_tokens", "lookup_hits"))
PROMPTS, IN_ENGINE = f"{_P}num_prompt_tokens_total", f"{_P}num_vllm_hit_tokens_total"
READS, READ = f"{_P}num_remote_read_requests_total", f"{_P}num_remote_read_bytes_total"
WRITES, WRITTEN = f"{_P}num_remote_write_requests_total", f"{_P}num_remote_write_bytes_total"
EVICTED, REFUSED = f"{_P}local_cpu_evict_keys_count_total", f"{_P}local_cpu_evict_failed_count_total"
HELD, ON_DISK = f"{_P}local_cache_usage", f"{_P}local_storage_usage"
LOST_READS, LOST_WRITES = f"{_P}get_blocking_failed_count", f"{_P}put_failed_count"
RETRIEVE_S = f"{_P}time_to_retrieve_sum"
WANTED = (
    *(START, LOOKUPS, ASKED, FOUND, PROMPTS, IN_ENGINE, READS, READ, WRITES, WRITTEN, EVICTED, REFUSED),
    *(HELD, ON_DISK, LOST_READS, LOST_WRITES, RETRIEVE_S),
)


def mapped(told: Exposition, hints: Hints) -> Mapped:
    """Map all workers behind the address together."""
    made = Mapped(models=told.values("model_name"), tiers={"dram": "LocalCPU"})
    made.put("requests_total", told.total(LOOKUPS), salted="unknown")
    prompts = told.total(PROMPTS)
    made.put("prompt_tokens_total", prompts, stage=STAGE)
    if told.total(IN_ENGINE):
        made.tiers["gpu"] = "the engine's prefix cache"
        made.found("gpu", told.total(IN_ENGINE), prompts, origin="self")
    made.put("tier_resident_bytes", told.total(HELD), tier="dram")
    made.put("tier_evictions_total", told.total(EVICTED), tier="dram", algorithm="", reason="room")
    made.failed("dram", "write", "no_room", told.total(REFUSED))
    if told.total(ON_DISK):
        made.tiers["disk"] = "LocalDisk"
        made.put("tier_resident_bytes", told.total(ON_DISK), tier="disk")
    if told.total(READS) or told.total(WRITES):
        made.tiers["remote"] = "its remote backend"
        made.moved("remote", told.total(READ), told.total(WRITTEN))
        made.failed("remote", "read", "failed", told.total(LOST_READS))
        made.failed("remote", "write", "failed", told.total(LOST_WRITES))
    if hints.tier:
        made.tiers.setdefault(hints.tier, "named in the settings")
        made.found(hints.tier, told.total(FOUND), told.total(ASKED))
    else:
        made.found_somewhere(told.total(FOUND))
        made.unknown.append("hits by tier: they are told as a whole (tier in the settings names the only one)")
    waits = told.split(RETRIEVE_S, "worker_id")
    made.waited(max(waits.values()) if waits else None, told.total(FOUND))  # ranks load at the same time
    made.unknown += [
        "capacity, and what disk and remote evicted: it does not tell them",
        "seconds saved and lost: it does not measure what recomputing would have cost",
    ]
    return made
