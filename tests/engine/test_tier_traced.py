"""What becomes of the spans of requests whose lookup, or whose engine, ends before them."""

import pytest
from vllm.config import WeightTransferConfig

from connector.traces import Sink
from engine.scheduler import tokens, wait_until
from tiertune_connector.protocol.messages import FirstToken, Report
from tiertune_connector.tracing import Tracing


@pytest.fixture
def trained(engines):
    """Its weights are exchanged while it runs."""
    return engines(arguments={"weight_transfer_config": WeightTransferConfig()})


@pytest.fixture
def loading(trained):
    """A request whose four chunks are on their way, and where traces end."""
    sink, prompt = Sink(), tokens(300)
    trained.tier.telemetry.tracing = Tracing(sink)
    trained.computes("a", prompt)
    trained.manager.primary_tier.reset_cache()
    request = trained.request("b", prompt)
    trained.begin_load(request)
    return request, sink


def lookup(sink):
    """What the request's trace tells of its lookup and of its decision."""
    wait_until(lambda: any(trace.request == "b" for trace in sink.traces))
    (trace,) = (trace for trace in sink.traces if trace.request == "b")
    assert trace.arrived_at < trace.looked_up_at <= trace.decided_at
    return trace.tiers, trace.decision.cut, trace.reports


def test_what_came_of_a_lookup_before_an_exchange_of_weights_is_traced(trained, loading):
    """The request goes on without the store; it waited for the answer all the same."""
    request, sink = loading
    trained.connector.reset_cache()
    assert trained.matched(request) == 0
    trained.done(request)
    assert lookup(sink) == (["dram"] * 4, 4, ())


def test_an_engine_that_ends_traces_its_requests_and_reports_nothing_of_them(trained, loading, monkeypatch):
    """They had no first token, and what was on its way was not skipped."""
    _, sink = loading
    told, tell = [], trained.tier._client.tell
    monkeypatch.setattr(trained.tier._client, "tell", lambda *message: told.append(message[0]) or tell(*message))
    trained.tier.shutdown()
    assert lookup(sink) == (["dram"] * 4, 4, ())
    assert [message for message in told if isinstance(message, Report | FirstToken)] == []
