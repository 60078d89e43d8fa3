"""From decisions and loads to reports: whose seconds are whose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.cost import Candidate, GateDecision, Reason
from tiertune_connector.protocol.reporting import gained_s, tier_reports


def decision(recompute_s=0.5, **fetched):
    candidates = tuple(
        Candidate(tier, max(chunks, 1), chunks, Reason.CHEAPER if chunks else Reason.SLOWER, 0.1, recompute_s)
        for tier, chunks in fetched.items()
    )
    return GateDecision(sum(fetched.values()), next(iter(fetched)), Reason.CHEAPER, 0.1, recompute_s, candidates)


def told(*args, **fields):
    reports = tier_reports(*args, chunk_tokens=64, **fields)
    return {report.tier: (report.outcome, report.actual_s and pytest.approx(report.actual_s)) for report in reports}


def test_tokens_are_chunks_times_their_size():
    """What was offered and what was fetched, in tokens; the reason as text."""
    offered = Candidate("remote", 5, 3, Reason.CHEAPER, 0.1, 0.5)
    (report,) = tier_reports(GateDecision(3, "remote", Reason.CHEAPER, 0.1, 0.5, (offered,)), chunk_tokens=64)
    assert (report.chunks, report.tokens, report.fetched_tokens, report.reason) == (5, 320, 192, "cheaper")


def test_what_is_not_fetched_is_skipped():
    """Neither a decision against fetching nor a tier left alone has an actual time."""
    assert told(decision(remote=0)) == {"remote": ("skipped", None)}
    assert told(decision(dram=3, remote=0), actual_s=0.2)["remote"] == ("skipped", None)


def test_a_fetch_is_won_or_lost_by_what_was_waited():
    """Against the recompute predicted of the same chunks."""
    assert told(decision(dram=3), actual_s=0.2) == {"dram": ("won", 0.2)}
    assert told(decision(dram=3), actual_s=0.7) == {"dram": ("lost", 0.7)}


@pytest.mark.parametrize("failure", ["late", "failed"])
def test_a_fetch_that_came_to_nothing_says_so(failure):
    """Of every tier fetched from, also where the recompute's cost is unknown."""
    assert told(decision(dram=3, remote=2), actual_s=0.2, failure=failure)["remote"][0] == failure
    assert told(decision(recompute_s=None, dram=3), actual_s=0.2, failure=failure) == {"dram": (failure, 0.2)}


@pytest.mark.parametrize(("failure", "gained"), [("", 0.5 - 0.8 / 4), ("late", -0.8 / 4)])
def test_others_on_the_engine_make_waiting_count_less(failure, gained):
    """What a request waits, it alone waits; what it takes off its engine, three behind it wait less."""
    offered = Candidate("remote", 3, 3, Reason.CHEAPER, 0.1, 0.5, prefills=3)
    told = GateDecision(3, "remote", Reason.CHEAPER, 0.1, 0.5, (offered,))
    (report,) = tier_reports(told, chunk_tokens=64, actual_s=0.8, failure=failure)
    assert report.prefills == 3
    assert gained_s(report) == pytest.approx(gained)


def test_without_a_prediction_there_is_no_judgement():
    """An engine that does not know its prefill's cost can neither win nor lose."""
    assert told(decision(recompute_s=None, dram=3), actual_s=0.2) == {"dram": ("unknown", 0.2)}


def test_the_copy_is_drams():
    """A slower tier's seconds are its own; what the wait was beyond them is the copy from DRAM."""
    assert told(decision(dram=3, remote=2), actual_s=0.5, seconds={"remote": 0.4}) == {
        "dram": ("won", 0.1),
        "remote": ("won", 0.4),
    }


@pytest.mark.parametrize(
    ("seconds", "beside", "shared"),
    [({}, False, False), ({}, True, True), ({"disk": 0.4}, False, True), ({"remote": 0.0}, False, False)],
)
def test_seconds_that_are_not_a_tiers_alone_say_so(seconds, beside, shared):
    """Other loads were copied meanwhile, or what DRAM had at the lookup had to be fetched from a slower tier again."""
    reports = tier_reports(decision(dram=3, remote=0), chunk_tokens=64, actual_s=0.5, seconds=seconds, shared=beside)
    assert [(report.tier, report.shared) for report in reports] == [("dram", shared), ("remote", False)]


def test_without_dram_the_last_tier_bears_the_copy():
    """All that was waited is somebody's."""
    assert told(decision(disk=1, remote=2), actual_s=0.5, seconds={"disk": 0.1, "remote": 0.2}) == {
        "disk": ("won", 0.1),
        "remote": ("lost", 0.5),
    }
    assert told(decision(remote=2), actual_s=0.4) == {"remote": ("won", 0.4)}


def test_a_load_that_began_before_the_wait_costs_what_was_waited():
    """With prefetch a tier may have worked for longer than the request waited."""
    assert told(decision(remote=2), actual_s=0.05, seconds={"remote": 3.0}) == {"remote": ("won", 0.05)}


@given(
    chunks=st.dictionaries(st.sampled_from(["dram", "disk", "remote"]), st.integers(0, 9), min_size=1),
    actual_s=st.floats(0, 10),
    seconds=st.dictionaries(st.sampled_from(["disk", "remote"]), st.floats(0, 20)),
)
def test_nobody_waited_longer_than_the_request(chunks, actual_s, seconds):
    """Each tier's seconds lie within the wait, and together they cover it."""
    reports = tier_reports(decision(**chunks), chunk_tokens=64, actual_s=actual_s, seconds=seconds)
    took = [report.actual_s for report in reports if report.fetched_tokens]
    assert all(0 <= part <= actual_s * 1.000001 for part in took)
    assert not took or sum(took) >= actual_s * 0.999999


def behind(backlog_s):
    """A fetch predicted to take 1 s, of chunks whose recompute takes 0.5 s, behind a backlog."""
    offered = Candidate("remote", 4, 4, Reason.CHEAPER, 1.0, 0.5 + min(backlog_s, 1.0), backlog_s)
    return GateDecision(4, "remote", Reason.CHEAPER, 1.0, offered.recompute_s, (offered,), backlog_s)


@pytest.mark.parametrize(
    ("actual_s", "failure", "gained"),
    [(1.0, "", 0.5), (1.8, "", 0.5), (3.0, "", -0.5), (1.5, "late", 0.0), (3.0, "late", -1.0)],
)
def test_what_is_waited_anyway_is_not_lost(actual_s, failure, gained):
    """Behind two seconds of other work only what a fetch took beyond them counts against it."""
    (report,) = tier_reports(behind(2.0), chunk_tokens=64, actual_s=actual_s, failure=failure)
    assert gained_s(report) == pytest.approx(gained)
    assert report.outcome == (failure or ("won" if gained > 0 else "lost"))
