"""What the last windows of a fleet add up to, per tier and per store. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter

from tiertune_agent.records import Window, ended, grouped, sum_known
from tiertune_agent.tuners.base import TypicalCandidate
from tiertune_agent.tuners.remote_fetch import asked, estimated
from tiertune_connector import tuning

TIERS = ("gpu", "staging", *tuning.TIERS, "unknown")
"""The last is for hits that an observed source does not report by tier."""
AGAIN = "decode"
"""If prefill and decode are separate, engines of this stage look up prompts that were looked up before."""


@dataclass(frozen=True)
class Served:
    """What one tier served. A tier below one that hit is not asked. None: nobody reports it."""

    hit_tokens: float | None
    missed_tokens: float | None

    @property
    def asked_tokens(self) -> float | None:
        known = self.hit_tokens, self.missed_tokens
        return None if None in known else sum_known(known)


@dataclass(frozen=True)
class WindowSums:
    """Sums over one window or many, of any stores."""

    prompt_tokens: float
    """Of prompts when they were looked up first; and of these what any tier had."""
    found_tokens: float
    until: datetime | None
    """When the newest window ended."""
    tiers: Mapping[str, Served]


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
    prompted = 0.0 if window.tier else _first(window, "prompt_tokens_total")
    hit, missed = (window.known("tier_lookup_tokens_total", result=result) for result in ("hit", "miss"))
    found = _first(window, "tier_lookup_tokens_total", result="hit") if hit else 0.0
    return WindowSums(prompted, found, ended(window), {window.tier: Served(hit, missed)})


def added(parts: Iterable[WindowSums]) -> WindowSums:
    """The sums of all parts, which may themselves be sums, in any order."""
    every = list(parts)
    tiers = grouped((told for part in every for told in part.tiers.items()), itemgetter(0))
    until = max((part.until for part in every if part.until), default=None)
    prompted, found = (sum(getattr(part, name) for part in every) for name in ("prompt_tokens", "found_tokens"))
    served = {
        tier: Served(sum_known(one.hit_tokens for _, one in told), sum_known(one.missed_tokens for _, one in told))
        for tier, told in tiers.items()
    }
    return WindowSums(prompted, found, until, served)


def busy(whole: WindowSums) -> bool:
    """Whether any request came."""
    return bool(whole.prompt_tokens) or any(one.hit_tokens or one.missed_tokens for one in whole.tiers.values())


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
    spans, state, began = [], _before(changes, now_is, since), since
    for at, to in changes:
        if at > since and to != state:
            if state == "off":
                spans.append((began, at))
            state, began = to, at
    if state == now_is == "off":
        spans.append((began, now))
    return spans


def _before(changes: Switched, now_is: str, since: datetime) -> str:
    """The state at ``since``: what was set last before, else the opposite of what was set first after."""
    earlier = [to for at, to in changes if at <= since]
    if earlier:
        return earlier[-1]
    return {"on": "off", "off": "on"}[changes[0][1]] if changes else now_is


def _first(window: Window, name: str, **labels: str) -> float:
    return window.total(name, **labels) - window.total(name, stage=AGAIN, **labels)
