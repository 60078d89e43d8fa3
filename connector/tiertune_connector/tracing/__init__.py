"""OpenTelemetry spans of what TierTune did for a request. Off, and free, unless a collector's address is configured."""

from tiertune_connector.tracing.spans import Counts, RequestTrace, Span, describe
from tiertune_connector.tracing.tracer import Tracing, open_tracing

__all__ = ["Counts", "RequestTrace", "Span", "Tracing", "describe", "open_tracing"]
