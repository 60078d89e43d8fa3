"""OpenTelemetry spans of what TierTune did for a request. Off, and free, unless a collector's address is configured."""

from tiertune_connector.tracing.spans import RequestTrace, Sent, Span, describe
from tiertune_connector.tracing.tracer import NO_TRACING, Counts, Recorder, Tracing, open_tracing

__all__ = ["NO_TRACING", "Counts", "Recorder", "RequestTrace", "Sent", "Span", "Tracing", "describe", "open_tracing"]
