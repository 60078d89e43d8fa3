"""What a slower tier is asked: answers within the patience, exceptions as outcomes, health told in the log."""

import threading
import time
from types import SimpleNamespace

import pytest

from connector.lanes import Gate
from connector.memory_tier import MemoryTier
from connector.stores import PATIENCE_S, A, at_best, counted, eventually
from tiertune_connector.chunk import NOBODY
from tiertune_connector.slower.arrivals import Arrivals
from tiertune_connector.tiers.base import UNKNOWN, Outcome, Usage


@pytest.fixture
def tier():
    return MemoryTier()


@pytest.mark.parametrize("operation", ["present", "prepare", "read", "probe", "flush"])
def test_what_a_tier_raises_is_an_error_of_it(lane, tier, counters, operation):
    """Counted, told to who asked as an outcome, and to the breaker: after three times the tier is not asked."""

    def raises(*_: object) -> Outcome:
        raise ValueError("a tier must not do this")

    tier.fault = raises
    asked = {
        "present": lambda: lane.present(A, [b"key"]) == 0,
        "prepare": lambda: lane.prepare(raises) is Outcome.ERROR,
        "read": lambda: lane.read(A, b"key", memoryview(bytearray(5))) == (Outcome.ERROR, NOBODY),
        "probe": lambda: lane.probe(100) is Outcome.ERROR,
        "flush": lambda: lane.flush(None, None) == (Outcome.ERROR, 0),
    }
    assert all(asked[operation]() for _ in range(3))
    assert lane.breaker.open is (operation != "flush")
    assert counted(counters, "internal_errors_total") == {(operation,): 3.0}


def test_what_a_tier_holds_is_unknown_while_it_does_not_tell(lane, tier, monkeypatch):
    """A large directory is looked through once: who asks a store how it is does not wait for that, nor asks again."""
    monkeypatch.setattr("tiertune_connector.slower.lane.TELLS_S", 0.05)
    asked, look, usage = [], threading.Event(), tier.usage

    def slow() -> Usage:
        asked.append(look.wait(PATIENCE_S))
        return usage()

    monkeypatch.setattr(tier, "usage", slow)
    assert [lane.usage() for _ in range(3)] == [UNKNOWN] * 3
    look.set()
    eventually(lambda: lane.usage() == Usage(0, None, 0))
    assert asked[0] is True
    assert len(asked) == 1


def test_a_question_is_answered_within_the_patience(lane, tier):
    """A tier that hangs without a time-out of its own is nothing found, and after three times is not asked."""
    lane._patience_s = 0.2
    tier.fault, took = Gate("present"), []
    while not lane.breaker.open:  # what a busy machine did not even begin in time says nothing of the tier
        started = time.monotonic()
        assert lane.present(A, [b"key"]) == 0
        took.append(time.monotonic() - started)
    assert 0.15 < min(took) < 1.0
    assert lane.breaker.state == "dead"
    eventually(lambda: tier.fault.entered == 3)

    def refused() -> float:
        started = time.monotonic()
        assert lane.present(A, [b"key"]) == 0
        assert lane.read(A, b"key", memoryview(bytearray(5))) == (Outcome.ERROR, NOBODY)
        return time.monotonic() - started

    assert at_best(refused, 0.1)
    assert tier.fault.entered == 3
    tier.fault.open()


def test_more_questions_at_once_than_can_be_asked_are_no_failure_of_the_tier(lane, tier):
    """What was never asked is nothing found; only what the tier did not answer counts against it."""
    lane._patience_s = 0.2
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


def test_estimates_tell_the_loads_that_wait(lane):
    """Each once, from its beginning to its end, also one that breaks; a probe is none."""
    lane.probe(1000)

    def transfers():
        return lane.transit.estimate().transfers

    def waiting():
        """A load of two chunks."""
        return Arrivals(None, {}, None, None).awaited([SimpleNamespace(lane=lane)] * 2)

    assert transfers() == 0
    with waiting():
        with waiting():
            assert transfers() == 2
        with pytest.raises(KeyError), waiting():
            raise KeyError
        assert transfers() == 1
    assert transfers() == 0


def test_the_log_tells_once_when_a_tier_dies_and_why_and_when_it_answers_again(lane, tier, caplog):
    """In the medium's words; a failure that changes nothing is not logged."""
    tier.fault, tier.why = lambda _: Outcome.ERROR, "Connection refused"
    for _ in range(5):
        lane.probe(100)
    tier.fault = lambda _: None
    for _ in range(3):
        lane.probe(100)
    assert lane.breaker.state == "ok"
    assert [record.getMessage() for record in caplog.records] == [
        "remote is dead: 3 operations in a row ended in error: Connection refused",
        "remote is recovering: a probe succeeded",
    ]
