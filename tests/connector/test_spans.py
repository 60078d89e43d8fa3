"""Spans of requests: when they begin and end, and what became of the request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.traces import CHUNKS, FETCH, SECOND, fetched, report
from tiertune_connector.cost import Candidate, GateDecision, Reason
from tiertune_connector.tracing import RequestTrace, describe

RECOMPUTE = GateDecision(2, "remote", Reason.SLOWER, 0.9, 0.2, (Candidate("remote", 5, 0, Reason.SLOWER, 0.9, 0.2),))
NOT_ASKED = {"looked_up_at": 0.0, "decided_at": 0.0, "decision": None, "loaded_at": 0.0, "reports": ()}


def spans(**told):
    return describe(fetched(**told), **CHUNKS)


class TestTimes:
    """Of spans, from what was written down."""

    def test_children_lie_within_the_request(self):
        """The request's span begins with its arrival and ends with its last child, not with its last token."""
        request, *children = spans()
        assert (request.start_ns, request.end_ns) == (101 * SECOND, 104 * SECOND)
        assert all(request.start_ns <= child.start_ns <= child.end_ns <= request.end_ns for child in children)
        assert max(child.end_ns for child in children) == request.end_ns

    def test_a_request_that_nobody_was_asked_about_waits_for_nothing(self):
        """Its tokens are not what its span lasts for."""
        (request,) = spans(**NOT_ASKED)
        assert (request.start_ns, request.end_ns) == (101 * SECOND, 101 * SECOND)

    def test_where_no_tier_offered_anything_none_is_named_and_nothing_was_predicted(self):
        """Zero seconds to recompute would be a lie about the tokens that were recomputed."""
        missed = spans(tiers=[], decision=GateDecision(0, "", Reason.NO_HIT, 0.0, 0.0), loaded_at=0.0, reports=())
        (gate,) = (span for span in missed if span.name == "tiertune.gate")
        assert set(gate.attributes) == {f"tiertune.{name}" for name in ("decision", "reason", "cut", "backlog_seconds")}
        assert (gate.start_ns, gate.end_ns) == (102 * SECOND, 103 * SECOND)

    def test_an_answer_behind_a_late_lookup_is_left_out(self):
        """It may come in the moment in which the scheduler gives it up; the request goes on without it."""
        _, lookup = spans(tiers=["dram"], late=True, nothing="unreachable", decision=None, reports=())
        assert lookup.attributes == {"tiertune.chunks": 10, "tiertune.late": True, "error.type": "late"}

    def test_a_load_lasts_as_long_as_it_took(self):
        """The remote's chunks come into DRAM first; the copy out of DRAM follows and ends the load."""
        dram, remote = (span for span in spans() if span.name == "tiertune.load")
        assert (dram.start_ns, dram.end_ns) == (103.75 * SECOND, 104 * SECOND)
        assert (remote.start_ns, remote.end_ns) == (103.25 * SECOND, 103.75 * SECOND)

    @given(
        times=st.lists(st.floats(0, 1e9), min_size=4, max_size=4),
        actual_s=st.none() | st.floats(0, 1e9),
        tiers=st.lists(st.sampled_from(["dram", "disk", "remote"]), max_size=4),
    )
    def test_no_span_ends_before_it_starts(self, times, actual_s, tiers):
        """Whatever the clocks did."""
        arrived, looked_up, decided, loaded = times
        reports = [report(tier, "won", actual_s=actual_s) for tier in tiers]
        later = looked_up, tiers, False, "", decided, FETCH, loaded, reports
        trace = RequestTrace("r", None, 1, 1, arrived, 101 * SECOND, *later)
        assert all(span.start_ns <= span.end_ns for span in describe(trace, **CHUNKS))


class TestOutcomes:
    """Of requests."""

    @staticmethod
    def attributes(*, decision=FETCH, late=False, reports=()):
        return spans(tiers=[], late=late, decision=decision, reports=reports)[0].attributes

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
