"""What the last windows of a fleet add up to, per tier and per store. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tiertune_agent.records import Histogram, Window
from tiertune_agent.tuners.base import Candidate
from tiertune_agent.tuners.remote_fetch import asked, estimated
from tiertune_agent.web.chart import CostPoint, Span

TIERS = ("gpu", "staging", "dram", "disk", "remote")
OUTCOMES = ("won", "lost", "late", "failed", "skipped")


@dataclass(frozen=True)
class Mean:
    """Of observations in windows; None where there were none."""

    count: float
    value: float | None


@dataclass(frozen=True)
class Flow:
    """What one tier served, of all stores together."""

    hit_tokens: float
    asked_tokens: float
    """A tier below one that hit is not asked."""
    trend: tuple[float, ...]
    """Hit tokens by window."""


@dataclass(frozen=True)
class Gate:
    """What gates decided about one tier, and what came of it. Seconds are means per request."""

    fetched: float
    recomputed: float
    predicted_fetch: Mean
    """Over all that found chunks there, whatever was decided."""
    predicted_recompute: Mean
    actual_fetch: Mean
    """Over those that fetched."""
    outcomes: Mapping[str, float]
    reasons: Mapping[str, float]
    """Why requests did not fetch."""

    @property
    def asked(self) -> bool:
        return bool(self.fetched or self.recomputed)


def flow(windows: Sequence[Window], tier: str, since: datetime, window_s: float, points: int) -> Flow:
    """Of windows that began after ``since``, in ``points`` equal steps."""
    here = [window for window in windows if window.tier == tier]
    trend = [0.0] * points
    for window in here:
        place = int((window.start - since).total_seconds() / window_s)
        trend[min(points - 1, max(0, place))] += window.total("tier_lookup_tokens_total", result="hit")
    hits = sum(trend)
    return Flow(hits, hits + _total(here, "tier_lookup_tokens_total", result="miss"), tuple(trend))


def gate(windows: Iterable[Window], tier: str) -> Gate:
    here = [window for window in windows if window.tier == tier]
    return Gate(
        fetched=_total(here, "gate_requests_total", decision="fetch"),
        recomputed=_total(here, "gate_requests_total", decision="recompute"),
        predicted_fetch=_mean(here, "gate_predicted_seconds", kind="fetch"),
        predicted_recompute=_mean(here, "gate_predicted_seconds", kind="recompute"),
        actual_fetch=_mean(here, "gate_actual_seconds", kind="fetch"),
        outcomes={name: _total(here, "gate_outcomes_total", outcome=name) for name in OUTCOMES},
        reasons=_refusals(here),
    )


def prompt_tokens(windows: Iterable[Window]) -> float:
    return _total(windows, "prompt_tokens_total")


def costs(windows: Iterable[Window], typical: Candidate | None, now: datetime) -> list[CostPoint]:
    """What a request would have paid in each window of the remote tier, as ``remote_fetch`` sees it; oldest first."""
    points = []
    for window in windows:
        evidence = asked(window) or estimated(window, typical)
        if evidence:
            requests = max(1, evidence.requests)
            at = (window.start + timedelta(seconds=window.seconds) - now).total_seconds()
            points.append(CostPoint(at, evidence.fetch_s / requests, evidence.recompute_s / requests))
    return points


def off_spans(changes: Sequence[tuple[datetime, str]], now_is: str, since: datetime, now: datetime) -> list[Span]:
    """When a switch was off since ``since``; ``changes`` are those to ``on`` and ``off``, oldest first."""
    spans, state, began = [], _before(changes, now_is, since), since
    for at, to in changes:
        if at > since and to != state:
            if state == "off":
                spans.append((began, at))
            state, began = to, at
    if state == "off":
        spans.append((began, now))
    return [Span((start - now).total_seconds(), (end - now).total_seconds()) for start, end in spans]


def _before(changes: Sequence[tuple[datetime, str]], now_is: str, since: datetime) -> str:
    """The state at ``since``: what was set last before, else the opposite of what was set first after."""
    earlier = [to for at, to in changes if at <= since]
    if earlier:
        return earlier[-1]
    return {"on": "off", "off": "on"}[changes[0][1]] if changes else now_is


def _total(windows: Iterable[Window], name: str, **labels: str) -> float:
    return sum(window.total(name, **labels) for window in windows)


def _mean(windows: Iterable[Window], name: str, **labels: str) -> Mean:
    found = [value for window in windows for value in window.matching(name, **labels)]
    seen = [value for value in found if isinstance(value, Histogram)]
    number = sum(value.count for value in seen)
    return Mean(number, sum(value.sum for value in seen) / number if number else None)


def _refusals(windows: Iterable[Window]) -> dict[str, float]:
    """Requests that did not fetch, by reason, most frequent first."""
    reasons: dict[str, float] = {}
    for window in windows:
        for key, value in window.values.items():
            name, _, inner = key.partition("{")
            labels = dict(part.partition("=")[::2] for part in inner.rstrip("}").split(",")) if inner else {}
            if name == "gate_requests_total" and labels.get("decision") == "recompute" and isinstance(value, float):
                reasons[labels.get("reason", "")] = reasons.get(labels.get("reason", ""), 0.0) + value
    return dict(sorted(reasons.items(), key=lambda item: -item[1]))
