"""A collector of traces for tests."""

from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from e2e.servers import Quiet, serving


def values(thing):
    """Attributes of a span or a resource."""
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in thing.attributes}


class Collector:
    """A collector that speaks OTLP over HTTP and keeps what it takes; with another ``status`` it refuses."""

    def __init__(self, status=200):
        collector = self
        self.status, self.posts, self.refused = status, [], []

        class Handler(Quiet, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = collector.status
                kept = collector.posts if status == 200 else collector.refused
                kept.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._serving = ExitStack()
        self.url = f"http://127.0.0.1:{self._serving.enter_context(serving(Handler)).server_port}"
        self.close = self._serving.close

    def spans(self, *, refused=False):
        """By name, in the order of their start."""
        found, posts = {}, self.refused if refused else self.posts
        for span in sorted(self._spans(posts), key=lambda span: span.start_time_unix_nano):
            found.setdefault(span.name, []).append(span)
        return found

    def resource(self):
        (path, post), *_ = self.posts
        assert path == "/v1/traces"
        return values(post.resource_spans[0].resource)

    def _spans(self, posts):
        for _, post in posts:
            for resource in post.resource_spans:
                for scope in resource.scope_spans:
                    yield from scope.spans
