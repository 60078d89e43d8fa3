"""The engine's own counters: what is counted, and that what vLLM takes adds up to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.cost import Reason
from tiertune_connector.protocol.messages import TierReport
from tiertune_connector.vllm.stats import BY_NAME, NONE, OTHER, RESULTS, TIERS, EngineStats


def report(tier="dram", outcome="won", *, fetched=2, actual_s=0.1, recompute_s=0.4, reason="cheaper"):
    return TierReport(tier, 2, 256, fetched * 128, reason, 0.1, recompute_s, actual_s, outcome)


def taken(stats):
    return {(change.metric.name, change.labels): change.value for change in stats.take()}


@pytest.fixture
def stats():
    return EngineStats(chunk_tokens=128)


def test_a_lookup_counts_tokens_by_the_tier_that_has_them(stats):
    """What is in no tier is a miss of none of them."""
    stats.looked_up(["dram", "dram", "remote"], 5)
    assert taken(stats) == {
        ("engine_lookup_tokens_total", ("dram", "hit")): 256,
        ("engine_lookup_tokens_total", ("remote", "hit")): 128,
        ("engine_lookup_tokens_total", (NONE, "miss")): 256,
    }


def test_a_late_lookup_is_a_miss_and_late(stats):
    """Its tokens are asked for all the same."""
    stats.looked_up([], 2, late=True)
    assert taken(stats) == {
        ("engine_lookup_tokens_total", (NONE, "miss")): 256,
        ("engine_late_lookups_total", ()): 1,
    }


def test_a_fetch_counts_its_decision_its_outcome_and_its_gain(stats):
    """Won: predicted recompute seconds less the fetch's own."""
    stats.gated([report()])
    assert taken(stats) == {
        ("engine_gate_requests_total", ("dram", "fetch", "cheaper")): 1,
        ("engine_loads_total", ("dram", "won")): 1,
        ("engine_fetched_tokens_total", ("dram",)): 256,
        ("engine_load_seconds_total", ("dram",)): 0.1,
        ("engine_saved_seconds_total", ("dram",)): pytest.approx(0.3),
    }


def test_what_the_gate_refused_counts_as_no_load(stats):
    """The decision alone."""
    stats.gated([report(outcome="skipped", fetched=0, actual_s=None, reason="slower")])
    assert taken(stats) == {("engine_gate_requests_total", ("dram", "recompute", "slower")): 1}


def test_what_was_chosen_and_not_begun_counts_as_no_load(stats):
    """The request ended before, or staging had no room."""
    stats.gated([report(outcome="skipped", actual_s=None)])
    assert taken(stats) == {("engine_gate_requests_total", ("dram", "fetch", "cheaper")): 1}


def test_nothing_new_is_nothing_to_take(stats):
    """What was taken is not given again."""
    stats.stored("stored", 3)
    assert taken(stats) == {("engine_stored_chunks_total", ("stored",)): 3}
    assert stats.take() == []


def test_a_gauge_comes_when_it_changes_and_with_everything_else(stats):
    """So whoever lost one taking has it again with the next."""
    stats.connected(True)
    assert taken(stats) == {("engine_store_connected", ()): 1}
    stats.connected(True)
    assert stats.take() == []
    stats.stored("present")
    assert taken(stats) == {("engine_stored_chunks_total", ("present",)): 1, ("engine_store_connected", ()): 1}
    stats.connected(False)
    assert taken(stats) == {("engine_store_connected", ()): 0}


def test_totals_counted_elsewhere_become_increases(stats):
    """The tracer counts for itself."""
    for exported, dropped in ((3, 0), (5, 1)):
        stats.counted("engine_traces_total", ("exported",), exported)
        stats.counted("engine_traces_total", ("dropped",), dropped)
    assert taken(stats) == {("engine_traces_total", ("exported",)): 5, ("engine_traces_total", ("dropped",)): 1}
    stats.counted("engine_traces_total", ("exported",), 5)
    assert stats.take() == []


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_increase_is_not_counted(stats, seconds):
    """A counter that is told to fall ends vLLM's API server."""
    stats.counted("engine_telemetry_seconds_total", (), seconds)
    assert stats.take() == []


def test_labels_from_elsewhere_are_bounded(stats):
    """A store of a later version may know words that this engine does not."""
    stats.stored("some new reason")
    stats.gated([report(reason="some new reason")])
    stats.looked_up(["tape"], 1)
    assert taken(stats).keys() >= {
        ("engine_stored_chunks_total", (OTHER,)),
        ("engine_gate_requests_total", ("dram", "fetch", OTHER)),
        ("engine_lookup_tokens_total", (OTHER, "hit")),
    }


events = st.one_of(
    st.tuples(st.just("looked_up"), st.lists(st.sampled_from(TIERS), max_size=4), st.integers(0, 6)),
    st.tuples(
        st.just("gated"),
        st.lists(
            st.builds(
                report,
                tier=st.sampled_from(TIERS),
                outcome=st.sampled_from(["won", "lost", "late", "failed", "skipped", "unknown"]),
                fetched=st.integers(0, 2),
                actual_s=st.none() | st.floats(0, 1e9),
                recompute_s=st.none() | st.floats(-1e9, 1e9),
                reason=st.sampled_from([*Reason]),
            ),
            max_size=3,
        ),
    ),
    st.tuples(st.just("stored"), st.sampled_from(RESULTS), st.integers(0, 9)),
    st.tuples(st.just("connected"), st.booleans()),
    st.tuples(st.just("counted"), st.just("engine_telemetry_seconds_total"), st.just(()), st.floats(0, 1)),
    st.tuples(st.just("take")),
)


@given(st.lists(events, max_size=40))
def test_what_is_taken_adds_up_to_the_totals(happened):
    """Whenever it is taken; every increase is positive, and every name and label count is declared."""
    stats, sums = EngineStats(chunk_tokens=128), {}

    def take():
        for change in stats.take():
            assert BY_NAME[change.metric.name] is change.metric
            assert len(change.labels) == len(change.metric.labels)
            key, gauge = (change.metric.name, change.labels), change.metric.kind == "gauge"
            assert gauge or change.value > 0
            sums[key] = change.value + (0 if gauge else sums.get(key, 0))

    for name, *arguments in happened:
        take() if name == "take" else getattr(stats, name)(*arguments)
    take()
    assert sums == pytest.approx(stats.totals)
