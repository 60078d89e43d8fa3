"""Do short fetches lose where long ones pay? From what fetches of each class of lengths saved and lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from tiertune_agent.records import Window
from tiertune_agent.tuners.evidence import Ratio, Summand, ratio

Sums = tuple[float, float]
"""Fetches, and the seconds that they gained."""
_FETCHES, _SECONDS = "gate_length_requests_total", "gate_length_seconds_total"


@dataclass(frozen=True)
class Short:
    """Fetches under ``tokens`` clearly lose, those from there on clearly pay."""

    tokens: int
    reason: str
    requests: int
    """Of the short ones."""


def losing_lengths(windows: Sequence[Window], needed: int) -> Short | None:
    """The floor that saves most; None where short fetches do not lose, or long ones do not pay.

    The short ones must have lost in the last ``needed`` windows in a row that had any, and by two standard errors.
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
    """Of the classes that begin between two floors, the upper one excluded."""
    return _within(_classes(window), low, high)


def _classes(window: Window) -> dict[int, Sums]:
    """By the least tokens of each class."""
    fetches: dict[str, float] = {}
    gained: dict[str, float] = {}
    for name, labels, value in window.each(_FETCHES, _SECONDS):
        tokens = next(label for label in labels if label.startswith("tokens="))
        if name == _FETCHES:
            fetches[tokens] = value
        else:
            gained[tokens] = gained.get(tokens, 0.0) + (value if "result=saved" in labels else -value)
    return {int(tokens.partition("=")[2]): (count, gained.get(tokens, 0.0)) for tokens, count in fetches.items()}


def _within(classes: Mapping[int, Sums], low: float, high: float) -> Sums:
    found = [sums for least, sums in classes.items() if low <= least < high]
    return sum(fetches for fetches, _ in found), sum(gained for _, gained in found)


def _per_fetch(parts: Sequence[Sums]) -> Ratio:
    return ratio([Summand(1.0, gained, fetches) for fetches, gained in parts])
