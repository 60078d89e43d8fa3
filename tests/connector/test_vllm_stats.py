"""The engine's own counters: what is counted, and that what vLLM takes adds up to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.cost import Reason
from tiertune_connector.protocol.messages import TierReport
from tiertune_connector.vllm.stats import CONNECTED, METRICS, NONE, OTHER, RESULTS, TIERS, EngineStats


def report(tier="dram", outcome="won", *, fetched=2, actual_s=0.1, recompute_s=0.4, reason="cheaper"):
    return TierReport(tier, 2, 256, fetched * 128, reason, 0.1, recompute_s, actual_s, outcome)


def taken(stats):
    """Without the gauge, which comes with everything."""
    counts = stats.take(connected=True)
    assert counts.pop(CONNECTED, 1) == 1
    return counts


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
    assert stats.take(connected=True) == {}


def test_a_gauge_comes_when_it_changes_and_with_everything_else(stats):
    """So whoever lost one taking has it again with the next."""
    assert stats.take(connected=True) == {CONNECTED: 1}
    assert stats.take(connected=True) == {}
    stats.stored("present")
    assert stats.take(connected=True) == {("engine_stored_chunks_total", ("present",)): 1, CONNECTED: 1}
    assert stats.take(connected=False) == {CONNECTED: 0}


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf")])
def test_what_is_no_increase_is_not_counted(stats, seconds):
    """A counter that is told to fall ends vLLM's API server."""
    stats.gated([report(recompute_s=0.1 + seconds)])
    assert not [name for name, _ in taken(stats) if name.endswith("seconds_total")]
    stats.stored("stored", -1)
    assert taken(stats) == {}


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
    st.tuples(st.just("take"), st.booleans()),
)


@given(st.lists(events, max_size=40))
def test_what_is_taken_adds_up(happened):
    """Whenever it is taken; every increase is positive, and every name and label count is declared."""
    often, once, sums = EngineStats(chunk_tokens=128), EngineStats(chunk_tokens=128), {}

    def take(stats, connected):
        for (name, labels), value in stats.take(connected=connected).items():
            metric = next(metric for metric in METRICS if metric.name == name)
            assert len(labels) == len(metric.labels)
            if metric.kind == "counter":
                assert value > 0
                sums[name, labels] = sums.get((name, labels), 0) + value

    for name, *arguments in happened:
        if name == "take":
            take(often, *arguments)
        else:
            getattr(often, name)(*arguments)
            getattr(once, name)(*arguments)
    take(often, connected=True)
    assert sums == pytest.approx(taken(once))
