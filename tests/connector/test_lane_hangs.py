"""A slower tier that hangs: it is found out, nobody waits for it, and it is well when what it was asked ends."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from connector.lanes import Gate, total, write
from connector.memory_tier import MemoryTier
from connector.stores import PATIENCE_S, A, amid, eventually
from tiertune_connector.slower.lane import Lane
from tiertune_connector.tiers.base import Outcome


@pytest.fixture
def local(counters, clock):
    """A lane to a tier without time-outs of its own, by a clock that stands still."""
    lane = Lane(MemoryTier(), counters, clock, patience_s=0.01, hung_s=10.0)
    yield lane
    lane.close()


@contextmanager
def hanging(lane, count: int):
    """So many reads are under way and do not end; the fault that holds them."""
    gate = lane.tier.fault = Gate("read")
    with amid(lambda *_: lane.read(A, b"key", memoryview(bytearray(100))), count):
        try:
            eventually(lambda: gate.entered == count)
            yield gate
        finally:
            gate.open()


def test_a_tier_of_which_nothing_ends_hangs(local, clock):
    """Each look at it is a time-out; it is not tried again before what it was asked ends, and that makes it well."""
    with hanging(local, 2):
        clock.now += 9.9
        local.watch()
        assert local.breaker.state == "ok"
        clock.now += 0.2
        for state in ("slow", "slow", "dead"):
            local.watch()
            assert local.breaker.state == state
        local.watch()
        assert local.breaker.reason == "3 operations in a row ended in timeout"
        local.try_again()
        assert local.breaker.open
    assert local.breaker.state == "ok"


def test_a_tier_that_is_only_slow_does_not_hang(local, clock):
    """As long as something ends, or nothing is asked."""
    with hanging(local, 2) as gate:
        clock.now += 9.9
        gate.stopped.release()
        eventually(lambda: local._under_way == 1)
        clock.now += 9.9
        local.watch()
        assert local.breaker.state == "ok"
    clock.now += 100
    with hanging(local, 1):
        local.watch()
        assert local.breaker.state == "ok"


def test_a_write_that_hangs_is_found_out_too(local, clock):
    """What waits behind it is let go."""
    gate, told = Gate("write"), []
    local.tier.fault = gate
    for number in range(5):
        local.writers.queue(write(b"%d" % number, told))
    eventually(lambda: gate.entered == 2)
    clock.now += 10.1
    for _ in range(3):
        local.watch()
    assert [outcome for _, outcome in told] == [None] * 3
    gate.open()
    eventually(lambda: local.writers.queued() == 0)


def test_a_probe_that_hangs_is_not_waited_for(local, clock, counters):
    """One at a time, found out as anything that hangs; whoever probes goes on, and the tier is well when it ends."""
    local._hung_s, gate = 0.01, Gate("present")
    local.tier.fault = gate
    for _ in range(3):
        assert local.probe(100) is Outcome.TIMEOUT
    eventually(lambda: gate.entered == 1)
    clock.now += 1.0
    for _ in range(3):
        local.watch()
    assert local.breaker.state == "dead"
    gate.open()
    eventually(lambda: local.breaker.state == "recovering")
    local._hung_s = PATIENCE_S
    assert local.probe(100) is Outcome.OK
    assert total(counters, "probes_total", "remote", "ok") == 1, "the one that hung told already"
    assert local.probe(100) is Outcome.OK
    assert local.breaker.state == "ok"


def test_a_tier_that_hung_is_believed_no_slower_afterwards(local, clock):
    """How long loads waited in vain, and the chunks that come at last, tell nothing: the cost is unknown again."""
    for _ in range(2):
        local.transit.asked(1000)
        clock.now += 0.001
        local.transit.ended(1000, Outcome.OK)
    assert local.transit.estimate().samples == 2
    local.transit.asked(1000)
    with hanging(local, 1):
        clock.now += 11.0
        local.transit.given_up(0.001, 11.0)
        for _ in range(3):
            local.watch()
        assert local.transit.estimate() is None
        clock.now += 3600.0
        local.watch()
    local.transit.ended(1000, Outcome.OK)
    assert local.transit.estimate() is None
    local.transit.asked(1000)
    clock.now += 0.001
    local.transit.ended(1000, Outcome.OK)
    assert local.transit.estimate().seconds(1, 1000) == pytest.approx(0.001)


def test_who_waits_no_longer_leaves_the_answer_to_the_tiers_health(local, counters, clock):
    """An answer after its asker's deadline says how the tier is, as one in time does; and so does none at all."""
    local._patience_s, tier = PATIENCE_S, local.tier

    def asked(gate: Gate) -> None:
        tier.fault, entered = gate, gate.entered
        eventually(lambda: local.present(A, [b"key"], within_s=0.02) == 0 and gate.entered > entered)

    for outcome, state in ((Outcome.TIMEOUT, "slow"), (None, "ok")):
        asked(gate := Gate("present", outcome=outcome))
        assert total(counters, "tier_errors_total", "remote", "present", "late")
        gate.open()
        eventually(lambda state=state: local.breaker.state == state)
    gate = Gate("present")
    for state in ("slow", "slow", "dead"):
        asked(gate)
        before = local.breaker.state
        local.watch()
        assert local.breaker.state == before
        clock.now += PATIENCE_S
        local.watch()
        assert local.breaker.state == state
    assert not local._left
    gate.open()


def test_an_answer_that_nobody_waits_for_is_bad_after_the_tiers_patience(local, clock):
    """As for who waits on: a tier that always takes longer is dead, and not well again with each answer."""
    local._patience_s, tier = PATIENCE_S, local.tier
    for state in ("slow", "slow", "dead"):
        tier.fault = gate = Gate("present")
        eventually(lambda gate=gate: local.present(A, [b"key"], within_s=0.02) == 0 and gate.entered)
        clock.now += 2 * PATIENCE_S
        gate.open()
        eventually(lambda: not local._left)
        eventually(lambda state=state: local.breaker.state == state)


def test_preparing_takes_no_longer_than_the_patience(local):
    """What takes longer goes on, and is a time-out of the tier; a dead tier is not asked."""
    free, prepared = threading.Event(), []

    def preparing():
        free.wait()
        prepared.append(True)
        return Outcome.OK

    try:
        while not local.breaker.open:  # what a busy machine did not even begin in time says nothing of the tier
            assert local.prepare(preparing) is Outcome.TIMEOUT
        assert local.prepare(preparing) is Outcome.ERROR
        assert local.breaker.state == "dead"
    finally:
        free.set()
    eventually(lambda: len(prepared) == 3)


def test_a_flush_is_not_waited_for_for_ever(counters, clock):
    """It goes on, and its caller is told that some may be left."""
    lane = Lane(MemoryTier(), counters, clock, hung_s=0.01)
    gate = lane.tier.fault = Gate("flush")
    with ThreadPoolExecutor(1) as threads:
        try:
            assert threads.submit(lane.flush, A, None).result(PATIENCE_S) == (Outcome.TIMEOUT, 0)
        finally:
            gate.open()
            lane.close()
