"""What the last windows of a fleet add up to, per tier and per store. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from tiertune_agent.records import Histogram, Value, Window, added_up, ended, sum_known, sum_of
from tiertune_agent.tuners.base import TypicalCandidate
from tiertune_agent.tuners.remote_fetch import asked, estimated
from tiertune_connector import tuning

TIERS = ("gpu", "staging", *tuning.TIERS, "unknown")
"""The last is for hits that an observed source does not report by tier."""
SHOWN = ("gate_requests_total", "gate_outcomes_total", "gate_predicted_seconds", "gate_actual_seconds")
"""Counters of the gate that the page adds up."""
OUTCOMES = ("won", "lost", "late", "failed", "skipped")
AGAIN = "decode"
"""If prefill and decode are separate, engines of this stage look up prompts that were looked up before."""


@dataclass(frozen=True)
class Served:
    """What one tier served."""

    hit_tokens: float | None
    """This and the next: None if nobody reports them."""
    missed_tokens: float | None
    hits: Mapping[tuple[datetime, float], float]
    """Tokens, by when a window ended and the seconds that it took."""
    gate: Mapping[str, Value]
    """By series, those that are shown; histograms without buckets."""


@dataclass(frozen=True, eq=False)
class WindowSums:
    """Sums over one window or many, of any stores. Equal only to itself, so it can be a key."""

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


@dataclass(frozen=True)
class TierFlow:
    """What one tier served, of all stores together."""

    hit_tokens: float | None
    """None: nobody reports them."""
    asked_tokens: float | None
    """A tier below one that hit is not asked."""
    trend: tuple[float, ...]
    """Hit tokens by step of time, oldest first."""


@dataclass(frozen=True)
class Gate:
    """What gates decided about one tier, and what came of it. Seconds are means per request; None: there was none."""

    fetched: float
    recomputed: float
    predicted_fetch: float | None
    """Over all that found chunks there, whatever was decided."""
    predicted_recompute: float | None
    actual_fetch: float | None
    """Over those that fetched."""
    outcomes: Mapping[str, float]
    reasons: Mapping[str, float]
    """Why requests did not fetch, most frequent first."""

    @property
    def asked(self) -> bool:
        return bool(self.fetched or self.recomputed)


def sums(window: Window) -> WindowSums:
    """One window's, read once."""
    prompted = 0.0 if window.tier else _first(window, "prompt_tokens_total")
    hit, missed = (window.known("tier_lookup_tokens_total", result=result) for result in ("hit", "miss"))
    end = ended(window)
    gate = {
        name: Histogram(value.count, value.sum, {}) if isinstance(value, Histogram) else value
        for name, value in window.values.items()
        if name.startswith(SHOWN)
    }
    served = Served(hit, missed, {(end, window.seconds): hit} if hit else {}, gate)
    found = _first(window, "tier_lookup_tokens_total", result="hit") if hit else 0.0
    return WindowSums(prompted, found, end, {window.tier: served})


def added(parts: Iterable[WindowSums]) -> WindowSums:
    """The sums of all parts, which may themselves be sums, in any order."""
    every = list(parts)
    tiers: dict[str, list[Served]] = {}
    for part in every:
        for tier, served in part.tiers.items():
            tiers.setdefault(tier, []).append(served)
    until = max((part.until for part in every if part.until), default=None)
    prompted, found = (sum(getattr(part, name) for part in every) for name in ("prompt_tokens", "found_tokens"))
    return WindowSums(prompted, found, until, {tier: _together(rows) for tier, rows in tiers.items()})


def busy(whole: WindowSums) -> bool:
    """Whether any request came."""
    return bool(whole.prompt_tokens) or any(one.hit_tokens or one.missed_tokens for one in whole.tiers.values())


@lru_cache(maxsize=1)  # until a store answers, or a window is too old
def of_all(stores: tuple[WindowSums, ...]) -> WindowSums:
    return added(stores)


@lru_cache(maxsize=len(TIERS))  # likewise
def flow(whole: WindowSums, tier: str, *, step_s: float, points: int) -> TierFlow:
    """A tier's flow over all stores; the trend ends with the newest window of any tier."""
    served, trend = whole.tiers.get(tier), [0.0] * points
    if served is None or whole.until is None:  # a store's tier that was not asked
        return TierFlow(0.0, 0.0, tuple(trend))
    for (end, seconds), found in served.hits.items():
        for step, part in _spread((whole.until - end).total_seconds() / step_s, seconds / step_s):
            if step < points:
                trend[points - 1 - step] += part * found
    hit, missed = served.hit_tokens, served.missed_tokens
    return TierFlow(hit, None if hit is None or missed is None else hit + missed, tuple(trend))


def gate(whole: WindowSums, tier: str) -> Gate:
    served = whole.tiers.get(tier)
    every = Window("", "", "", tier, datetime.min.replace(tzinfo=UTC), 0.0, served.gate if served else {})
    return Gate(
        fetched=every.total("gate_requests_total", decision="fetch"),
        recomputed=every.total("gate_requests_total", decision="recompute"),
        predicted_fetch=_mean(every, "gate_predicted_seconds", kind="fetch"),
        predicted_recompute=_mean(every, "gate_predicted_seconds", kind="recompute"),
        actual_fetch=_mean(every, "gate_actual_seconds", kind="fetch"),
        outcomes={name: every.total("gate_outcomes_total", outcome=name) for name in OUTCOMES},
        reasons=_refusals(every),
    )


def cost(window: Window, typical: TypicalCandidate | None = None) -> Cost | None:
    """Cost per request that found chunks in the tier; without any, a typical candidate's by the window's estimate."""
    evidence = asked(window) or estimated(window, typical)
    if evidence is None:
        return None
    requests = max(1, evidence.requests)
    end = ended(window)
    return Cost(end, evidence.fetch_s / requests, evidence.recompute_s / requests)


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


def _together(each: Sequence[Served]) -> Served:
    """Parts of one tier as one."""
    gate: dict[str, list[Value]] = {}
    for one in each:
        for name, value in one.gate.items():
            gate.setdefault(name, []).append(value)
    return Served(
        sum_known(one.hit_tokens for one in each),
        sum_known(one.missed_tokens for one in each),
        added_up(hit for one in each for hit in one.hits.items()),
        {name: sum_of(values) for name, values in gate.items()},
    )


def _first(window: Window, name: str, **labels: str) -> float:
    return window.total(name, **labels) - window.total(name, stage=AGAIN, **labels)


def _spread(latest: float, length: float) -> Iterator[tuple[int, float]]:
    """Steps back in time that a window of some steps' length covers, and its part in each."""
    step = int(latest)
    while step < latest + length:
        part = min(step + 1.0, latest + length) - max(float(step), latest)
        yield step, part / length
        step += 1


def _mean(window: Window, name: str, **labels: str) -> float | None:
    seen = window.histograms(name, **labels)
    number = sum(value.count for value in seen)
    return sum(value.sum for value in seen) / number if number else None


def _refusals(window: Window) -> dict[str, float]:
    """Requests that did not fetch, by reason, most frequent first."""
    told = window.labelled("gate_requests_total")
    found = added_up((one.get("reason", ""), value) for one, value in told if one.get("decision") == "recompute")
    return dict(sorted(found.items(), key=lambda item: -item[1]))
