"""What the store counts of gates: seconds saved, lost, predicted."""

import pytest

from connector.stores import counted, running
from tiertune_connector.catalogue import BY_NAME, OTHER
from tiertune_connector.chunk import NOBODY
from tiertune_connector.counters import Counters
from tiertune_connector.protocol.messages import StepReport, Steps, TierReport
from tiertune_connector.protocol.reporting import recomputed
from tiertune_connector.sessions.session import Session
from tiertune_connector.store.accounts import STAGES, Accounts, count_gate
from tiertune_connector.tiers.base import Evicted
from tiertune_connector.tiers.dram import DramTier


@pytest.fixture
def accounts(counters, clock):
    return Accounts(counters, "host-a", DramTier(segment_bytes=4096, clock=clock), lambda _: "")


def told(counters: Counters) -> dict[str, float]:
    """The value of each counter of the remote; of a histogram its count."""
    _, metrics = counters.snapshot()
    return {
        "/".join([name.removesuffix("_total"), *row[1 : len(table["labels"])]]): row[-1]
        for name, table in metrics.items()
        for row in table["rows"]
        if row[0] == "remote"
    }


def report(
    outcome: str, *, fetched: int = 48, fetch=0.1, recompute=0.5, actual=0.2, reason="cheaper", vain=0
) -> TierReport:
    return TierReport("remote", 3, 48, fetched, reason, fetch, recompute, actual, outcome, vain_tokens=vain)


@pytest.mark.parametrize(
    ("what", "saved", "lost"),
    [
        (report("won"), 0.3, None),
        (report("lost", actual=0.9), None, 0.4),
        (report("late", vain=48), None, 0.2),
        (report("failed", actual=0.05, vain=48), None, 0.05),
        (report("late", vain=16), 0.5 * 2 / 3 - 0.2, None),
        (report("failed", actual=0.4, vain=32), None, 0.4 - 0.5 / 3),
        (report("failed", recompute=None, vain=16), None, 0.2),
        (report("won", recompute=None), None, 0.2),
        (report("unknown"), None, None),
        (report("skipped", fetched=0, actual=None), None, None),
    ],
)  # fmt: skip
def test_seconds_saved_and_lost(accounts, counters, what, saved, lost):
    """Predicted recompute of what came, less what the fetch took; one that came to nothing cost all its time."""
    count_gate(accounts.counters, what, chunk_bytes=100)
    row = told(counters)
    assert row.get("saved_seconds", None) == (pytest.approx(saved) if saved else None)
    assert row.get("lost_seconds", None) == (pytest.approx(lost) if lost else None)
    assert row[f"gate_outcomes/{what.outcome}"] == 1


@pytest.mark.parametrize(
    ("what", "tokens"),
    [
        (report("won"), 0),
        (report("lost", fetched=32), 16),
        (report("late", vain=48), 48),
        (report("failed", vain=32), 32),
        (report("late", vain=0), 0),
        (report("skipped", fetched=0, actual=None), 48),
        (report("skipped", actual=None, vain=48), 48),
    ],
)  # fmt: skip
def test_what_was_there_and_computed_all_the_same(what, tokens):
    """What was not fetched, or fetched in vain: a load that is late keeps what had come."""
    assert recomputed(what) == tokens


def test_candidates_are_counted_whatever_was_decided(accounts, counters):
    """So that what a tier could give is known while its fetch is refused."""
    count_gate(accounts.counters, report("won"), chunk_bytes=100)
    count_gate(accounts.counters, report("skipped", fetched=0, actual=None, reason="off"), chunk_bytes=100)
    row = told(counters)
    count_gate(accounts.counters, report("skipped", actual=None), chunk_bytes=100)
    assert told(counters)["gate_fetched_tokens"] == row["gate_fetched_tokens"], "it was chosen, and not begun"
    assert (row["gate_requests/fetch/cheaper"], row["gate_requests/recompute/off"]) == (1, 1)
    assert (row["gate_candidate_requests"], row["gate_candidate_tokens"], row["gate_candidate_bytes"]) == (2, 96, 600)
    assert (row["gate_candidate_seconds/fetch"], row["gate_candidate_seconds/recompute"]) == (pytest.approx(0.2), 1.0)
    assert (row["gate_predicted_seconds/fetch"], row["gate_actual_seconds/fetch"]) == (2, 1)
    assert row["gate_fetched_tokens"] == 48


@pytest.mark.parametrize("unknown", ["fetch", "recompute"])
def test_seconds_that_are_set_against_each_other_are_of_the_same_requests(accounts, counters, unknown):
    """An engine that cannot tell yet what recomputing takes makes no fetch look dear; what is known is observed."""
    count_gate(accounts.counters, report("won"), chunk_bytes=100)
    refused = {"fetched": 0, "actual": None, "reason": "unknown_cost", unknown: None}
    count_gate(accounts.counters, report("skipped", **refused), chunk_bytes=100)
    row = told(counters)
    assert (row["gate_candidate_seconds/fetch"], row["gate_candidate_seconds/recompute"]) == (pytest.approx(0.1), 0.5)
    known = "fetch" if unknown == "recompute" else "recompute"
    assert (row[f"gate_predicted_seconds/{known}"], row[f"gate_predicted_seconds/{unknown}"]) == (2, 1)
    assert row["gate_candidate_requests"] == 2


def test_counters_never_fall(accounts, counters):
    """A prediction below nothing is counted as nothing, also in the sums of histograms."""
    count_gate(accounts.counters, report("won", recompute=-0.5, fetch=-0.1), chunk_bytes=100)
    rows = [row for table in counters.snapshot()[1].values() for row in table["rows"]]
    assert all(value >= 0 for row in rows for value in row[-2:] if isinstance(value, float))


@pytest.mark.parametrize(
    ("tokens", "length"), [(48, "0"), (1023, "0"), (1024, "1024"), (9000, "4096"), (10**6, "16384")]
)
def test_fetches_are_told_apart_by_their_length(accounts, counters, tokens, length):
    """Seconds saved and lost by the least tokens of the fetch's class; what was not fetched has none."""
    count_gate(accounts.counters, report("won", fetched=tokens), chunk_bytes=100)
    count_gate(accounts.counters, report("lost", fetched=tokens, actual=0.9), chunk_bytes=100)
    count_gate(accounts.counters, report("skipped", fetched=0, actual=None), chunk_bytes=100)
    row = told(counters)
    assert row[f"gate_length_requests/{length}"] == 2
    assert row[f"gate_length_seconds/{length}/saved"] == pytest.approx(0.3)
    assert row[f"gate_length_seconds/{length}/lost"] == pytest.approx(0.4)


def test_chunks_that_left_unused_are_counted(accounts, counters):
    """Of those evicted, the ones that nothing had used since they came."""
    chunks = [Evicted("a" * 32, "lru", "room", 0.0, NOBODY, used) for used in (True, False, False)]
    accounts.evicted("dram", chunks, 1.0)
    assert list(counted(counters, "tier_evicted_unused_total").values()) == [2]
    assert list(counted(counters, "tier_evictions_total").values()) == [3]


@pytest.mark.parametrize("idle_s", [20.0, 90.0, 3600.0, 4 * 86400.0])
def test_how_long_chunks_were_idle_is_told_up_to_days(accounts, counters, idle_s):
    """Of a tier that is large enough it is hours: each falls into a bucket that ends, within a factor of two."""
    accounts.evicted("dram", [Evicted("a" * 32, "lru", "room", 1000.0, NOBODY)], 1000.0 + idle_s)
    ((*_, counts, total, _),) = counters.snapshot()[1]["tier_evicted_idle_seconds"]["rows"]
    (bucket,) = (place for place, count in enumerate(counts) if count)
    low, high = BY_NAME["tier_evicted_idle_seconds"].buckets[bucket - 1 : bucket + 1]
    assert low < idle_s <= high <= 2.1 * low
    assert total == idle_s


def test_labels_that_clients_choose_are_bounded(accounts, counters):
    """A reason that no gate has, and a stage beyond the first many, count as others."""
    session = Session("client", "engine", "all", None, 0, 0)
    for number in range(3 * STAGES):
        count_gate(accounts.counters, report("won", reason=f"because-{number}"), chunk_bytes=100)
        accounts.steps(session, Steps([StepReport(f"stage-{number}", "prefill", 1.0, 1)]))
    assert counted(counters, "gate_requests_total") == {("remote", "fetch", OTHER): 3 * STAGES}
    seconds = {(f"stage-{number}", "prefill"): 1 for number in range(STAGES)}
    assert counted(counters, "stage_gpu_seconds_total") == seconds | {(OTHER, "prefill"): 2 * STAGES}


def test_stages_that_clients_choose_are_bounded_on_gpus_too(home):
    """Else one that names its stage anew with each start would add series to those of its GPU for ever."""
    with running(home) as process:
        told = set()
        for number in range(2 * STAGES):
            session = Session("client", "engine", f"stage-{number}", None, 0, 0, gpus=("GPU-1",))
            process.server.sessions = lambda session=session: [session]
            told |= set(process.gpus.stages().items())
    assert told == {("GPU-1", stage) for stage in (*(f"stage-{number}" for number in range(STAGES)), OTHER)}
