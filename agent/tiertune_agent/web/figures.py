"""What the last windows of a fleet add up to, per tier and per store. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tiertune_agent.records import Histogram, Value, Window, known
from tiertune_agent.tuners.base import Candidate
from tiertune_agent.tuners.remote_fetch import asked, estimated
from tiertune_agent.web.chart import CostPoint, Span

TIERS = ("gpu", "staging", "dram", "disk", "remote", "unknown")
"""The last: of hits that an observed source does not tell by tier."""
OUTCOMES = ("won", "lost", "late", "failed", "skipped")


@dataclass(frozen=True)
class Mean:
    """Of observations in windows; None where there were none."""

    count: float
    value: float | None


@dataclass(frozen=True)
class Flow:
    """What one tier served, of all stores together."""

    hit_tokens: float | None
    """None: nobody tells them."""
    asked_tokens: float | None
    """A tier below one that hit is not asked."""
    trend: tuple[float, ...]
    """Hit tokens by step of time, oldest first."""


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


def flow(windows: Sequence[Window], tier: str, *, step_s: float, points: int) -> Flow:
    """Of all stores; the trend ends where the newest window of any tier ends."""
    here = [window for window in windows if window.tier == tier]
    until = max((_end(window) for window in windows), default=None)
    trend = [0.0] * points
    for window in here:
        found, latest = window.total("tier_lookup_tokens_total", result="hit"), (until or _end(window)) - _end(window)
        for step, part in _spread(latest.total_seconds() / step_s, window.seconds / step_s):
            if step < points:
                trend[points - 1 - step] += part * found
    hits, missed = (known(here, "tier_lookup_tokens_total", result=result) for result in ("hit", "miss"))
    if not here:  # a store's tier that was not asked
        hits = missed = 0.0
    return Flow(hits, None if hits is None or missed is None else hits + missed, tuple(trend))


def gate(windows: Iterable[Window], tier: str) -> Gate:
    whole = merged((window for window in windows if window.tier == tier), "gate_")
    return Gate(
        fetched=whole.total("gate_requests_total", decision="fetch"),
        recomputed=whole.total("gate_requests_total", decision="recompute"),
        predicted_fetch=_mean(whole, "gate_predicted_seconds", kind="fetch"),
        predicted_recompute=_mean(whole, "gate_predicted_seconds", kind="recompute"),
        actual_fetch=_mean(whole, "gate_actual_seconds", kind="fetch"),
        outcomes={name: whole.total("gate_outcomes_total", outcome=name) for name in OUTCOMES},
        reasons=_refusals(whole),
    )


def merged(windows: Iterable[Window], prefix: str) -> Window:
    """Counters whose names begin so, added up, whatever the store; gauges and buckets mean nothing in it."""
    found: dict[str, list[Value]] = {}
    for window in windows:
        for name, value in window.values.items():
            if name.startswith(prefix):
                found.setdefault(name, []).append(value)
    values = {name: _added(each) for name, each in found.items()}
    return Window("", "", "", "", datetime.min.replace(tzinfo=UTC), 0.0, values)


def _added(values: Sequence[Value]) -> Value:
    """Of one series."""
    seen = [value for value in values if isinstance(value, Histogram)]
    if seen:
        return Histogram(sum(value.count for value in seen), sum(value.sum for value in seen), {})
    return sum(value for value in values if not isinstance(value, Histogram))


def prompt_tokens(windows: Iterable[Window]) -> float:
    return sum(window.total("prompt_tokens_total") for window in windows if not window.tier)


def costs(windows: Iterable[Window], typical: Candidate | None, now: datetime) -> list[CostPoint]:
    """What a request would have paid in each window of the remote tier, as ``remote_fetch`` sees it; oldest first."""
    points = []
    for window in windows:
        evidence = asked(window) or estimated(window, typical)
        if evidence:
            requests = max(1, evidence.requests)
            at = (_end(window) - now).total_seconds()
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


def _end(window: Window) -> datetime:
    return window.start + timedelta(seconds=window.seconds)


def _spread(latest: float, length: float) -> Iterator[tuple[int, float]]:
    """Steps back in time that a window of some steps' length lies in, and which part of it lies in each."""
    step = int(latest)
    while step < latest + length:
        part = min(step + 1.0, latest + length) - max(float(step), latest)
        yield step, part / length
        step += 1


def _mean(window: Window, name: str, **labels: str) -> Mean:
    seen = [value for value in window.matching(name, **labels) if isinstance(value, Histogram)]
    number = sum(value.count for value in seen)
    return Mean(number, sum(value.sum for value in seen) / number if number else None)


def _refusals(window: Window) -> dict[str, float]:
    """Requests that did not fetch, by reason, most frequent first."""
    found: dict[str, float] = {}
    for key, value in window.values.items():
        name, _, inner = key.rstrip("}").partition("{")
        labels = dict(pair.partition("=")[::2] for pair in inner.split(","))
        if (name, labels.get("decision")) == ("gate_requests_total", "recompute") and isinstance(value, float):
            found[labels.get("reason", "")] = found.get(labels.get("reason", ""), 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))
