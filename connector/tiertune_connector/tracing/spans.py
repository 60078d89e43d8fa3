"""Turns the record of a request into spans. Pure; `docs/tracing.md` has the table of attributes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tiertune_connector.cost import GateDecision
from tiertune_connector.protocol.messages import TierReport

Value = str | bool | int | float
Attributes = Mapping[str, Value | None]
WORST_FIRST = ("failed", "late", "lost", "unknown", "won")
FAILURES = ("failed", "late")


@dataclass(slots=True)
class RequestTrace:
    """What happened to one request, and when (nanoseconds since 1970; 0: it did not happen)."""

    request: str
    headers: object
    """The request's trace context, as it came from outside."""
    prompt_tokens: int
    chunks: int
    """Chunks of the prompt that were asked for."""
    arrived_ns: int
    looked_up_ns: int = 0
    tiers: Sequence[str] = ()
    """The tier of each chunk of the leading run that was found."""
    late: bool = False
    nothing: str = ""
    """Why nothing was found, unless it was simply absent."""
    decided_ns: int = 0
    decision: GateDecision | None = None
    loads: list[tuple[int, Sequence[TierReport]]] = field(default_factory=list)
    """When each load ended, and what was reported of its tiers."""


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
    end = max([trace.arrived_ns, *(child.end_ns for child in children)])
    attributes: Attributes = {
        "tiertune.request.id": trace.request,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "tiertune.chunks": trace.chunks,
        "tiertune.outcome": outcome(trace),
        "gen_ai.request.model": model or None,
    }
    return [_span("tiertune.request", trace.arrived_ns, end, attributes), *children]


def outcome(trace: RequestTrace) -> str:
    """The worst outcome of its loads; without any, ``unknown`` if one was decided, else ``late`` or ``skipped``."""
    reports = chain.from_iterable(reports for _, reports in trace.loads)
    seen = {report.outcome for report in reports if report.fetched_tokens}
    if seen:
        return next((name for name in WORST_FIRST if name in seen), "unknown")
    if trace.decision is not None and trace.decision.fetches:
        return "unknown"  # the request ended before its load
    return "late" if trace.late else "skipped"


def _lookup(trace: RequestTrace) -> Iterator[Span]:
    if not trace.looked_up_ns:
        return
    attributes = {
        "tiertune.chunks": trace.chunks,
        "tiertune.late": trace.late,
        "tiertune.reason": trace.nothing or None,
        **{f"tiertune.chunks.{tier}": trace.tiers.count(tier) for tier in dict.fromkeys(trace.tiers)},
    }
    yield _span("tiertune.lookup", trace.arrived_ns, trace.looked_up_ns, attributes, "late" if trace.late else "")


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
    yield _span("tiertune.gate", trace.looked_up_ns or trace.decided_ns, trace.decided_ns, attributes)


def _loads(trace: RequestTrace, chunk_bytes: int) -> Iterator[Span]:
    """A slower tier's chunks are first brought into DRAM; the copy out of DRAM ends a load."""
    for end_ns, reports in trace.loads:
        fetched = [report for report in reports if report.fetched_tokens]
        copy_s = sum(report.actual_s or 0.0 for report in fetched if report.tier == "dram")
        for report in fetched:
            in_dram_ns = end_ns if report.tier == "dram" else end_ns - int(copy_s * 1e9)
            start_ns = max(trace.arrived_ns, in_dram_ns - int((report.actual_s or 0.0) * 1e9))
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
            yield _span("tiertune.load", start_ns, in_dram_ns, attributes, failure)


def _span(name: str, start_ns: int, end_ns: int, attributes: Attributes, failure: str = "") -> Span:
    """A ``Span`` that never ends before it starts, whatever the wall clock did meanwhile; None is no attribute."""
    known = {key: value for key, value in attributes.items() if value is not None}
    if failure:
        known["error.type"] = failure
    return Span(name, start_ns, max(start_ns, end_ns), known, failure)
