"""The shape of a store's answers, as far as the agent reads them; other versions may send more."""

from math import isfinite
from typing import Any

from tiertune_agent.records import cut

LEVELS = 100
"""Most levels of a document; far fewer are in any of a store's."""
EACH = "*"
"""Of a mapping whose keys are names."""
NUMBER = MOST = 2.0**60
"""Of anything that a store sizes, counts or measures: not below 0, and below this."""
SQUARE = MOST**2
"""The same of what adds up squares of numbers."""
ELSEWHERE = "looked at one by one"
"""Of what may be left out in part."""
UNREAD = "anything"
"""Of what nobody reads, but the database keeps."""
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
STATUS = {"tiers": {EACH: _TIER}, "pools": {EACH: _POOL}, "models": [str], "uptime_s": NUMBER, "writes": ELSEWHERE}
TUNING = {
    "version": NUMBER,
    "tiers": {EACH: _TUNED},
    "pools": {EACH: {EACH: {"capacity_bytes": NUMBER, "eviction": str}}},
    "defaults": {"eviction": str},
    "admission": {EACH: str},
    "tenants": {EACH: {"quota_bytes": NUMBER}},
}


def check(told: Any, shape: Any, place: str, levels: int = LEVELS) -> None:  # noqa: ANN401 (JSON)
    """Raise TypeError naming the first place of another shape, or of what no database takes.

    That is an infinite number, or what is called otherwise than the database would have it, where names are read.
    ValueError for nesting without end. What is missing or null is not checked.
    """
    if not levels and isinstance(told, dict | list):
        raise ValueError(f"it is nested over {LEVELS} levels deep")
    if not _fits(told, shape):
        raise TypeError(f"{place} is {told!r:.50}")
    if isinstance(told, list):
        for one in told:
            check(one, shape[0] if isinstance(shape, list) else UNREAD, place, levels - 1)
    elif isinstance(told, dict):
        inner = shape if isinstance(shape, dict) else {}
        for name, value in told.items():
            if inner and name != cut(name):
                raise TypeError(f"in {place} something is called {name!r:.50}")
            of = inner.get(name, inner.get(EACH, UNREAD))
            if of != ELSEWHERE and (value is not None or (EACH in inner and isinstance(of, dict))):
                check(value, of, f"{place}.{name}", levels - 1)


def _fits(told: Any, shape: Any) -> bool:  # noqa: ANN401 (JSON)
    """Whether it is of this shape; what a list or a mapping holds is not looked at."""
    if isinstance(shape, float):
        return isinstance(told, int | float) and not isinstance(told, bool) and 0 <= told < shape
    if shape == UNREAD:
        return not isinstance(told, float) or isfinite(told)
    return isinstance(told, type(shape) if isinstance(shape, dict | list) else shape)
