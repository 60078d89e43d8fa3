"""vLLM's own metrics (0.32), with its offloading or tiering connector. Pure.

Tokens by tier are those of ``prompt_tokens_cached_by_source``, which are counted at admission, and prompts at the first
token: the misses of a prompt come later than its hits. As everywhere in vLLM, tokens that were recomputed after a
failed load count as found.
"""

from collections.abc import Mapping, Sequence

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import PREFILL_S, PREFILL_TOKENS, STAGE, Hints, Mapped, one_tier
from tiertune_agent.records import grouped, sum_known

PROMPTS = "vllm:prompt_tokens_total"
FOUND_OUTSIDE = "vllm:external_prefix_cache_hits_total"
LOADED = "vllm:kv_offload_load_bytes_total"
PRIMARY = "0:primary"
ON_DISK = ("fs",)
"""Secondary tiers that lie on a disk; others are shared, or elsewhere."""


def mapped(told: Exposition, hints: Hints) -> Mapped:
    """Map all engines behind the address together."""
    made = Mapped(tiers={"gpu": "the engine's prefix cache"})
    made.put("requests_total", told.total("vllm:time_to_first_token_seconds_count"), salted="unknown")
    made.put("prompt_tokens_total", told.total(PROMPTS), stage=STAGE)
    asked = told.split("vllm:kv_offload_tiering_chunk_queries_total", "tier")
    cascaded = told.split("vllm:kv_offload_tiering_active_cascade_jobs", "tier")
    secondary = grouped((own for own in asked | cascaded if own != PRIMARY), _tier)
    offloads = told.declares(LOADED)
    if offloads:
        made.tiers["staging"] = "host memory of the connector"
        made.tiers |= {tier: ", ".join(own) for tier, own in secondary.items()}
        _offloaded(told, made, secondary)
    beyond = one_tier(secondary) or (hints.tier if not offloads else "")
    if beyond and not offloads:
        made.tiers[beyond] = "of a connector that does not tell of itself here"
    _found(told, made, beyond, staging=offloads, ambiguous=len(secondary) > 1)
    made.put(PREFILL_S, told.total("vllm:request_prefill_time_seconds_sum"))
    made.put(PREFILL_TOKENS, told.total("vllm:request_prefill_kv_computed_tokens_sum"))
    made.unknown += [
        "bytes held and allowed, and evictions: the engine does not tell them",
        "seconds saved and lost: the engine does not measure what recomputing would have cost",
    ]
    made.models = told.values("model_name")
    return made


def _tier(own: str) -> str:
    return "disk" if own.partition(":")[2] in ON_DISK else "remote"


def _found(told: Exposition, made: Mapped, beyond: str, *, staging: bool, ambiguous: bool) -> None:
    prompts, sources = told.total(PROMPTS), told.split("vllm:prompt_tokens_cached_by_source_total", "source")
    if prompts is None or not sources:
        made.unknown.append("prompt tokens, or where they were found: this version of the engine does not tell them")
        return
    on_gpu, staged = sources.get("device", 0.0), sources.get("host", 0.0) if staging else 0.0
    outside = sum(sources.values()) - on_gpu - staged
    made.found("gpu", sources.get("device"), prompts, origin="self")
    if staging:
        made.found("staging", sources.get("host"), prompts - on_gpu)
    if beyond:
        made.found(beyond, outside, prompts - on_gpu - staged)
    elif ambiguous:
        made.found_somewhere(outside)
        made.unknown.append("hits of tiers beyond the host by tier: there are several")
    elif outside and not staging:
        made.found_somewhere(outside)
        made.unknown.append("hits beyond the GPU by tier: none is known (tier in the settings names the only one)")


def _offloaded(told: Exposition, made: Mapped, secondary: Mapping[str, Sequence[str]]) -> None:
    """``secondary``: the connector's own names of its tiers beyond the host, by what they are here."""
    made.moved("staging", told.counted(LOADED), told.counted("vllm:kv_offload_store_bytes_total"))
    made.failed("staging", "write", "no_room", told.counted("vllm:kv_offload_allocation_failure_total"))
    unpromoted = told.counted("vllm:kv_offload_tiering_promotion_allocation_failures_total")
    made.failed("staging", "promote", "no_room", unpromoted)
    if told.declares("vllm:kv_offload_lookup_async_delay_seconds"):
        # no request was deferred, or nothing loaded, as long as there is no such sample
        deferred = told.total("vllm:kv_offload_lookup_async_delay_seconds_sum") or 0.0
        loads = told.total("vllm:kv_offload_load_time_total") or 0.0
        made.waited(deferred + loads, told.total(FOUND_OUTSIDE))
        if loads:
            made.unknown.append("of how many ranks it sums up the seconds of loads: of several, the wait is too long")
    for tier, own in secondary.items():
        read = _sum(told, "vllm:kv_offload_tiering_read_bytes_total", own)
        made.moved(tier, read, _sum(told, "vllm:kv_offload_tiering_write_bytes_total", own))
        made.failed(tier, "read", "failed", _sum(told, "vllm:kv_offload_tiering_promotion_job_failures_total", own))
        made.failed(tier, "write", "failed", _sum(told, "vllm:kv_offload_tiering_cascade_job_failures_total", own))
        dropped = _sum(told, "vllm:kv_offload_tiering_backpressure_blocks_dropped_total", own)
        made.put("write_behind_dropped_total", dropped, tier=tier, reason="backpressure")


def _sum(told: Exposition, name: str, tiers: Sequence[str]) -> float | None:
    return sum_known(told.counted(name, tier=own) for own in tiers)
