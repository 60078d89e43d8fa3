"""OpenTelemetry spans of what TierTune did for a request. Off, and free, unless a collector's address is configured."""

from tiertune_connector.tracing.spans import RequestTrace, Span, describe
from tiertune_connector.tracing.tracer import Tracing, open_tracing

__all__ = ["RequestTrace", "Span", "Tracing", "describe", "open_tracing"]
