"""The way to a slower tier: bounded questions, bounded queues, a breaker, probes."""

import threading
import time

import pytest

from connector.stores import eventually, payload, view
from tiertune_connector.chunk import NOBODY, Origin
from tiertune_connector.counters import Counters
from tiertune_connector.lane import MAX_QUEUED, PROBE_NAMESPACE, Lane, Write
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tiers.memory import MemoryTier

A, B = "a" * 32, "b" * 32


class Gate:
    """A fault that stops operations until it is opened."""

    def __init__(self, *operations: str, outcome: Outcome | None = None) -> None:
        self.stopped = threading.Semaphore(0)
        self.entered = 0
        self._operations, self._outcome = operations, outcome

    def __call__(self, operation: str) -> Outcome | None:
        if operation not in self._operations:
            return None
        self.entered += 1
        self.stopped.acquire()
        return self._outcome

    def open(self) -> None:
        self.stopped.release(10_000)


@pytest.fixture
def tier():
    return MemoryTier()


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def lane(tier, counters):
    lane = Lane(tier, counters, time.monotonic, patience_s=0.2)
    yield lane
    lane.close()


def write(key: bytes, told: list, namespace: str = A, tenant: bytes = b"") -> Write:
    return Write(namespace, key, view(payload(key, 100)), Origin("host-a", tenant), lambda o: told.append((key, o)))


def total(counters: Counters, name: str, *labels: str) -> float:
    rows = counters.snapshot()[1].get(name, {"rows": []})["rows"]
    return sum(row[-1] for row in rows if tuple(row[: len(labels)]) == labels)


def test_what_is_queued_is_written_and_told_once(lane, tier):
    """In the end every chunk is there, and its owner knows."""
    told = []
    for number in range(20):
        lane.write_behind(write(b"%d" % number, told))
    eventually(lambda: len(told) == 20)
    assert {outcome for _, outcome in told} == {Outcome.OK}
    assert tier.usage().chunks == 20
    assert eventually(lambda: lane.queued() == 0) is True


@pytest.mark.parametrize("at_most", [5, MAX_QUEUED])
def test_a_full_queue_drops_and_counts(lane, tier, counters, at_most):
    """It never blocks, whatever the tier does."""
    tier.fault, told = Gate("write"), []
    lane.write_behind(write(b"a", told))
    lane.write_behind(write(b"b", told))
    eventually(lambda: tier.fault.entered == 2)
    for number in range(at_most + 7):
        lane.write_behind(write(b"%d" % number, told), at_most=at_most)
    assert [outcome for _, outcome in told] == [None] * 7
    assert total(counters, "write_behind_dropped_total", "remote", "queue_full") == 7
    assert lane.queued() == at_most + 2
    tier.fault.open()
    eventually(lambda: len(told) == at_most + 9)


def test_a_tier_that_dies_lets_go_of_what_waits_for_it(lane, tier, counters):
    """The queue is dropped at once: nobody waits time-out after time-out, with their chunks pinned."""
    gate = tier.fault = Gate("write", outcome=Outcome.TIMEOUT)
    told = []
    for number in range(50):
        lane.write_behind(write(b"%d" % number, told))
    eventually(lambda: gate.entered == 2)
    gate.stopped.release(3)
    eventually(lambda: lane.breaker.open)
    eventually(lambda: sum(outcome is None for _, outcome in told) == 50 - gate.entered)
    assert gate.entered <= 5
    assert total(counters, "write_behind_dropped_total", "remote", "dead") == 50 - gate.entered
    lane.write_behind(write(b"more", told))
    assert told[-1] == (b"more", None)
    gate.open()
    eventually(lambda: len(told) == 51)


def test_an_exception_in_a_tier_ends_no_writer(lane, tier, counters):
    """It is counted, the owner is told, and the next chunk is written."""
    told = []

    def raises(operation: str) -> None:
        if operation == "write" and len(told) < 3:
            raise RuntimeError("a tier must not do this")

    tier.fault = raises
    for number in range(3):
        lane.write_behind(write(b"%d" % number, told))
        eventually(lambda n=number: len(told) > n)
        lane.record(Outcome.OK)
    lane.write_behind(write(b"good", told))
    eventually(lambda: told[-1] == (b"good", Outcome.OK))
    assert total(counters, "internal_errors_total", "write") == 3


def test_a_question_is_answered_within_the_patience(lane, tier):
    """A tier that hangs without a time-out of its own is nothing found, and after three times is not asked."""
    tier.fault = Gate("present")
    for _ in range(3):
        started = time.monotonic()
        assert lane.present(A, [b"key"]) == 0
        assert 0.15 < time.monotonic() - started < 1.0
    assert lane.breaker.state == "dead"
    entered, started = tier.fault.entered, time.monotonic()
    assert lane.present(A, [b"key"]) == 0
    assert lane.read(A, b"key", memoryview(bytearray(5))) == (Outcome.ERROR, NOBODY)
    assert time.monotonic() - started < 0.1
    assert tier.fault.entered == entered
    tier.fault.open()


def test_more_questions_at_once_than_can_be_asked_are_no_failure_of_the_tier(lane, tier):
    """What was never asked is nothing found; only what the tier did not answer counts against it."""
    gate = tier.fault = Gate("present")
    asking = [threading.Thread(target=lane._askers.submit, args=(lane.tier.present, A, [b"key"])) for _ in range(32)]
    for thread in asking:
        thread.start()
        thread.join()
    eventually(lambda: gate.entered == 32)
    for _ in range(5):
        assert lane.present(A, [b"key"]) == 0
    assert lane.breaker.state == "ok"
    gate.open()
    eventually(lambda: lane.present(A, [b"key"]) == 0 and gate.entered > 32)


def test_a_dropped_queue_leaves_what_does_not_match(lane, tier, counters):
    """A flush of one namespace waits for its chunk that is being written, and for no other."""
    gate = tier.fault = Gate("write")
    told = []
    lane.write_behind(write(b"other", told, B))
    eventually(lambda: gate.entered == 1)
    for number in range(5):
        lane.write_behind(write(b"%d" % number, told, A if number else B))
    eventually(lambda: gate.entered == 2)
    assert lane.drop_queued(lambda queued: queued.namespace == A, timeout_s=5.0)
    assert sorted(key for key, outcome in told if outcome is None) == [b"1", b"2", b"3", b"4"]
    assert total(counters, "write_behind_dropped_total", "remote", "flushed") == 4
    assert not lane.drop_queued(lambda queued: queued.namespace == B, timeout_s=0.05), "still being written"
    gate.open()
    eventually(lambda: len(told) == 6)


def test_a_probe_measures_from_the_first_time_on(lane, tier, counters):
    """It writes its chunk where there is none, and reads it; health and cost are known at once."""
    assert lane.estimate() is None
    assert lane.probe(1 << 16) is Outcome.OK
    assert lane.estimate().samples == 1
    assert tier.usage().chunks == 1
    assert lane.probe(1 << 16) is Outcome.OK
    assert (lane.estimate().samples, tier.usage().chunks) == (2, 1)
    assert total(counters, "probes_total", "remote", "ok") == 2
    assert tier.flush(PROBE_NAMESPACE)[1] == 1


def test_probes_close_what_failures_opened(lane, tier):
    """Two good ones."""
    tier.fault = lambda _: Outcome.ERROR
    for _ in range(3):
        lane.probe(100)
    assert lane.breaker.state == "dead"
    tier.fault = lambda _: None
    lane.probe(100)
    assert (lane.breaker.state, lane.present(A, [b"key"])) == ("recovering", 0)
    lane.probe(100)
    assert lane.breaker.state == "ok"


def test_a_probe_that_breaks_is_not_waited_for(lane, tier):
    """What it asked for is under way no longer: no later fetch queues behind it."""
    lane.probe(1 << 16)

    def broken(operation: str) -> None:
        if operation == "read":
            raise RuntimeError

    tier.fault = broken
    with pytest.raises(RuntimeError):
        lane.probe(1 << 16)
    assert lane.estimate().queue_s == 0


def test_estimates_tell_the_loads_that_wait(lane):
    """Each once, from its beginning to its end, also one that breaks; a probe is none."""
    lane.probe(1000)

    def transfers():
        return lane.estimate().transfers

    assert transfers() == 0
    with lane.awaited():
        with lane.awaited():
            assert transfers() == 2
        with pytest.raises(KeyError), lane.awaited():
            raise KeyError
        assert transfers() == 1
    assert transfers() == 0


def test_a_timed_out_probe_counts_as_slow(lane, tier):
    """The estimate must not stay at what it was when the tier was well."""
    lane.probe(1 << 16)
    before = lane.estimate().bytes_per_s

    def slow(_: str) -> Outcome:
        time.sleep(0.05)  # the fault itself
        return Outcome.TIMEOUT

    tier.fault = slow
    lane.probe(1 << 16)
    assert lane.estimate().bytes_per_s < before / 2


def test_close_writes_what_it_can_and_tells_the_rest(tier, counters):
    """A tier that hangs does not keep the process: its queue is dropped when the time is over."""
    lane = Lane(tier, counters, time.monotonic)
    told = []
    for number in range(5):
        lane.write_behind(write(b"%d" % number, told))
    lane.close()
    assert len(told) == 5
    assert tier.usage().chunks == 5

    tier.fault = Gate("write")
    lane = Lane(tier, counters, time.monotonic)
    for number in range(5):
        lane.write_behind(write(b"x%d" % number, told))
    started = time.monotonic()
    lane.close(timeout_s=0.1)
    assert time.monotonic() - started < 2.0
    assert total(counters, "write_behind_dropped_total", "remote", "closing") == 3
    lane.write_behind(write(b"late", told))
    assert told[-1] == (b"late", None)
    tier.fault.open()
