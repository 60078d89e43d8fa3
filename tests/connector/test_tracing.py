"""Spans of requests: what they say, where they hang, and that nobody ever waits for them."""

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span

from connector.otlp import Collector, values
from connector.stores import at_best, eventually
from connector.traces import CALLER, CHUNKS, SAMPLED, TRACE, UNSAMPLED, Sink, fetched, report
from tiertune_connector.tracing import Tracing, open_tracing, otlp
from tiertune_connector.tracing import tracer as tracer_module
from tiertune_connector.tracing.otlp import parent, traces_url

OPENED = {**CHUNKS, "model": "", "attributes": {}}


@pytest.fixture
def collector(patient):
    """One that answers."""
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """What OpenTelemetry reads of the environment, and a proxy, are not of the test."""
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def traced(url, *traces, **settings):
    tracing = open_tracing(url, **(OPENED | settings))
    for trace in traces or (fetched(),):
        tracing.ended(trace)
    tracing.close()


def lost(url):
    """Seconds until an engine that ends has given up a request's spans."""
    started = time.monotonic()
    tracing = open_tracing(url, **OPENED)
    tracing.ended(fetched())
    tracing.close()
    return time.monotonic() - started


class TestWhatArrives:
    """At a collector, over HTTP."""

    def test_a_fetch_is_a_tree_under_the_caller(self, collector):
        """The request's span is the caller's child; lookup, gate and one load per tier are its children."""
        traced(collector.url)
        spans = collector.spans()
        assert {name: len(found) for name, found in spans.items()} == {
            "tiertune.request": 1,
            "tiertune.lookup": 1,
            "tiertune.gate": 1,
            "tiertune.load": 2,
        }
        (request,) = spans.pop("tiertune.request")
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, CALLER)
        children = [span for found in spans.values() for span in found]
        assert {span.parent_span_id for span in children} == {request.span_id}
        assert {span.trace_id for span in children} == {request.trace_id}
        assert len({span.span_id for span in children}) == 4

    def test_attributes_tell_prediction_and_outcome(self, collector):
        """What was asked, predicted, chosen and what came of it can be read off the spans."""
        traced(collector.url, model="llama")
        spans = collector.spans()
        request = values(spans["tiertune.request"][0])
        assert request == {
            "tiertune.request.id": "r1",
            "gen_ai.request.model": "llama",
            "gen_ai.usage.input_tokens": 1300,
            "tiertune.chunks": 10,
            "tiertune.outcome": "lost",
        }
        assert values(spans["tiertune.lookup"][0]) == {
            "tiertune.chunks": 10,
            "tiertune.chunks.dram": 5,
            "tiertune.chunks.remote": 5,
            "tiertune.late": False,
        }
        assert values(spans["tiertune.gate"][0]) == {
            "tiertune.decision": "fetch",
            "tiertune.reason": "cheaper",
            "tiertune.tier": "remote",
            "tiertune.cut": 10,
            "tiertune.backlog_seconds": 0.04,
            "tiertune.predicted.fetch_seconds": 0.2,
            "tiertune.predicted.recompute_seconds": 0.9,
        }
        loads = {values(span)["tiertune.tier"]: values(span) for span in spans["tiertune.load"]}
        assert loads["remote"] == {
            "tiertune.tier": "remote",
            "tiertune.chunks": 5,
            "tiertune.tokens": 640,
            "tiertune.bytes": 5000,
            "tiertune.outcome": "lost",
            "tiertune.predicted.fetch_seconds": 0.05,
            "tiertune.predicted.recompute_seconds": 0.3,
            "tiertune.actual_seconds": 0.5,
        }

    def test_without_a_trace_context_a_request_is_a_root(self, collector):
        """Two requests without headers are two traces."""
        traced(collector.url, fetched("a", None), fetched("b", {}))
        roots = collector.spans()["tiertune.request"]
        assert [span.parent_span_id for span in roots] == [b"", b""]
        assert len({span.trace_id for span in roots}) == 2

    def test_an_unsampled_caller_is_respected(self, collector):
        """Of a request whose caller is not sampled nothing is sent."""
        traced(collector.url, fetched(headers=UNSAMPLED))
        assert collector.posts == []

    def test_requests_without_a_caller_are_sampled_as_the_environment_says(self, collector, monkeypatch):
        """OTEL_TRACES_SAMPLER decides over roots alone."""
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        traced(collector.url, fetched("root", None), fetched("child", SAMPLED))
        (request,) = collector.spans()["tiertune.request"]
        assert values(request)["tiertune.request.id"] == "child"

    def test_the_resource_names_the_engine(self, collector):
        """Attributes given at the start stand in the resource."""
        traced(collector.url, attributes={"tiertune.stage": "prefill"})
        assert collector.resource().items() >= {"service.name": "tiertune", "tiertune.stage": "prefill"}.items()

    def test_the_environment_names_the_service(self, collector, monkeypatch):
        """OTEL_SERVICE_NAME, the usual way to name a service, wins."""
        monkeypatch.setenv("OTEL_SERVICE_NAME", "from-environment")
        traced(collector.url)
        assert collector.resource()["service.name"] == "from-environment"

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    def test_a_collector_on_this_host_is_not_asked_through_a_proxy(self, collector, monkeypatch, host):
        """Containers get that of their user: its loopback is another one, and all spans were lost."""
        monkeypatch.delenv("NO_PROXY")
        monkeypatch.delenv("no_proxy", raising=False)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        traced(collector.url.replace("127.0.0.1", host))
        assert collector.spans()

    def test_a_failed_load_is_an_error_in_its_span_alone(self, collector):
        """Status and error.type are on the load; the request went on and has no error."""
        traced(collector.url, fetched(reports=[report("remote", "late")]))
        spans = collector.spans()
        (load,), (request,) = spans["tiertune.load"], spans["tiertune.request"]
        assert (load.status.code, values(load)["error.type"]) == (2, "late")
        assert (request.status.code, values(request)["tiertune.outcome"]) == (0, "late")


class TestSending:
    """While requests go on."""

    def test_spans_are_sent_before_the_tracer_ends(self, collector, monkeypatch):
        """Nobody waits for the engine's end to see them."""
        monkeypatch.setattr(tracer_module, "EVERY_S", 0.01)
        tracing = open_tracing(collector.url, **OPENED)
        for count in (1, 2):
            tracing.ended(fetched(str(count)))
            eventually(lambda count=count: len(collector.spans().get("tiertune.request", ())) == count)
        tracing.close()


class TestBounds:
    """Nothing grows, nobody waits."""

    @pytest.mark.usefixtures("patient")
    def test_what_there_is_no_room_for_is_dropped(self, monkeypatch):
        """The scheduler never waits for room: the oldest go."""
        monkeypatch.setattr(tracer_module, "MOST", 3)
        monkeypatch.setattr(tracer_module, "EVERY_S", 60)
        sink = Sink()
        recorder = Tracing(sink)
        for number in range(5):
            recorder.ended(fetched(str(number)))
        recorder.close()
        assert [trace.request for trace in sink.traces] == ["2", "3", "4"]

    def test_a_name_of_megabytes_does_not_wait_with_its_request(self):
        """An engine's caller may choose it, and thousands of requests wait to be posted."""
        tracing = Tracing(Sink())
        trace = tracing.arrived("x" * (1 << 20), SAMPLED, 1300, 10)
        tracing.close()
        assert len(trace.request) == 32

    @pytest.mark.usefixtures("patient")
    def test_a_sink_that_raises_costs_a_request_alone(self, caplog):
        """The thread lives on, and the reason is logged."""

        class Raising(Sink):
            def make(self, trace):
                if trace.request == "bad":
                    raise ValueError("no good")
                super().make(trace)

        sink = Raising()
        recorder = Tracing(sink)
        for request in ("bad", "good"):
            recorder.ended(fetched(request))
        recorder.close()
        assert ([trace.request for trace in sink.traces], sink.closed) == (["good"], True)
        assert "no good" in caplog.text

    @pytest.mark.parametrize("status", [400, 503])
    def test_a_collector_that_refuses_loses_spans_and_no_more(self, monkeypatch, status):
        """HTTP errors: what comes when it takes spans again is there. Closing takes at most two seconds."""
        monkeypatch.setattr(tracer_module, "EVERY_S", 0.01)
        collector = Collector(status)
        tracing = open_tracing(collector.url, **OPENED)
        tracing.ended(fetched("refused"))
        eventually(lambda: "tiertune.request" in collector.spans(refused=True))
        collector.status = 200
        tracing.ended(fetched("taken"))
        eventually(lambda: "tiertune.request" in collector.spans())
        tracing.close()
        assert [values(span)["tiertune.request.id"] for span in collector.spans()["tiertune.request"]] == ["taken"]
        collector.status = status
        assert at_best(lambda: lost(collector.url), 3)
        collector.close()

    def test_a_collector_that_is_away_is_logged_seldom(self, clock, caplog, monkeypatch):
        """Whichever engine of the process says it: each post would be a line."""
        monkeypatch.setattr(otlp.SELDOM, "clock", clock)
        monkeypatch.setattr(otlp.SELDOM, "quiet_until_s", clock.now)
        collector, logged = Collector(400), []
        for passed_s in (0, otlp.LOG_EVERY_S - 1, 1, 1):
            clock.now += passed_s
            lost(collector.url)
            logged.append(caplog.text.count("Failed to export"))
        collector.close()
        assert (len(collector.refused), logged) == (4, [1, 1, 2, 2])

    def test_a_collector_that_is_not_there_loses_spans_and_no_more(self):
        """A closed port."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        assert at_best(lambda: lost(f"http://127.0.0.1:{port}"), 3)

    def test_a_collector_that_never_answers_holds_nobody(self):
        """It accepts and is silent; recording goes on at once, and closing gives up."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert at_best(lambda: lost(f"http://127.0.0.1:{server.getsockname()[1]}"), 3)

    def test_what_is_left_when_the_engine_has_ended_is_dropped(self, monkeypatch):
        """No thread goes on posting it, a batch after the other, where nobody answers."""
        monkeypatch.setattr(tracer_module, "CLOSE_S", 0.0)
        with socket.create_server(("127.0.0.1", 0)) as server:
            tracing = open_tracing(f"http://127.0.0.1:{server.getsockname()[1]}", **OPENED)
            for number in range(200):
                tracing.ended(fetched(str(number)))
            tracing.close()
            tracing._thread.join(10)  # its batches would take half a minute
            assert not tracing._thread.is_alive()


class TestHeaders:
    """They come from outside."""

    def test_a_whole_context_is_the_parent(self):
        """Trace and span of the caller are taken over."""
        context = get_current_span(parent(SAMPLED)).get_span_context()
        assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (TRACE, CALLER)

    @given(
        st.none()
        | st.text()
        | st.dictionaries(
            st.sampled_from(["traceparent", "tracestate", "Traceparent"]),
            st.none()
            | st.integers()
            | st.binary()
            | st.lists(st.text())
            | st.text()
            | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.*", fullmatch=True)
            | st.integers(500, 5000).map(lambda n: "00-" + "a" * n),
        )
    )
    def test_garbage_is_no_context(self, headers):
        """Whatever comes raises nothing, and a parent is one that the header spelled out."""
        context = get_current_span(parent(headers)).get_span_context()
        if context.is_valid:
            assert f"-{context.trace_id:032x}-{context.span_id:016x}-" in headers["traceparent"]

    def test_a_request_with_garbage_is_traced_as_a_root(self, collector):
        """It is not lost for what its caller sent."""
        traced(collector.url, fetched(headers={"traceparent": "00-zz"}))
        assert collector.spans()["tiertune.request"][0].parent_span_id == b""


class TestOff:
    """The default."""

    def test_without_an_endpoint_there_is_no_tracer(self):
        """No thread, nothing remembered."""
        threads = set(threading.enumerate())
        tracing = open_tracing("", **OPENED)
        tracing.ended(tracing.arrived("r1", SAMPLED, 1300, 10))
        tracing.close()
        assert not tracing._ended
        assert {*threading.enumerate()} - threads == set()

    def test_without_opentelemetry_it_says_so_and_stays_off(self, monkeypatch, caplog):
        """A missing package is a warning that names the extra, not a dead engine."""
        monkeypatch.setitem(__import__("sys").modules, "tiertune_connector.tracing.otlp", None)
        assert open_tracing("http://127.0.0.1:4318", **OPENED).sink is None
        assert "tiertune[otel]" in caplog.text

    @pytest.mark.parametrize(
        ("endpoint", "url"),
        [
            ("http://h:4318", "http://h:4318/v1/traces"),
            ("http://h:4318/", "http://h:4318/v1/traces"),
            ("http://h:4318/v1/traces", "http://h:4318/v1/traces"),
            ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces"),
        ],
    )
    def test_an_endpoint_may_leave_out_the_path(self, endpoint, url):
        """As OpenTelemetry's own base endpoint does."""
        assert traces_url(endpoint) == url
