"""Spans of requests: when they begin and end, and what became of the request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.traces import CHUNKS, FETCH, Sink, fetched_request, report
from tiertune_connector.cost import Candidate, GateDecision, Reason
from tiertune_connector.tracing import RequestTrace, Tracing, describe

RECOMPUTE = GateDecision(2, "remote", Reason.SLOWER, 0.9, 0.2, (Candidate("remote", 5, 0, Reason.SLOWER, 0.9, 0.2),))
SECOND = 10**9


class Clock:
    """Nanoseconds; every reading is a second later."""

    def __init__(self):
        self.now = 100 * SECOND

    def __call__(self):
        self.now += SECOND
        return self.now


@pytest.mark.usefixtures("patient")
class TestTimes:
    """Of spans, from what was written down."""

    @staticmethod
    def spans(act=fetched_request):
        sink = Sink()
        recorder = Tracing(sink, clock=Clock())
        act(recorder)
        recorder.close()
        (trace,) = sink.traces
        return describe(trace, **CHUNKS)

    def test_children_lie_within_the_request(self):
        """The request's span begins with its arrival and ends with its last child, not with its last token."""
        request, *children = self.spans()
        assert (request.start_ns, request.end_ns) == (101 * SECOND, 104 * SECOND)
        assert all(request.start_ns <= child.start_ns <= child.end_ns <= request.end_ns for child in children)

    def test_a_request_that_nobody_was_asked_about_waits_for_nothing(self):
        """Its tokens are not what its span lasts for."""

        def computed(tracing):
            tracing.arrived("r", None, 10, 0)
            tracing.finished("r")

        (request,) = self.spans(computed)
        assert (request.start_ns, request.end_ns) == (101 * SECOND, 101 * SECOND)

    def test_a_lookup_ends_with_its_answer_and_not_when_it_is_noticed(self):
        """A step may lie between, in which it was decided: that is what the gate's span is for."""

        def busy(tracing):
            tracing.arrived("r", None, 1300, 10)
            tracing.decided("r", RECOMPUTE)
            tracing.looked_up("r", ["dram"], ago_s=1.75)
            tracing.finished("r")

        _, lookup, gate = self.spans(busy)
        assert (lookup.start_ns, lookup.end_ns) == (101 * SECOND, 101.25 * SECOND)
        assert (gate.start_ns, gate.end_ns) == (101.25 * SECOND, 102 * SECOND)

    def test_where_no_tier_offered_anything_none_is_named_and_nothing_was_predicted(self):
        """Zero seconds to recompute would be a lie about the tokens that were recomputed."""

        def missed(tracing):
            tracing.arrived("r", None, 1300, 10)
            tracing.looked_up("r", [])
            tracing.decided("r", GateDecision(0, "", Reason.NO_HIT, 0.0, 0.0))
            tracing.finished("r")

        (gate,) = (span for span in self.spans(missed) if span.name == "tiertune.gate")
        assert set(gate.attributes) == {f"tiertune.{name}" for name in ("decision", "reason", "cut", "backlog_seconds")}

    def test_a_load_ends_when_it_ended_and_not_when_it_is_noticed(self):
        """It lies where it was, and the request has waited no longer for it."""

        def busy(tracing):
            tracing.arrived("r", None, 1300, 10)
            tracing.looked_up("r", ["dram"] * 10)
            tracing.decided("r", FETCH)
            tracing.loaded("r", [report("dram", "won", actual_s=0.25)], ago_s=0.5)
            tracing.finished("r")

        request, *_, load = self.spans(busy)
        assert (load.start_ns, load.end_ns) == (103.25 * SECOND, 103.5 * SECOND)
        assert request.end_ns == 103.5 * SECOND

    def test_an_answer_that_comes_too_late_changes_nothing(self):
        """The request has gone on without it."""

        def late(tracing):
            tracing.arrived("r", None, 1300, 10)
            tracing.looked_up("r", (), late=True)
            tracing.looked_up("r", ["dram"] * 10)
            tracing.finished("r")

        request, lookup = self.spans(late)
        assert request.attributes["tiertune.outcome"] == "late"
        assert (lookup.failure, lookup.end_ns) == ("late", 102 * SECOND)
        assert "tiertune.chunks.dram" not in lookup.attributes

    def test_a_load_lasts_as_long_as_it_took(self):
        """The remote's chunks come into DRAM first; the copy out of DRAM follows and ends the load."""
        dram, remote = (span for span in self.spans() if span.name == "tiertune.load")
        assert (dram.start_ns, dram.end_ns) == (103.75 * SECOND, 104 * SECOND)
        assert (remote.start_ns, remote.end_ns) == (103.25 * SECOND, 103.75 * SECOND)

    @given(
        times=st.lists(st.integers(0, 2**63 - 1), min_size=4, max_size=4),
        actual_s=st.none() | st.floats(0, 1e9),
        tiers=st.lists(st.sampled_from(["dram", "disk", "remote"]), max_size=4),
    )
    def test_no_span_ends_before_it_starts(self, times, actual_s, tiers):
        """Whatever the wall clock did."""
        arrived, looked_up, decided, loaded = times
        loads = [(loaded, [report(tier, "won", actual_s=actual_s) for tier in tiers])]
        trace = RequestTrace("r", None, 1, 1, arrived, looked_up, tiers, False, "", decided, FETCH, loads)
        assert all(span.start_ns <= span.end_ns for span in describe(trace, **CHUNKS))


class TestOutcomes:
    """Of requests."""

    @staticmethod
    def attributes(*, decision=FETCH, late=False, reports=()):
        loads = [(4, [one]) for one in reports]
        trace = RequestTrace("r", None, 1300, 10, 1, 2, [], late, "", 3, decision, loads)
        return describe(trace, **CHUNKS)[0].attributes

    @pytest.mark.parametrize(
        ("outcomes", "worst"),
        [(["won"], "won"), (["won", "lost"], "lost"), (["won", "failed", "late"], "failed"), (["unknown"], "unknown")],
    )
    def test_the_worst_of_its_loads_is_a_requests_outcome(self, outcomes, worst):
        """One lost fetch makes the request one to look at."""
        reports = [report("dram", outcome) for outcome in outcomes]
        assert self.attributes(reports=reports)["tiertune.outcome"] == worst

    def test_what_was_not_fetched_is_skipped(self):
        """A tier that the gate refused has no load."""
        refused = report("remote", "skipped", fetched=0, actual_s=None)
        assert self.attributes(decision=RECOMPUTE, reports=[refused])["tiertune.outcome"] == "skipped"

    def test_a_lookup_without_an_answer_is_late(self):
        """Nothing was decided."""
        assert self.attributes(decision=None, late=True)["tiertune.outcome"] == "late"

    def test_a_fetch_that_nothing_came_of_is_unknown(self):
        """The request ended before its load did."""
        assert self.attributes()["tiertune.outcome"] == "unknown"
