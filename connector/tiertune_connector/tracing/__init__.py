"""OpenTelemetry spans of what TierTune did for a request. Off, and free, unless a collector's address is configured."""

from tiertune_connector.tracing.spans import RequestTrace, Sent, Span, describe
from tiertune_connector.tracing.tracer import Counts, Tracing, open_tracing

__all__ = ["Counts", "RequestTrace", "Sent", "Span", "Tracing", "describe", "open_tracing"]
