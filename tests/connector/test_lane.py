"""Writing to a slower tier: bounded queues in turns, dropped where it is full or dead, ended in time."""

import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from connector.lanes import Gate, total, write
from connector.memory_tier import MemoryTier
from connector.stores import PATIENCE_S, A, B, at_best, counted, eventually, payload, view
from tiertune_connector.chunk import NOBODY
from tiertune_connector.slower.lane import Lane
from tiertune_connector.slower.writers import MAX_QUEUED, WriteQueue
from tiertune_connector.tiers.base import UNKNOWN, Outcome

REASONS = ("evicted", "full", "dead")


@pytest.fixture
def tier():
    return MemoryTier()


def numbered(count):
    return [b"%d" % number for number in range(count)]


def queue(lane, told, *keys, **more):
    """Writes of these keys, each told when it is over; with ``more`` fields of `Write`."""
    for key in keys:
        lane.writers.queue(replace(write(key, told), **more))


def test_what_is_queued_is_written_and_told_once(lane, tier):
    """In the end every chunk is there, and its owner knows."""
    told = []
    queue(lane, told, *numbered(20))
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


def test_what_waits_is_found_behind_namespaces_that_wait_no_more():
    """A writer that met one of those would end, and with it all that is written to its tier."""
    queue, found = WriteQueue(), []
    for namespaces in ((A, B), (B,), (A,)):
        for namespace in namespaces:
            queue.append(write(b"key", [], namespace))
        found += [queue.pop().namespace for _ in namespaces]
    assert found == [A, B, B, A]
    assert not queue


def test_a_model_of_small_chunks_is_written_beside_one_of_large_chunks():
    """Each gets as many bytes while it has any waiting; what it left to the other does not count later."""
    queue, sizes = WriteQueue(), {A: 3_200, B: 20}
    more = {name: replace(write(b"key", [], name), payload=memoryview(bytes(size))) for name, size in sizes.items()}

    def written(count):
        for _ in range(count):
            write = queue.pop()
            queue.append(write)
            yield write.namespace

    queue.append(more[B])
    assert list(written(1000)) == [B] * 1000
    queue.append(more[A])
    both = list(written(1610))
    ahead = [both[:end].count(A) * sizes[A] - both[:end].count(B) * sizes[B] for end in range(1610)]
    assert max(map(abs, ahead)) <= sizes[A] + sizes[B]


@pytest.mark.parametrize("at_most", [5, MAX_QUEUED])
def test_a_full_queue_drops_and_counts(lane, tier, counters, at_most):
    """It never blocks, whatever the tier does."""
    tier.fault, told = Gate("write"), []
    queue(lane, told, b"a", b"b")
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
        queue(lane, told, b"%d" % number)
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
    queue(lane, told, *numbered(50))
    eventually(lambda: gate.entered == 2)
    gate.stopped.release(3)
    eventually(lambda: lane.breaker.open)
    eventually(lambda: sum(outcome is None for _, outcome in told) == 50 - gate.entered)
    assert gate.entered <= 5
    assert total(counters, "write_behind_dropped_total", "remote", "dead") == 50 - gate.entered
    queue(lane, told, b"more")
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
    queue(lane, told, *numbered(50))
    gate.release(10_000)
    eventually(lambda: len(told) == 50)
    assert 8 <= len(tried) < 12
    eventually(lambda: total(counters, "write_behind_dropped_total", "remote", "full") == 50)
    eventually(lambda: lane.breaker._refused == len(tried))  # it is told of a write after the owner is
    assert (lane.breaker.state, lane.breaker.reason[:5]) == ("slow", "full:")
    assert lane.present(A, [b"there"]) == 1
    assert lane.read(A, b"there", memoryview(bytearray(100)))[0] is Outcome.OK
    before = len(tried)
    queue(lane, told, b"no")
    assert (told[-1], len(tried)) == ((b"no", None), before)
    tier.fault = lambda _: None
    lane.try_again(asking=False)
    queue(lane, told, b"yes")
    eventually(lambda: told[-1] == (b"yes", Outcome.OK) and lane.breaker.state == "ok")


def test_what_a_tier_still_has_is_not_written_again(lane, tier, counters):
    """Only what it lost is moved and counted."""
    told, keys = [], [b"a", b"b"]
    queue(lane, told, *keys)
    eventually(lambda: len(told) == 2)
    tier.flush()
    assert tier.write(A, b"a", view(payload(b"a", 100)), NOBODY) is Outcome.OK
    queue(lane, told, *keys)
    eventually(lambda: len(told) == 4)
    assert dict(told[2:]) == {b"a": Outcome.THERE, b"b": Outcome.OK}
    assert tier.present(A, keys) == (Outcome.OK, 2)
    assert total(counters, "tier_transfer_bytes_total", "remote", "write") == 300


def test_what_another_store_wrote_is_no_traffic(lane, tier, counters):
    """It is a write of its own outcome, whose bytes did not move."""
    told = []
    assert tier.write(A, b"a", view(payload(b"a", 100)), NOBODY) is Outcome.OK
    queue(lane, told, b"a", b"b")
    eventually(lambda: len(told) == 2)
    assert dict(told) == {b"a": Outcome.THERE, b"b": Outcome.OK}
    assert total(counters, "tier_transfer_bytes_total", "remote", "write") == 100
    writes = counted(counters, "tier_operation_seconds")
    assert (writes["remote", "write", "ok"], writes["remote", "write", "there"]) == (1, 1)
    assert total(counters, "write_behind_dropped_total", "remote", "there") == 0


def test_what_is_written_again_says_nothing_of_a_tiers_room(lane, tier):
    """A full tier that has the chunk answers so, and stays full until a write finds room."""
    told = []
    tier.fault = lambda operation: Outcome.FULL if operation == "write" else None
    for number in range(8):
        queue(lane, told, b"%d" % number)
        eventually(lambda n=number: len(told) == n + 1)
    eventually(lambda: lane.breaker.paused)
    tier.fault = lambda _: None
    assert tier.write(A, b"there", view(payload(b"there", 100)), NOBODY) is Outcome.OK
    lane.try_again(asking=False)
    queue(lane, told, b"there")
    eventually(lambda: told[-1] == (b"there", Outcome.THERE) and lane.writers.queued() == 0)
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
        queue(lane, told, b"%d" % number)
        eventually(lambda n=number: len(told) > n and lane.breaker.unwell)
        lane.record(Outcome.OK)
    queue(lane, told, b"good")
    eventually(lambda: told[-1] == (b"good", Outcome.OK))
    assert total(counters, "internal_errors_total", "write") == 3


def test_an_owner_that_fails_ends_no_writer(lane, tier, counters):
    """What was written is not believed to be still on its way, and what comes next is written."""
    gate, told = Gate("write"), []

    def fails(_: Outcome | None) -> None:
        raise KeyError

    queue(lane, told, *numbered(4), done=fails)
    eventually(lambda: lane.writers.queued() == 0)
    queue(lane, told, b"good")
    eventually(lambda: told == [(b"good", Outcome.OK)])
    tier.fault = gate
    queue(lane, told, b"held 1", b"held 2")
    eventually(lambda: gate.entered == 2)
    queue(lane, told, b"first", done=fails)
    queue(lane, told, b"second")
    for _ in range(3):
        lane.record(Outcome.ERROR)
    assert told[-1] == (b"second", None), "what waits behind it is let go, too"
    gate.open()
    assert total(counters, "internal_errors_total", "write") == 5


def test_a_dropped_queue_leaves_what_does_not_match(lane, tier, counters):
    """A flush of one namespace waits for its chunk that is being written, and for no other."""
    gate = tier.fault = Gate("write")
    told = []
    for number in (1, 2):
        lane.writers.queue(write(b"%d" % number, told, B))
        eventually(lambda number=number: gate.entered == number)
    for number in (3, 4, 5, 6):
        lane.writers.queue(write(b"%d" % number, told, A))
    assert lane.writers.drop_queued(lambda queued: queued.namespace == A, timeout_s=5.0)
    assert sorted(key for key, outcome in told if outcome is None) == [b"3", b"4", b"5", b"6"]
    assert total(counters, "write_behind_dropped_total", "remote", "flushed") == 4
    assert not lane.writers.drop_queued(lambda queued: queued.namespace == B, timeout_s=0.05), "still being written"
    gate.open()
    eventually(lambda: len(told) == 6)


def test_close_writes_what_it_can_and_tells_the_rest(tier, counters):
    """A tier that hangs does not keep the process: its queue is dropped when the time is over."""
    lane = Lane(tier, counters, time.monotonic)
    told = []
    queue(lane, told, *numbered(5))
    lane.close(PATIENCE_S)
    assert len(told) == 5
    assert tier.usage().chunks == 5

    gate = tier.fault = Gate("write")

    def closed() -> float:
        entered, dropped = gate.entered, total(counters, "write_behind_dropped_total", "remote", "closing")
        lane = Lane(tier, counters, time.monotonic)
        queue(lane, told, *numbered(5))
        eventually(lambda: gate.entered == entered + 2)
        started = time.monotonic()
        lane.close(timeout_s=0.1)
        took = time.monotonic() - started
        assert total(counters, "write_behind_dropped_total", "remote", "closing") == dropped + 3
        queue(lane, told, b"late")
        assert told[-1] == (b"late", None)
        return took

    assert at_best(closed, 2.0)
    gate.open()


def test_a_write_that_outlasts_the_time_is_over_before_its_medium_closes(tier, counters, monkeypatch):
    """It is waited for as long again: a server whose connections close under it would not have the chunk."""
    lane, told, gate, at_close = Lane(tier, counters, time.monotonic), [], Gate("write"), []
    tier.fault = gate
    monkeypatch.setattr(tier, "close", lambda: at_close.extend(told))
    queue(lane, told, b"slow")
    eventually(lambda: gate.entered)
    closing = threading.Thread(target=lane.close, args=(1.0,))
    closing.start()
    time.sleep(1.2)
    gate.open()
    closing.join(PATIENCE_S)
    assert at_close == [(b"slow", Outcome.OK)]


def test_a_lane_that_nobody_closes_keeps_no_process():
    """Say where something fails between its start and its end: Python would wait for ever for what writes."""
    code = (
        "import time; from connector.memory_tier import MemoryTier; from tiertune_connector.counters import Counters; "
        "from tiertune_connector.slower.lane import Lane; Lane(MemoryTier(), Counters(), time.monotonic)"
    )
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=found, check=True, timeout=PATIENCE_S)


def test_a_lane_that_has_ended_answers_as_one_that_is_late(tier, counters):
    """Who asks at the end of a process, or waits then, gets no exception, which would be logged as a failure."""
    lane, gate = Lane(tier, counters, time.monotonic, patience_s=PATIENCE_S), Gate("present")
    tier.fault = gate
    with ThreadPoolExecutor(33) as askers:
        asked = [askers.submit(lane.present, A, [b"key"]) for _ in range(33)]
        eventually(lambda: (gate.entered, lane._askers._work_queue.qsize()) == (32, 1))
        lane.close()
        gate.open()
        assert {each.result(PATIENCE_S) for each in asked} == {0}
    assert lane.present(A, [b"key"]) == 0
    assert lane.prepare(lambda: Outcome.OK) is lane.probe(100) is Outcome.TIMEOUT
    assert lane.flush(A, None) == (Outcome.TIMEOUT, 0)
    assert lane.usage() == UNKNOWN
    assert total(counters, "internal_errors_total") == 0
