"""The metrics of kv_exporter, a connector that was made up for this example: its own names, media and units. Pure.

It tells a limit of -1 where a medium has none, and counts nothing that recomputing would have cost.
"""

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.adapters.mapped import STAGE, Hints, Mapped

FOUND, MOVED, USED = "kv_hit_tokens_total", "kv_moved_mebibytes_total", "kv_used_mebibytes"
MEDIA = {"hostmem": "dram", "nvme": "disk", "peer": "remote"}
"""As it calls them, in the order in which a request asks them."""


def mapped(told: Exposition, _hints: Hints) -> Mapped:
    """It tells all by medium, so that no hints are needed."""
    made = Mapped()
    made.put("requests_total", told.total("kv_requests_total"), salted="unknown")
    prompts = told.total("kv_prompt_tokens_total")
    made.put("prompt_tokens_total", prompts, stage=STAGE)
    asked = prompts
    for medium in (medium for medium in MEDIA if medium in told.split(USED, "medium")):
        _medium(told, made, medium, asked)
        hit = told.total(FOUND, medium=medium)
        asked = None if asked is None or hit is None else asked - hit
    stalled_ms = told.total("kv_stall_milliseconds_total")
    made.waited(None if stalled_ms is None else stalled_ms / 1000, told.total(FOUND))
    made.unknown.append("seconds saved and lost: it does not measure what recomputing would have cost")
    made.models = told.values("model")
    return made


def _medium(told: Exposition, made: Mapped, medium: str, asked: float | None) -> None:
    """``asked``: tokens that no medium before it had; None: not told."""
    tier = MEDIA[medium]
    made.tiers[tier] = medium
    made.found(tier, told.total(FOUND, medium=medium), asked)
    read, written = (_bytes(told.total(MOVED, medium=medium, direction=way)) for way in ("load", "store"))
    made.moved(tier, read, written)
    made.put("tier_resident_bytes", _bytes(told.total(USED, medium=medium)), tier=tier)
    limit = _bytes(told.total("kv_limit_mebibytes", medium=medium))
    made.put("tier_capacity_bytes", limit, tier=tier, state="effective")
    dropped = told.total("kv_dropped_blocks_total", medium=medium)
    made.put("tier_evictions_total", dropped, tier=tier, algorithm="", reason="room")
    made.failed(tier, "write", "failed", told.total("kv_store_errors_total", medium=medium))


def _bytes(mebibytes: float | None) -> float | None:
    return None if mebibytes is None else mebibytes * 2**20
