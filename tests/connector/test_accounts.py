"""What the store counts of gates: seconds saved, lost, predicted."""

import pytest

from tiertune_connector.accounts import Accounts
from tiertune_connector.counters import Counters
from tiertune_connector.serve.protocol import TierReport
from tiertune_connector.tiers.dram import DramTier


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def accounts(counters, clock):
    return Accounts(counters, "host-a", DramTier(segment_bytes=4096, clock=clock))


def told(counters: Counters) -> dict[str, float]:
    """The value of each counter of the remote; of a histogram its count."""
    _, metrics = counters.snapshot()
    return {
        "/".join([name.removesuffix("_total"), *row[1 : len(table["labels"])]]): row[-1]
        for name, table in metrics.items()
        for row in table["rows"]
        if row[0] == "remote"
    }


def report(outcome: str, *, fetched: int = 48, fetch=0.1, recompute=0.5, actual=0.2, reason="cheaper") -> TierReport:
    return TierReport("remote", 3, 48, fetched, reason, fetch, recompute, actual, outcome)


@pytest.mark.parametrize(
    ("what", "saved", "lost"),
    [
        (report("won"), 0.3, None),
        (report("lost", actual=0.9), None, 0.4),
        (report("late"), None, 0.2),
        (report("failed", actual=0.05), None, 0.05),
        (report("won", recompute=None), None, 0.2),
        (report("skipped", fetched=0, actual=None), None, None),
    ],
)  # fmt: skip
def test_seconds_saved_and_lost(accounts, counters, what, saved, lost):
    """Predicted recompute less what the fetch took; a fetch that came to nothing cost all its time."""
    accounts.gate(what, chunk_bytes=100)
    row = told(counters)
    assert row.get("saved_seconds", None) == (pytest.approx(saved) if saved else None)
    assert row.get("lost_seconds", None) == (pytest.approx(lost) if lost else None)
    assert row[f"gate_outcomes/{what.outcome}"] == 1


def test_candidates_are_counted_whatever_was_decided(accounts, counters):
    """So that what a tier could give is known while its fetch is refused."""
    accounts.gate(report("won"), chunk_bytes=100)
    accounts.gate(report("skipped", fetched=0, actual=None, reason="off"), chunk_bytes=100)
    row = told(counters)
    assert (row["gate_requests/fetch/cheaper"], row["gate_requests/recompute/off"]) == (1, 1)
    assert (row["gate_candidate_requests"], row["gate_candidate_tokens"], row["gate_candidate_bytes"]) == (2, 96, 600)
    assert (row["gate_candidate_seconds/fetch"], row["gate_candidate_seconds/recompute"]) == (pytest.approx(0.2), 1.0)
    assert (row["gate_predicted_seconds/fetch"], row["gate_actual_seconds/fetch"]) == (2, 1)
    assert row["gate_fetched_tokens"] == 48


def test_counters_never_fall(accounts, counters):
    """A prediction below nothing is counted as nothing."""
    accounts.gate(report("won", recompute=-0.5, fetch=-0.1), chunk_bytes=100)
    assert all(value >= 0 for value in told(counters).values())
