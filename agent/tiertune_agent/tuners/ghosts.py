"""What a pool's ghosts counted: tokens that it would have hit with another algorithm or another size. Pure."""

from collections.abc import Collection
from math import log

from tiertune_agent.records import Window

Which = tuple[str, int]
"""A ghost: its algorithm, and its size in bytes."""
Tokens = tuple[float, float]
"""Tokens hit, and tokens asked for."""
NEAR = 2.0
"""A ghost larger or smaller than the pool's capacity by more than this factor says nothing about the pool."""
_DIGITS = 18
"""Most digits of a number of bytes or tokens; anything longer is not one."""


def whole(label: str) -> int | None:
    """The number of bytes or tokens that a label tells; None: it tells none."""
    return int(label) if label.isdecimal() and len(label) <= _DIGITS else None


def ghost_tokens(window: Window) -> dict[Which, Tokens]:
    """Tokens by ghost that was asked for any; rows of ``whatif_tokens_total`` without a size are skipped."""
    found: dict[Which, Tokens] = {}
    for _, labels, value in window.each("whatif_tokens_total"):
        size, result = whole(labels.get("capacity_bytes", "")), labels.get("result")
        if size is not None and result:
            which = labels.get("algorithm", ""), size
            hit, asked = found.get(which, (0.0, 0.0))
            found[which] = hit + (result == "hit") * value, asked + value
    return {which: tokens for which, tokens in found.items() if tokens[1] > 0}


def nearest(sizes: Collection[int], capacity: float | None) -> int | None:
    """The simulated size in bytes nearest to ``capacity``, None if none is near; without a capacity the only size."""
    if not capacity:
        return next(iter(sizes)) if len(sizes) == 1 else None
    near = [size for size in sizes if capacity / NEAR <= size <= capacity * NEAR]
    return min(near, key=lambda size: abs(log(size / capacity)), default=None)
