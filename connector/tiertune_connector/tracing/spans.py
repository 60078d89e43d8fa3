"""Turns the record of a request into spans. Pure; `docs/tracing.md` has the table of attributes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiertune_connector.cost import GateDecision
from tiertune_connector.protocol.messages import TierReport

Value = str | bool | int | float
Attributes = Mapping[str, Value | None]
WORST_FIRST = ("failed", "late", "lost", "unknown", "won")
FAILURES = ("failed", "late")


@dataclass(slots=True)
class RequestTrace:
    """What happened to one request, and when (seconds of the monotonic clock; 0: it did not happen)."""

    request: str
    headers: object
    """The request's trace context, as it came from outside."""
    prompt_tokens: int
    chunks: int
    """Chunks of the prompt that were asked for."""
    arrived_at: float
    arrived_ns: int
    """The same since 1970, by the wall clock: all other times are as far from it as by the monotonic one."""
    looked_up_at: float = 0.0
    tiers: Sequence[str] = ()
    """The tier of each chunk of the leading run that was found."""
    late: bool = False
    nothing: str = ""
    """Why nothing was found, unless it was simply absent."""
    decided_at: float = 0.0
    decision: GateDecision | None = None
    loaded_at: float = 0.0
    reports: Sequence[TierReport] = ()
    """What was reported of the decision's tiers, and of the load, if there was one."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span. ``failure`` is empty, or what went wrong."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    failure: str = ""


def describe(trace: RequestTrace, *, chunk_bytes: int, model: str = "") -> list[Span]:
    """The request's span, then its children. ``chunk_bytes`` counts all groups of layers.

    The request's span lasts until the prompt's prefill could begin, which is its last child's end. Without children
    nothing was waited for.
    """
    children = [*_lookup(trace), *_gate(trace), *_loads(trace, chunk_bytes)]
    times = trace.arrived_at, max(trace.arrived_at, trace.looked_up_at, trace.decided_at, trace.loaded_at)
    attributes: Attributes = {
        "tiertune.request.id": trace.request,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "tiertune.chunks": trace.chunks,
        "tiertune.outcome": outcome(trace),
        "gen_ai.request.model": model or None,
    }
    return [_span(trace, "tiertune.request", times, attributes), *children]


def outcome(trace: RequestTrace) -> str:
    """The worst outcome of its loads; without any, ``unknown`` if one was decided, else ``late`` or ``skipped``."""
    seen = {report.outcome for report in trace.reports if report.actual_s is not None}
    if seen:
        return next((name for name in WORST_FIRST if name in seen), "unknown")
    if trace.decision is not None and trace.decision.fetches:
        return "unknown"  # the request ended before its load
    return "late" if trace.late else "skipped"


def _lookup(trace: RequestTrace) -> Iterator[Span]:
    if not trace.looked_up_at:
        return
    tiers, nothing = ((), "") if trace.late else (trace.tiers, trace.nothing)  # an answer may come as it is given up
    attributes = {
        "tiertune.chunks": trace.chunks,
        "tiertune.late": trace.late,
        "tiertune.reason": nothing or None,
        **{f"tiertune.chunks.{tier}": tiers.count(tier) for tier in dict.fromkeys(tiers)},
    }
    times = trace.arrived_at, trace.looked_up_at
    yield _span(trace, "tiertune.lookup", times, attributes, "late" if trace.late else "")


def _gate(trace: RequestTrace) -> Iterator[Span]:
    if trace.decision is None:
        return
    decision = trace.decision
    offered = decision.tier != ""  # else nothing was predicted
    attributes = {
        "tiertune.decision": "fetch" if decision.fetches else "recompute",
        "tiertune.reason": str(decision.reason),
        "tiertune.cut": decision.cut,
        "tiertune.backlog_seconds": decision.backlog_s,
        "tiertune.tier": decision.tier or None,
        "tiertune.predicted.fetch_seconds": decision.fetch_s if offered else None,
        "tiertune.predicted.recompute_seconds": decision.recompute_s if offered else None,
    }
    yield _span(trace, "tiertune.gate", (trace.looked_up_at or trace.decided_at, trace.decided_at), attributes)


def _loads(trace: RequestTrace, chunk_bytes: int) -> Iterator[Span]:
    """A slower tier's chunks are first brought into DRAM; the copy out of DRAM ends a load."""
    took = {report.tier: report.actual_s for report in trace.reports if report.actual_s is not None}
    for report in trace.reports:
        if report.tier not in took:
            continue
        in_dram = trace.loaded_at - (0.0 if report.tier == "dram" else took.get("dram", 0.0))
        times = max(trace.arrived_at, in_dram - took[report.tier]), in_dram
        chunks = report.chunks * report.fetched_tokens // max(1, report.tokens)
        attributes: Attributes = {
            "tiertune.tier": report.tier,
            "tiertune.chunks": chunks,
            "tiertune.tokens": report.fetched_tokens,
            "tiertune.bytes": chunks * chunk_bytes,
            "tiertune.outcome": report.outcome,
            "tiertune.predicted.fetch_seconds": report.fetch_s,
            "tiertune.predicted.recompute_seconds": report.recompute_s,
            "tiertune.actual_seconds": report.actual_s,
        }
        failure = report.outcome if report.outcome in FAILURES else ""
        yield _span(trace, "tiertune.load", times, attributes, failure)


def _span(
    trace: RequestTrace, name: str, times: tuple[float, float], attributes: Attributes, failure: str = ""
) -> Span:
    """A ``Span`` that never ends before it starts, whatever its ``times`` are; None is no attribute."""
    start_ns, end_ns = (trace.arrived_ns + round(1e9 * (at - trace.arrived_at)) for at in times)
    told = {**attributes, "error.type": failure or None}
    known = {key: value for key, value in told.items() if value is not None}
    return Span(name, start_ns, max(start_ns, end_ns), known, failure)
