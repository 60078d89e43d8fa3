"""vLLM's own metrics (0.32), with its offloading or tiering connector. Pure.

Tokens by tier are those of ``prompt_tokens_cached_by_source``, which are counted with the prompts at the first token,
so that they add up; as everywhere in vLLM, tokens that were recomputed after a failed load count as found.
"""

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import (
    PREFILL_S,
    PREFILL_TOKENS,
    STAGE,
    START,
    Hints,
    Mapped,
    one_tier,
)

_V, _O = "vllm:", "vllm:kv_offload_"
_T = f"{_O}tiering_"
PROMPTS, SOURCES = f"{_V}prompt_tokens_total", f"{_V}prompt_tokens_cached_by_source_total"
FIRST_TOKENS = f"{_V}time_to_first_token_seconds_count"
ASKED, FOUND = f"{_V}prefix_cache_queries_total", f"{_V}prefix_cache_hits_total"
ASKED_OUTSIDE, FOUND_OUTSIDE = f"{_V}external_prefix_cache_queries_total", f"{_V}external_prefix_cache_hits_total"
PREFILL_SUM, COMPUTED = f"{_V}request_prefill_time_seconds_sum", f"{_V}request_prefill_kv_computed_tokens_sum"
LOADED, LOAD_S, STORED = f"{_O}load_bytes_total", f"{_O}load_time_total", f"{_O}store_bytes_total"
NO_ROOM, NO_PROMOTION = f"{_O}allocation_failure_total", f"{_T}promotion_allocation_failures_total"
DEFERRED = f"{_O}lookup_async_delay_seconds"
QUERIES, READ, WRITTEN = f"{_T}chunk_queries_total", f"{_T}read_bytes_total", f"{_T}write_bytes_total"
LOST_READS, LOST_WRITES = f"{_T}promotion_job_failures_total", f"{_T}cascade_job_failures_total"
DROPPED, UNDER_WAY = f"{_T}backpressure_blocks_dropped_total", f"{_T}active_cascade_jobs"
WANTED = (
    *(START, PROMPTS, SOURCES, FIRST_TOKENS, ASKED, FOUND, ASKED_OUTSIDE, FOUND_OUTSIDE, PREFILL_SUM, COMPUTED),
    *(LOADED, LOAD_S, STORED, NO_ROOM, NO_PROMOTION, DEFERRED, f"{DEFERRED}_sum"),
    *(QUERIES, READ, WRITTEN, LOST_READS, LOST_WRITES, DROPPED, UNDER_WAY),
)
PRIMARY = "0:primary"
ON_DISK = ("fs",)
"""Secondary tiers that lie on a disk; others are shared, or elsewhere."""


def mapped(told: Exposition, hints: Hints) -> Mapped:
    """Map all engines behind the address together."""
    made = Mapped(models=told.values("model_name"))
    made.tiers["gpu"] = "the engine's prefix cache"
    made.put("requests_total", told.total(FIRST_TOKENS), salted="unknown")
    prompts = told.total(PROMPTS)
    made.put("prompt_tokens_total", prompts, stage=STAGE)
    if prompts is None:
        made.unknown.append("prompt tokens, and shares of them: this version of the engine does not tell them")
    secondary = {own: _tier(own) for name in (QUERIES, UNDER_WAY) for own in told.split(name, "tier") if own != PRIMARY}
    offloads = told.declares(LOADED)
    if offloads:
        made.tiers["staging"] = "host memory of the connector"
        for own, tier in secondary.items():
            made.tiers[tier] = f"{made.tiers[tier]}, {own}" if tier in made.tiers else own
        _offloaded(told, made, secondary)
    beyond = one_tier(secondary) or (hints.tier if not offloads else "")
    if beyond and not offloads:
        made.tiers[beyond] = "of a connector that does not tell of itself here"
    _found(told, made, beyond, staging=offloads, ambiguous=len(set(secondary.values())) > 1)
    made.put(PREFILL_S, told.total(PREFILL_SUM))
    made.put(PREFILL_TOKENS, told.total(COMPUTED))
    made.unknown += [
        "bytes held and allowed, and evictions: the engine does not tell them",
        "seconds saved and lost: the engine does not measure what recomputing would have cost",
    ]
    return made


def _tier(own: str) -> str:
    return "disk" if own.partition(":")[2] in ON_DISK else "remote"


def _found(told: Exposition, made: Mapped, beyond: str, *, staging: bool, ambiguous: bool) -> None:
    prompts, sources = told.total(PROMPTS), told.split(SOURCES, "source")
    if prompts is None or not sources:  # a version that does not tell them apart
        found, found_outside = told.total(FOUND), told.total(FOUND_OUTSIDE)
        made.found("gpu", found, told.total(ASKED), origin="self")
        if found is None:
            made.unknown.append("hits of the engine's prefix cache: this version of the engine does not tell them")
        only = beyond if not staging else "" if beyond or ambiguous else "staging"
        if only:
            made.found(only, found_outside, told.total(ASKED_OUTSIDE))
        elif staging or found_outside:
            made.found_somewhere(found_outside)
            made.unknown.append("hits beyond the GPU by tier: this version of the engine does not tell them apart")
        return
    left, outside = prompts, sum(sources.values()) - sources.get("device", 0.0)
    made.found("gpu", sources.get("device"), left, origin="self")
    left -= sources.get("device", 0.0)
    if staging:
        made.found("staging", sources.get("host"), left)
        left -= sources.get("host", 0.0)
        outside -= sources.get("host", 0.0)
    if beyond:
        made.found(beyond, outside, left)
    elif ambiguous:
        made.found_somewhere(outside)
        made.unknown.append("hits of tiers beyond the host by tier: there are several")
    elif outside and not staging:
        made.found_somewhere(outside)
        made.unknown.append("hits beyond the GPU by tier: none is known (tier in the settings names the only one)")


def _offloaded(told: Exposition, made: Mapped, secondary: dict[str, str]) -> None:
    made.moved("staging", told.counted(LOADED), told.counted(STORED))
    made.failed("staging", "write", "no_room", told.counted(NO_ROOM))
    made.failed("staging", "promote", "no_room", told.counted(NO_PROMOTION))
    deferred, loads = told.total(f"{DEFERRED}_sum"), told.total(LOAD_S)
    if told.declares(DEFERRED):  # no request was deferred, or nothing loaded, as long as there is no such sample
        made.waited((deferred or 0.0) + (loads or 0.0), told.total(FOUND_OUTSIDE))
    for tier in dict.fromkeys(secondary.values()):
        own = [name for name, where in secondary.items() if where == tier]
        made.moved(tier, _sum(told, READ, own), _sum(told, WRITTEN, own))
        made.failed(tier, "read", "failed", _sum(told, LOST_READS, own))
        made.failed(tier, "write", "failed", _sum(told, LOST_WRITES, own))
        made.put("write_behind_dropped_total", _sum(told, DROPPED, own), tier=tier, reason="backpressure")


def _sum(told: Exposition, name: str, tiers: list[str]) -> float | None:
    found = [told.counted(name, tier=own) for own in tiers]
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None
