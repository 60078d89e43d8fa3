"""Do short fetches lose time while long ones pay? Answered by what fetches of each length class saved and lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from tiertune_agent.records import Window, Windows
from tiertune_agent.tuners.evidence import Ratio, Summand, ratio
from tiertune_agent.tuners.ghosts import whole

Sums = tuple[float, float]
"""Fetches, and the seconds that they gained."""
_FETCHES, _SECONDS = "gate_length_requests_total", "gate_length_seconds_total"


@dataclass(frozen=True)
class Short:
    """Fetches under ``tokens`` clearly lose, those from there on clearly pay."""

    tokens: int
    reason: str
    requests: int
    """Number of short fetches."""


def losing_lengths(windows: Windows, needed: int) -> Short | None:
    """The floor that saves most; None if short fetches do not lose, or long ones do not pay.

    Short fetches must have lost in each of the last ``needed`` windows that had any, and by two standard errors.
    """
    seen = [_classes(window) for window in windows]
    bounds = sorted({bound for classes in seen for bound in classes})[1:]
    if not bounds:
        return None
    floor = min(bounds, key=lambda bound: (sum(_within(classes, 0, bound)[1] for classes in seen), bound))
    short = [sums for classes in seen if (sums := _within(classes, 0, floor))[0]]
    long = [sums for classes in seen if (sums := _within(classes, floor, inf))[0]]
    loss, gain = _per_fetch(short), _per_fetch(long)
    if len(short) < needed or any(gained >= 0 for _, gained in short[-needed:]) or not (loss.below and gain.above):
        return None
    requests = int(sum(fetches for fetches, _ in short))
    reason = (
        f"{requests} fetches under {floor} tokens lost {-loss.value:.2g} s each (standard error {loss.error:.2g}), "
        f"{sum(fetches for fetches, _ in long):.0f} longer ones gained {gain.value:.2g} s each"
    )
    return Short(floor, reason, requests)


def between(window: Window, low: int, high: int) -> Sums:
    """Sums of the classes that begin at ``low`` or above, and below ``high``, in tokens."""
    return _within(_classes(window), low, high)


def _classes(window: Window) -> dict[int, Sums]:
    """Sums by the least tokens of each class; rows that do not tell these are skipped."""
    fetches: dict[int, float] = {}
    gained: dict[int, float] = {}
    for name, labels, value in window.each(_FETCHES, _SECONDS):
        tokens = whole(labels.get("tokens", ""))
        if tokens is None:
            continue
        if name == _FETCHES:
            fetches[tokens] = value
        else:
            gained[tokens] = gained.get(tokens, 0.0) + (value if labels.get("result") == "saved" else -value)
    return {tokens: (count, gained.get(tokens, 0.0)) for tokens, count in fetches.items()}


def _within(classes: Mapping[int, Sums], low: float, high: float) -> Sums:
    found = [sums for least, sums in classes.items() if low <= least < high]
    return sum(fetches for fetches, _ in found), sum(gained for _, gained in found)


def _per_fetch(parts: Sequence[Sums]) -> Ratio:
    return ratio([Summand(gained, fetches) for fetches, gained in parts])
