"""Probes of a slower tier: what they measure, close and teach, and when chunks are read again to measure."""

import itertools
import mmap
import resource

import pytest

from connector.lanes import Gate, total
from connector.memory_tier import MemoryTier
from connector.stores import PATIENCE_S, A, Clock, counted, eventually, payload, view
from tiertune_connector.chunk import NOBODY
from tiertune_connector.slower.lane import PROBE_NAMESPACE, Lane
from tiertune_connector.tiers import linux
from tiertune_connector.tiers.base import Outcome


@pytest.fixture
def tier():
    return MemoryTier()


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


def test_how_slowly_an_idle_connection_starts_is_not_what_a_fetch_costs(tier, counters):
    """Over 10 ms, TCP takes fifteen times as long for a probe's bytes; its gates would refuse whatever pays."""
    clock, idle = Clock(), True

    def starting_slowly(operation: str) -> None:
        nonlocal idle
        if operation == "read":
            clock.now += 0.06 if idle else 0.004
            idle = False

    tier.fault = starting_slowly
    lane = Lane(tier, counters, clock)
    for _ in range(2):
        idle = True
        lane.probe(1 << 18)
        assert lane.transit.estimate().seconds(1, 1 << 18) == pytest.approx(0.004)
    lane.close()


def test_a_probe_whose_first_read_fails_has_failed(tier, counters):
    """It does not read again: the next one, when the tier is warm, would not say that requests have to wait."""
    outcomes = iter([Outcome.TIMEOUT, None])
    lane = Lane(tier, counters, Clock())
    lane.probe(1 << 18)
    tier.fault = lambda operation: next(outcomes) if operation == "read" else None
    assert lane.probe(1 << 18) is Outcome.TIMEOUT
    assert next(outcomes, "read again") is None
    lane.close()


@pytest.mark.parametrize(
    ("carries", "believed_s", "then_s"),
    [(True, 0.05, 0.01), (True, 0.002, 0.01), (True, None, 0.01), (False, 0.05, 0.05)],
)
def test_a_server_without_room_is_measured_by_what_it_refuses(tier, counters, carries, believed_s, then_s):
    """It holds nothing to be read: what was believed when it lost its room, or nothing, would be so for ever."""
    clock, writes = Clock(), iter([0.05, 0.011])
    lane = Lane(tier, counters, clock, hung_s=None if carries else 10.0)
    if believed_s:
        lane.transit.asked(1 << 16)
        clock.now += believed_s
        lane.transit.ended(1 << 16, Outcome.OK)

    def full(operation: str) -> Outcome | None:
        clock.now += next(writes) if operation == "write" else 0.001
        return Outcome.FULL if operation == "write" else None

    tier.fault = full
    assert lane.probe(1 << 16) is Outcome.FULL
    assert lane.transit.estimate().seconds(1, 1 << 16) == pytest.approx(then_s, rel=0.03)
    lane.close()


def test_what_a_fetch_costs_is_measured_again_where_nobody_asks(tier, counters):
    """A tier that was slow once would be slow for ever: its gates refuse, and so nobody would tell better."""
    clock, gate = Clock(), Gate("read")
    lane = Lane(tier, counters, clock, patience_s=PATIENCE_S)
    tier.write(A, b"k", view(payload(b"k", 1000)), NOBODY)

    def measure():
        lane.measure(lambda out: tier.read(A, b"k", out), 1000, silent_s=20.0)
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


def test_what_is_found_damaged_while_it_is_measured_is_counted(tier, counters):
    """It is a request's chunk, and has left: else nobody would hear of it. One that has left before is no error."""
    clock = Clock()
    lane = Lane(tier, counters, clock, patience_s=PATIENCE_S)
    lane.transit.asked(1000)
    clock.now += 1.0
    lane.transit.ended(1000, Outcome.OK)
    for outcome in (Outcome.CORRUPT, Outcome.ERROR, Outcome.MISS):
        clock.now += 30.0
        lane.measure(lambda _, told=outcome: (told, NOBODY), 1000, silent_s=20.0)
        eventually(lane._probing.done)
    assert counted(counters, "tier_errors_total") == {
        ("remote", "probe", "corrupt"): 1,
        ("remote", "probe", "error"): 1,
    }
    lane.close()


def test_a_size_that_nobody_fetches_is_measured_though_others_are(tier, counters):
    """A gate that finds another model's chunks too dear by those that come would refuse them for ever."""
    clock, asked = Clock(), []
    lane = Lane(tier, counters, clock, patience_s=PATIENCE_S)

    def measure(nbytes):
        lane.measure(lambda _: asked.append(nbytes) or (Outcome.OK, NOBODY), nbytes, silent_s=20.0)
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
        return Outcome.OK, NOBODY

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


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_chunk_is_measured_into_memory_that_is_there_got_with_the_gil_free(tier, counters, monkeypatch, old_kernel):
    """The kernel takes 10 ms for 32 MiB: no part of a read, and the store serves meanwhile, unless it is old."""
    clock, made, faults, nbytes = Clock(), [], [], 256 * mmap.PAGESIZE + 1
    lane = Lane(tier, counters, clock, patience_s=PATIENCE_S)
    real = mmap.mmap
    monkeypatch.setattr(linux.mmap, "mmap", lambda fd, size, flags: made.append(flags) or real(fd, size, flags))
    if old_kernel:
        monkeypatch.setattr(linux, "populate", lambda *_: False)

    def read(out):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        out[:: mmap.PAGESIZE] = bytes(257)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        return Outcome.OK, NOBODY

    lane.transit.asked(nbytes)
    clock.now += 1.0
    lane.transit.ended(nbytes, Outcome.OK)
    clock.now += 30.0
    lane.measure(read, nbytes, silent_s=20.0)
    eventually(lane._probing.done)
    assert [bool(flags & mmap.MAP_POPULATE) for flags in made] == ([False, True] if old_kernel else [False])
    assert len(faults) == 1
    assert faults[0] < 10
    lane.close()
