"""The way to a slower tier: bounded questions, bounded queues, a breaker, probes."""

import itertools
import threading
import time
import weakref
from dataclasses import replace

import pytest

from connector.lanes import A, B, Gate, total, write
from connector.stores import PATIENCE_S, Clock, at_best, counted, eventually, payload, view
from tiertune_connector.chunk import NOBODY
from tiertune_connector.slower.lane import PROBE_NAMESPACE, Lane
from tiertune_connector.slower.writers import MAX_QUEUED
from tiertune_connector.tiers.base import UNKNOWN, Outcome, Usage
from tiertune_connector.tiers.memory import MemoryTier

REASONS = ("evicted", "full", "dead")


@pytest.fixture
def tier():
    return MemoryTier()


@pytest.fixture
def lane(tier, counters):
    lane = Lane(tier, counters, time.monotonic, patience_s=PATIENCE_S)
    yield lane
    lane.close()


def test_what_is_queued_is_written_and_told_once(lane, tier):
    """In the end every chunk is there, and its owner knows."""
    told = []
    for number in range(20):
        lane.writers.queue(write(b"%d" % number, told))
    eventually(lambda: len(told) == 20)
    assert {outcome for _, outcome in told} == {Outcome.OK}
    assert tier.usage().chunks == 20
    assert eventually(lambda: lane.writers.queued() == 0) is True


def test_nothing_of_a_write_is_held_once_it_is_over(lane):
    """However long no other one comes: a view keeps the descriptor and the mapping of memory that was given back."""
    told = []
    last = write(b"a", told)
    held = weakref.ref(last)
    lane.writers.queue(last)
    del last
    eventually(lambda: told)
    eventually(lambda: held() is None)


@pytest.mark.parametrize("at_most", [5, MAX_QUEUED])
def test_a_full_queue_drops_and_counts(lane, tier, counters, at_most):
    """It never blocks, whatever the tier does."""
    tier.fault, told = Gate("write"), []
    lane.writers.queue(write(b"a", told))
    lane.writers.queue(write(b"b", told))
    eventually(lambda: tier.fault.entered == 2)
    for number in range(at_most + 7):
        lane.writers.queue(write(b"%d" % number, told), at_most=at_most)
    assert [outcome for _, outcome in told] == [None] * 7
    assert total(counters, "write_behind_dropped_total", "remote", "queue_full") == 7
    assert lane.writers.queued() == at_most + 2
    tier.fault.open()
    eventually(lambda: len(told) == at_most + 9)


def test_namespaces_are_written_in_turns(lane, tier):
    """However much of one waits: another has a queue of its own, and its chunks do not come last."""
    tier.fault, told = Gate("write"), []
    for number in range(MAX_QUEUED + 2):
        lane.writers.queue(write(b"%d" % number, told))
        eventually(lambda n=number: tier.fault.entered == min(2, n + 1))
    for key in (b"x", b"y"):
        lane.writers.queue(write(key, told, B), at_most=2)
    assert not told, "nothing was dropped"
    assert (lane.writers.queued(A), lane.writers.queued(B)) == (MAX_QUEUED + 2, 2)
    for number in range(10):  # one at a time: how long a writer waits for a processor is not its turn
        tier.fault.stopped.release()
        eventually(lambda n=number: (len(told), tier.fault.entered) == (n + 1, n + 3))
    assert {key for key, _ in told} >= {b"x", b"y"}
    tier.fault.open()
    eventually(lambda: len(told) == MAX_QUEUED + 4)
    assert eventually(lambda: lane.writers.queued(A) == lane.writers.queued(B) == 0)


def test_a_tier_that_dies_lets_go_of_what_waits_for_it(lane, tier, counters):
    """The queue is dropped at once: nobody waits time-out after time-out, with their chunks pinned."""
    gate = tier.fault = Gate("write", outcome=Outcome.TIMEOUT)
    told = []
    for number in range(50):
        lane.writers.queue(write(b"%d" % number, told))
    eventually(lambda: gate.entered == 2)
    gate.stopped.release(3)
    eventually(lambda: lane.breaker.open)
    eventually(lambda: sum(outcome is None for _, outcome in told) == 50 - gate.entered)
    assert gate.entered <= 5
    assert total(counters, "write_behind_dropped_total", "remote", "dead") == 50 - gate.entered
    lane.writers.queue(write(b"more", told))
    assert told[-1] == (b"more", None)
    gate.open()
    eventually(lambda: len(told) == 51)


def test_a_full_tier_is_read_and_now_and_then_written(lane, tier, counters):
    """After some refusals chunks are dropped unwritten, queued ones too; one write tells when it has room again."""
    gate, told, tried = threading.Semaphore(0), [], []

    def full(operation: str) -> Outcome | None:
        if operation != "write":
            return None
        gate.acquire()
        tried.append(operation)
        return Outcome.FULL

    assert tier.write(A, b"there", view(payload(b"there", 100)), NOBODY) is Outcome.OK
    tier.fault = full
    for number in range(50):
        lane.writers.queue(write(b"%d" % number, told))
    gate.release(10_000)
    eventually(lambda: len(told) == 50)
    assert 8 <= len(tried) < 12
    eventually(lambda: total(counters, "write_behind_dropped_total", "remote", "full") == 50)
    eventually(lambda: lane.breaker._refused == len(tried))  # it is told of a write after the owner is
    assert (lane.breaker.state, lane.breaker.reason[:5]) == ("slow", "full:")
    assert lane.present(A, [b"there"]) == 1
    assert lane.read(A, b"there", memoryview(bytearray(100)))[0] is Outcome.OK
    before = len(tried)
    lane.writers.queue(write(b"no", told))
    assert (told[-1], len(tried)) == ((b"no", None), before)
    tier.fault = lambda _: None
    lane.try_writing()
    lane.writers.queue(write(b"yes", told))
    eventually(lambda: told[-1] == (b"yes", Outcome.OK) and lane.breaker.state == "ok")


def test_what_a_tier_still_has_is_not_written_again(lane, tier, counters):
    """It is asked, and only what it lost is moved and counted; who asks in vain is told so."""
    told, keys = [], [b"a", b"b"]
    for key in keys:
        lane.writers.queue(replace(write(key, told), again=True))
    eventually(lambda: len(told) == 2)
    tier.flush()
    assert tier.write(A, b"a", view(payload(b"a", 100)), NOBODY) is Outcome.OK
    for key in keys:
        lane.writers.queue(replace(write(key, told), again=True))
    eventually(lambda: len(told) == 4)
    assert {outcome for _, outcome in told} == {Outcome.OK}
    assert tier.present(A, keys) == (Outcome.OK, 2)
    assert total(counters, "tier_transfer_bytes_total", "remote", "write") == 300
    tier.fault = lambda operation: Outcome.TIMEOUT if operation == "present" else None
    lane.writers.queue(replace(write(b"a", told), again=True))
    eventually(lambda: told[-1] == (b"a", Outcome.TIMEOUT))
    eventually(lambda: lane.breaker.unwell)


def test_what_is_written_again_finds_out_that_a_tier_is_full(lane, tier):
    """As any write; that it was asked first, and has the chunk, says nothing of its room."""
    told = []
    tier.fault = lambda operation: Outcome.FULL if operation == "write" else None
    for number in range(8):
        lane.writers.queue(replace(write(b"%d" % number, told), again=True))
        eventually(lambda n=number: len(told) == n + 1)
    eventually(lambda: lane.breaker.paused)
    tier.fault = lambda _: None
    assert tier.write(A, b"there", view(payload(b"there", 100)), NOBODY) is Outcome.OK
    lane.try_writing()
    lane.writers.queue(replace(write(b"there", told), again=True))
    eventually(lambda: told[-1] == (b"there", Outcome.OK) and lane.writers.queued() == 0)
    lane.record(Outcome.OK)
    assert lane.breaker.reason.startswith("full")


def test_what_was_never_written_is_counted_with_why(lane, tier, counters):
    """Because its turn did not come, the tier is full, or dead."""
    lane.writers.missed(3)
    for _ in range(8):
        lane.record(Outcome.FULL, wrote=True)
    lane.writers.missed(5)
    for _ in range(3):
        lane.record(Outcome.ERROR)
    lane.writers.missed(7)
    dropped = {reason: total(counters, "write_behind_dropped_total", "remote", reason) for reason in REASONS}
    assert dropped == {"evicted": 3, "full": 5, "dead": 7}


def test_an_exception_in_a_tier_ends_no_writer(lane, tier, counters):
    """It is counted, the owner is told, and the next chunk is written."""
    told = []

    def raises(operation: str) -> None:
        if operation == "write" and len(told) < 3:
            raise RuntimeError("a tier must not do this")

    tier.fault = raises
    for number in range(3):
        lane.writers.queue(write(b"%d" % number, told))
        eventually(lambda n=number: len(told) > n and lane.breaker.unwell)
        lane.record(Outcome.OK)
    lane.writers.queue(write(b"good", told))
    eventually(lambda: told[-1] == (b"good", Outcome.OK))
    assert total(counters, "internal_errors_total", "write") == 3


def test_an_owner_that_fails_ends_no_writer(lane, tier, counters):
    """What was written is not believed to be still on its way, and what comes next is written."""
    gate, told = Gate("write"), []

    def fails(_: Outcome | None) -> None:
        raise KeyError

    for number in range(4):
        lane.writers.queue(replace(write(b"%d" % number, told), done=fails))
    eventually(lambda: lane.writers.queued() == 0)
    lane.writers.queue(write(b"good", told))
    eventually(lambda: told == [(b"good", Outcome.OK)])
    tier.fault = gate
    for number in range(2):
        lane.writers.queue(write(b"held %d" % number, told))
    eventually(lambda: gate.entered == 2)
    lane.writers.queue(replace(write(b"first", told), done=fails))
    lane.writers.queue(write(b"second", told))
    for _ in range(3):
        lane.record(Outcome.ERROR)
    assert told[-1] == (b"second", None), "what waits behind it is let go, too"
    gate.open()
    assert total(counters, "internal_errors_total", "write") == 5


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


def test_a_dropped_queue_leaves_what_does_not_match(lane, tier, counters):
    """A flush of one namespace waits for its chunk that is being written, and for no other."""
    gate = tier.fault = Gate("write")
    told = []
    lane.writers.queue(write(b"other", told, B))
    eventually(lambda: gate.entered == 1)
    for number in range(5):
        lane.writers.queue(write(b"%d" % number, told, A if number else B))
    eventually(lambda: gate.entered == 2)
    assert lane.writers.drop_queued(lambda queued: queued.namespace == A, timeout_s=5.0)
    assert sorted(key for key, outcome in told if outcome is None) == [b"1", b"2", b"3", b"4"]
    assert total(counters, "write_behind_dropped_total", "remote", "flushed") == 4
    assert not lane.writers.drop_queued(lambda queued: queued.namespace == B, timeout_s=0.05), "still being written"
    gate.open()
    eventually(lambda: len(told) == 6)


def test_a_probe_measures_from_the_first_time_on(lane, tier, counters):
    """It writes its chunk where there is none, and reads it; health and cost are known at once."""
    assert lane.transit.estimate() is None
    assert lane.probe(1 << 16) is Outcome.OK
    assert lane.transit.estimate().samples == 1
    assert tier.usage().chunks == 1
    assert lane.probe(1 << 16) is Outcome.OK
    assert (lane.transit.estimate().samples, tier.usage().chunks) == (2, 1)
    assert total(counters, "probes_total", "remote", "ok") == 2
    assert tier.flush(PROBE_NAMESPACE)[1] == 1


def test_a_flush_does_not_count_probes(lane, tier):
    """They go with all else, and only chunks are told."""
    tier.write(A, b"key", view(payload(b"key", 100)), NOBODY)
    lane.probe(1 << 16)
    assert (lane.flush(None, None), tier.usage().chunks) == ((Outcome.OK, 1), 0)


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
    assert lane.probe(1 << 16) is Outcome.ERROR
    assert lane.transit.estimate().queue_s == 0


def test_estimates_tell_the_loads_that_wait(lane):
    """Each once, from its beginning to its end, also one that breaks; a probe is none."""
    lane.probe(1000)

    def transfers():
        return lane.transit.estimate().transfers

    assert transfers() == 0
    with lane.transit.awaited():
        with lane.transit.awaited():
            assert transfers() == 2
        with pytest.raises(KeyError), lane.transit.awaited():
            raise KeyError
        assert transfers() == 1
    assert transfers() == 0


@pytest.fixture
def paced(tier, counters):
    """A lane whose time passes only while its tier works: a moment each, or what a fault takes."""
    clock = Clock()

    def well(_: str) -> None:
        clock.now += 1e-4

    def hung(_: str) -> Outcome:
        clock.now += 0.05
        return Outcome.TIMEOUT

    tier.fault = well
    lane = Lane(tier, counters, clock)
    lane.probe(1 << 16)
    tier.fault = hung
    yield lane
    lane.close()


def test_a_timed_out_probe_counts_as_slow(paced):
    """The estimate must not stay at what it was when the tier was well."""
    before = paced.transit.estimate().bytes_per_s
    paced.probe(1 << 16)
    assert paced.transit.estimate().bytes_per_s < before / 2


def test_probes_of_a_dead_tier_teach_no_cost(paced):
    """However often it was probed meanwhile, when it is back it is believed to be as fast as it was."""
    for _ in range(3):
        paced.record(Outcome.TIMEOUT)
    before = paced.transit.estimate().bytes_per_s
    for _ in range(3):
        paced.probe(1 << 16)
    assert paced.transit.estimate().bytes_per_s == before


def test_close_writes_what_it_can_and_tells_the_rest(tier, counters):
    """A tier that hangs does not keep the process: its queue is dropped when the time is over."""
    lane = Lane(tier, counters, time.monotonic)
    told = []
    for number in range(5):
        lane.writers.queue(write(b"%d" % number, told))
    lane.close(PATIENCE_S)
    assert len(told) == 5
    assert tier.usage().chunks == 5

    gate = tier.fault = Gate("write")

    def closed() -> float:
        entered, dropped = gate.entered, total(counters, "write_behind_dropped_total", "remote", "closing")
        lane = Lane(tier, counters, time.monotonic)
        for number in range(5):
            lane.writers.queue(write(b"x%d" % number, told))
        eventually(lambda: gate.entered == entered + 2)
        started = time.monotonic()
        lane.close(timeout_s=0.1)
        took = time.monotonic() - started
        assert total(counters, "write_behind_dropped_total", "remote", "closing") == dropped + 3
        lane.writers.queue(write(b"late", told))
        assert told[-1] == (b"late", None)
        return took

    assert at_best(closed, 2.0)
    gate.open()


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


def test_what_a_fetch_costs_is_measured_again_where_nobody_asks(tier, counters):
    """A tier that was slow once would be slow for ever: its gates refuse, and so nobody would tell better."""
    clock, gate = Clock(), Gate("read")
    lane = Lane(tier, counters, clock, patience_s=PATIENCE_S)
    tier.write(A, b"k", view(payload(b"k", 1000)), NOBODY)

    def measure():
        lane.measure(lambda out: tier.read(A, b"k", out)[0], 1000, silent_s=20.0)
        return lane.transit.estimate()

    def took(seconds):
        lane.transit.asked(1000)
        clock.now += seconds
        lane.transit.ended(1000, Outcome.OK)

    assert measure() is None, "an unknown cost keeps nobody from asking"
    took(10.0)
    slow = lane.transit.estimate().bytes_per_s
    clock.now += 19.0
    assert measure().bytes_per_s == slow
    clock.now += 1.0
    tier.fault = gate
    measure()
    eventually(lambda: gate.entered)
    measure()  # none beside it
    clock.now += 0.1
    gate.open()
    eventually(lambda: lane.transit.estimate().samples == 2)
    assert lane.transit.estimate().bytes_per_s == pytest.approx(10 * slow)
    assert gate.entered == 1
    clock.now += 20.0
    tier.fault = again = Gate("read")
    measure()
    eventually(lambda: again.entered)
    clock.now += 5.0
    again.open()
    eventually(lane._probing.done)
    assert lane.transit.estimate().samples == 2, "one that comes alone may be slower than many"
    lane.close()


def test_a_size_that_nobody_fetches_is_measured_though_others_are(tier, counters):
    """A gate that finds another model's chunks too dear by those that come would refuse them for ever."""
    clock, asked = Clock(), []
    lane = Lane(tier, counters, clock, patience_s=PATIENCE_S)

    def measure(nbytes):
        lane.measure(lambda _: asked.append(nbytes) or Outcome.OK, nbytes, silent_s=20.0)
        eventually(lambda: lane._probing is None or lane._probing.done())

    lane.transit.asked(1000)
    clock.now += 1.0
    lane.transit.ended(1000, Outcome.OK)
    measure(1000)
    measure(100_000)
    assert asked == [100_000]
    lane.close()


def test_a_chunk_that_came_slower_than_believed_is_not_read_again_at_once(tier, counters):
    """It teaches nothing, for it came alone; and where the remote is dead a store probes every second."""
    clock, asked = Clock(), []
    lane = Lane(tier, counters, clock, patience_s=PATIENCE_S)

    def read(_):
        clock.now += 10.0
        asked.append(clock.now)
        return Outcome.OK

    lane.transit.asked(1000)
    clock.now += 1.0
    lane.transit.ended(1000, Outcome.OK)
    for _ in range(50):
        clock.now += 1.0
        lane.measure(read, 3000, silent_s=20.0)
        eventually(lambda: lane._probing is None or lane._probing.done())
    assert [round(after - before) for before, after in itertools.pairwise(asked)] == [30, 30]
    assert lane.transit.estimate().samples == 1
    lane.close()
