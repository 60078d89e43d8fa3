"""The only place that imports OpenTelemetry: spans with their parents, sent by OTLP over HTTP."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtlpSpan
from opentelemetry.trace import Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from requests import Session

from tiertune_connector.tracing.spans import RequestTrace, Span
from tiertune_connector.units import Clock

EXPORT_TIMEOUT_S = 0.8
MOST = 8192
"""Spans that wait to be posted."""
BATCH = 32
"""Spans posted at once: encoding more of them would hold the interpreter's lock for milliseconds."""
LOG_EVERY_S = 30.0
HEADERS = ("traceparent", "tracestate")
MAX_HEADER = 512
"""Longest header, in characters; the specification obliges nobody to read more."""


@dataclass(eq=False)
class Seldom(logging.Filter):
    """Lets one line through every ``LOG_EVERY_S``: a collector that is away would fill the engine's log."""

    clock: Clock = time.monotonic
    quiet_until_s: float = -inf

    def filter(self, _record: logging.LogRecord) -> bool:
        """Whether the line is logged."""
        now_s = self.clock()
        if now_s < self.quiet_until_s:
            return False
        self.quiet_until_s = now_s + LOG_EVERY_S
        return True


SELDOM = Seldom()
"""One for all sinks of the process: a logger takes it once."""


class OtlpSink:
    """Makes spans of finished requests, which OpenTelemetry's own thread posts. Not thread-safe, except ``give_up``.

    A request with a trace context is sampled as its parent was; others as OTEL_TRACES_SAMPLER says (default: all).
    """

    def __init__(
        self, endpoint: str, describe: Callable[[RequestTrace], list[Span]], resource: Mapping[str, str]
    ) -> None:
        """``endpoint``: the collector's URL; without a path, OTLP's own `/v1/traces` is meant."""
        self._describe = describe
        environment = OTELResourceDetector().detect()
        self._provider = TracerProvider(
            resource=Resource.create(dict(resource)).merge(environment), shutdown_on_exit=False
        )
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(SELDOM)
        self._exporter = OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_TIMEOUT_S, session=_session(endpoint))
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, MOST, schedule_delay_millis=1000, max_export_batch_size=BATCH)
        )
        self._tracer = self._provider.get_tracer("tiertune_connector")

    def make(self, trace: RequestTrace) -> None:
        """Make and end a request's spans."""
        first, *children = self._describe(trace)
        context = parent(trace.headers)
        request = self._started(first, context)
        if request.is_recording():
            inside = set_span_in_context(request, context)
            for child in children:
                self._started(child, inside).end(child.end_ns)
        request.end(first.end_ns)

    def close(self) -> None:
        """Post what is left. It may take half a minute where the collector does not answer, if nobody gives up."""
        self._provider.shutdown()

    def give_up(self) -> None:
        """Drop what is left, and end a wait for another try. For any thread; waits for nothing."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

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


def _session(endpoint: str) -> Session | None:
    """For a collector on this host one that leaves out a proxy of the environment, which would not find it there."""
    host = urlsplit(endpoint).hostname or ""
    try:
        here = host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        here = False
    if not here:
        return None
    session = Session()
    session.trust_env = False
    return session
