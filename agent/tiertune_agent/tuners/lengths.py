"""Do short fetches lose time while long ones pay? Answered by what fetches of each length class saved and lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from tiertune_agent.records import Window, Windows, added_up
from tiertune_agent.tuners.evidence import Summand, ratio
from tiertune_agent.tuners.ghosts import whole

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

    Short fetches must have lost in each of the last ``needed`` windows that had any, and by two standard errors. Long
    ones must pay by as many, and have gained in as many of their last windows, in sum: the link may be slow by now.
    """
    seen = [_classes(window) for window in windows]
    bounds = sorted({bound for classes in seen for bound in classes})[1:]
    if not bounds:
        return None
    floor = min(bounds, key=lambda bound: (sum(_within(classes, 0, bound).of for classes in seen), bound))
    short = [sums for classes in seen if (sums := _within(classes, 0, floor)).per]
    long = [sums for classes in seen if (sums := _within(classes, floor, inf)).per]
    loss, gain = ratio(short), ratio(long)
    if len(short) < needed or any(sums.of >= 0 for sums in short[-needed:]) or not (loss.below and gain.above):
        return None
    if sum(sums.of for sums in long[-needed:]) <= 0:
        return None
    requests = int(sum(sums.per for sums in short))
    reason = (
        f"{requests} fetches under {floor} tokens lost {-loss.value:.2g} s each (standard error {loss.error:.2g}), "
        f"{sum(sums.per for sums in long):.0f} longer ones gained {gain.value:.2g} s each"
    )
    return Short(floor, reason, requests)


def between(window: Window, low: int, high: int) -> Summand:
    """Seconds gained per fetch in the classes that begin at ``low`` or above, and below ``high``, in tokens."""
    return _within(_classes(window), low, high)


def _classes(window: Window) -> dict[int, Summand]:
    """Seconds gained per fetch, by the least tokens of each class; rows that do not tell these are skipped."""
    fetches = added_up((whole(labels.get("tokens", "")), count) for _, labels, count in window.each(_FETCHES))
    gained = added_up(
        (whole(labels.get("tokens", "")), seconds if labels.get("result") == "saved" else -seconds)
        for _, labels, seconds in window.each(_SECONDS)
    )
    return {tokens: Summand(gained.get(tokens, 0.0), count) for tokens, count in fetches.items() if tokens is not None}


def _within(classes: Mapping[int, Summand], low: float, high: float) -> Summand:
    found = [sums for least, sums in classes.items() if low <= least < high]
    return Summand(sum(sums.of for sums in found), sum(sums.per for sums in found))
