"""The shape of a store's answers, as far as the agent reads them; other versions may send more."""

from math import isfinite
from typing import Any

LEVELS = 100
"""Most levels of a document; far fewer are in any of a store's."""
EACH = "*"
"""Of a mapping whose keys are names."""
NUMBER = "a number"
"""Of anything that a store sizes, counts or measures: finite, not below 0, and below MOST."""
MOST = 2.0**60
SQUARE = "a square"
"""Of what adds up squares of numbers."""
_SIZES = {"effective": {"capacity_bytes": NUMBER, "eviction": str}}
_POOL = {
    "model": str,
    "chunk_bytes": NUMBER,
    "chunk_tokens": NUMBER,
    "chunks_each": NUMBER,
    "prefill": {EACH: NUMBER},
    "dram": _SIZES,
    "disk": _SIZES,
}
_TIER = {"health": str, "capacity_bytes": NUMBER, "resident_bytes": NUMBER, "servers": [{"server": str}]}
_TUNED = {
    "capacity_bytes": NUMBER,
    "fetch": str,
    "write": str,
    "min_fetch_tokens": NUMBER,
    "margin": NUMBER,
    "holdout": NUMBER,
}
STATUS = {"tiers": {EACH: _TIER}, "pools": {EACH: _POOL}, "models": [str], "uptime_s": NUMBER}
TUNING = {
    "version": NUMBER,
    "tiers": {EACH: _TUNED},
    "pools": {EACH: {EACH: {"capacity_bytes": NUMBER, "eviction": str}}},
    "defaults": {"eviction": str},
    "admission": {EACH: str},
    "tenants": {EACH: {"quota_bytes": NUMBER}},
}


def check(told: Any, shape: Any, place: str) -> None:  # noqa: ANN401 (JSON)
    """Raise TypeError naming the first place of another shape. What is missing or null is not checked."""
    if shape in (NUMBER, SQUARE):
        most = MOST if shape == NUMBER else MOST**2
        fits = isinstance(told, int | float) and not isinstance(told, bool) and 0 <= told < most
    else:
        fits = isinstance(told, type(shape) if isinstance(shape, dict | list) else shape)
    if not fits:
        raise TypeError(f"{place} is {told!r:.50}")
    if isinstance(shape, list):
        for one in told:
            check(one, shape[0], place)
    elif isinstance(shape, dict):
        for name, value in told.items():
            if EACH in shape and isinstance(shape[EACH], dict):
                check(value, shape[EACH], f"{place}.{name}")
            elif value is not None and (inner := shape.get(name, shape.get(EACH))) is not None:
                check(value, inner, f"{place}.{name}")


def check_kept(told: Any, levels: int = LEVELS) -> None:  # noqa: ANN401 (JSON)
    """Raise ValueError for what no database takes, wherever it is: an infinite number, or nesting without end."""
    if isinstance(told, dict | list):
        if not levels:
            raise ValueError(f"it is nested over {LEVELS} levels deep")
        for one in told.values() if isinstance(told, dict) else told:
            check_kept(one, levels - 1)
    elif isinstance(told, float) and not isfinite(told):
        raise ValueError(f"{told} is no number")
