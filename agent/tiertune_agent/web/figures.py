"""What the last windows of a fleet add up to, per tier and per store. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter

from tiertune_agent.records import Window, added_up, ended
from tiertune_agent.tuners.base import TypicalCandidate
from tiertune_agent.tuners.remote_fetch import asked, estimated
from tiertune_connector import tuning

TIERS = ("gpu", "staging", *tuning.TIERS, "unknown")
"""The last is for hits that an observed source does not report by tier."""


@dataclass(frozen=True)
class WindowSums:
    """Sums over one window or many, of any stores."""

    prompt_tokens: float
    """Of prompts when they were looked up first; and of these what any tier had."""
    found_tokens: float
    until: datetime | None
    """When the newest window ended."""
    hits: Mapping[str, float]
    """Tokens by tier, if anybody reports them; and those that it was asked for and lacked.

    A tier below one that hit is not asked.
    """
    misses: Mapping[str, float]

    @property
    def busy(self) -> bool:
        """Whether any request came."""
        return any((self.prompt_tokens, *self.hits.values(), *self.misses.values()))


@dataclass(frozen=True)
class Cost:
    """What a request would have paid in a window that ended at ``at``, as ``remote_fetch`` sees it."""

    at: datetime
    fetch_s: float
    recompute_s: float


Switched = Sequence[tuple[datetime, str]]
"""When a switch was set, and to what; oldest first."""
Span = tuple[datetime, datetime]
"""From and to."""


def sums(window: Window) -> WindowSums:
    """One window's, read once."""
    prompted = 0.0 if window.tier else window.before_decode("prompt_tokens_total")
    hits, misses = (
        {window.tier: tokens} if (tokens := window.known("tier_lookup_tokens_total", result=result)) is not None else {}
        for result in ("hit", "miss")
    )
    found = window.before_decode("tier_lookup_tokens_total", result="hit") if any(hits.values()) else 0.0
    return WindowSums(prompted, found, ended(window), hits, misses)


def added(parts: Iterable[WindowSums]) -> WindowSums:
    """The sums of all parts, which may themselves be sums, in any order."""
    every = list(parts)
    return WindowSums(
        sum(part.prompt_tokens for part in every),
        sum(part.found_tokens for part in every),
        max((part.until for part in every if part.until), default=None),
        added_up(told for part in every for told in part.hits.items()),
        added_up(told for part in every for told in part.misses.items()),
    )


def cost(window: Window, typical: TypicalCandidate | None = None) -> Cost | None:
    """Cost per request that found chunks in the tier; without any, a typical candidate's by the window's estimate."""
    evidence = asked(window) or estimated(window, typical)
    if evidence is None:
        return None
    requests = max(1, evidence.requests)
    return Cost(ended(window), evidence.fetch_s / requests, evidence.recompute_s / requests)


def off_spans(changes: Switched, now_is: str, since: datetime, now: datetime) -> list[Span]:
    """When a switch was off since ``since``; ``changes`` are those to ``on`` and ``off``.

    If it is on now by no known change, nobody knows how long it was off.
    """
    first = {"on": "off", "off": "on"}[changes[0][1]] if changes else now_is
    told = [(since, first), *((max(at, since), to) for at, to in changes)]
    states = [next(same) for _, same in groupby(told, key=itemgetter(1))]  # off again: it was off, as far as is known
    ends = [*(at for at, _ in states[1:]), now if now_is == "off" else states[-1][0]]
    return [(at, end) for (at, to), end in zip(states, ends, strict=True) if to == "off" and at < end]
