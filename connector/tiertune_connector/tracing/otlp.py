"""The only place that imports OpenTelemetry: spans with their parents, sent by OTLP over HTTP."""

import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span as OtlpSpan
from opentelemetry.trace import Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tiertune_connector.tracing.spans import Counts, RequestTrace, Span

EXPORT_TIMEOUT_S = 0.8
HEADERS = ("traceparent", "tracestate")
MAX_HEADER = 512
"""Longest header, in characters; the specification obliges nobody to read more."""


class OtlpSink:
    """Makes spans of finished requests and posts them. Not thread-safe, except ``close``.

    A request with a trace context is sampled as its parent was; others as OTEL_TRACES_SAMPLER says (default: all).
    """

    def __init__(
        self, endpoint: str, describe: Callable[[RequestTrace], list[Span]], resource: Mapping[str, str]
    ) -> None:
        """``endpoint``: the collector's URL; without a path, OTLP's own `/v1/traces` is meant."""
        self._describe = describe
        self._exporter = OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_TIMEOUT_S)
        self._ended = InMemorySpanExporter()
        """Keeps the sampled spans that have ended until they are posted."""
        environment = OTELResourceDetector().detect()
        self._provider = TracerProvider(
            resource=Resource.create(dict(resource)).merge(environment), shutdown_on_exit=False
        )
        self._provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = self._provider.get_tracer("tiertune_connector")

    def send(self, traces: Sequence[RequestTrace]) -> Counts:
        """Post the spans of ``traces`` in one message; requests that are not sampled do not count."""
        sampled = 0
        for trace in traces:
            sampled += self._make(trace)
            time.sleep(0)  # lets the scheduler thread have the interpreter's lock
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        if not spans:
            return Counts(0, 0)
        taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        return Counts(sampled, 0) if taken else Counts(0, sampled)

    def close(self) -> None:
        """End an export that is being retried."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _make(self, trace: RequestTrace) -> bool:
        """Make and end a request's spans; returns whether it is sampled."""
        first, *children = self._describe(trace)
        context = parent(trace.headers)
        request = self._started(first, context)
        if request.is_recording():
            inside = set_span_in_context(request, context)
            for child in children:
                self._started(child, inside).end(child.end_ns)
        request.end(first.end_ns)
        return request.get_span_context().trace_flags.sampled

    def _started(self, span: Span, inside: Context) -> OtlpSpan:
        made = self._tracer.start_span(span.name, inside, attributes=span.attributes, start_time=span.start_ns)
        if span.failure:
            made.set_status(Status(StatusCode.ERROR, span.failure))
        return made


def parent(headers: object) -> Context:
    """The W3C trace context in a request's headers; empty if there is none, or none that can be read."""
    if not isinstance(headers, Mapping):
        return Context()
    carrier = {
        name: value for name in HEADERS if isinstance(value := headers.get(name), str) and len(value) <= MAX_HEADER
    }
    return TraceContextTextMapPropagator().extract(carrier, Context())


def traces_url(endpoint: str) -> str:
    """``endpoint`` with OTLP's path for traces, if it has none of its own."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
