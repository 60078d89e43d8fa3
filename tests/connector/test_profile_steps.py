"""Steps: every second and token counted once, by phase, whether the device was measured or the wall."""

from time import perf_counter
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import Clock
from tiertune_connector.profile.reports import Reporter, Totals
from tiertune_connector.profile.steps import IN_FLIGHT, Steps


class FakeSink:
    """A store that takes reports while it is there."""

    def __init__(self, there=True):
        self.there, self.taken = there, []

    def report_steps(self, steps):
        if self.there:
            self.taken += steps
        return self.there


@pytest.fixture
def seen():
    return []


@pytest.fixture
def steps(clock, seen):
    return Steps(stage="talker", clock=clock, observe=lambda spans, seconds: seen.append((list(spans), seconds)))


def taken(steps: Steps) -> dict[str, tuple[float, int]]:
    return {report.phase: (report.gpu_seconds, report.tokens) for report in steps.totals.take()}


def run(steps: Steps, clock, spans, seconds) -> int:
    number = steps.given(spans)
    clock.now += seconds
    steps.output()
    return number


def run_empty(steps: Steps, clock, count: int) -> None:
    for _ in range(count):
        run(steps, clock, [], 0.0)


class TestWallTime:
    def test_steps_are_timed_from_output_to_output(self, steps, clock, seen):
        """A step given while another runs is charged only from that one's end; each is told to the observer once."""
        for at, spans in ((0.0, [(0, 500)]), (0.1, [(500, 1000)]), (0.2, [(1000, 1001), (0, 1)])):
            clock.now = at
            steps.given(spans)
        for at in (0.5, 1.0, 1.2):
            clock.now = at
            steps.output()
        assert taken(steps) == {"prefill": (pytest.approx(1.0), 1000), "decode": (pytest.approx(0.2), 2)}
        assert [spans for spans, _ in seen] == [[(0, 500)], [(500, 1000)], [(1000, 1001), (0, 1)]]
        assert [seconds for _, seconds in seen] == pytest.approx([0.5, 0.5, 0.2])
        assert taken(steps) == {}

    def test_how_long_steps_take_others_is_known_while_they_decode(self, steps, clock):
        """Steps that prefill tell nothing of it; with an empty step, or a pause, nobody decodes any more."""
        assert steps.decode_s == 0
        run(steps, clock, [(0, 500)], 0.5)
        assert steps.decode_s == 0
        run(steps, clock, [(500, 501), (7, 8)], 0.03)
        run(steps, clock, [(501, 502), (0, 300)], 0.3)
        assert steps.decode_s == pytest.approx(0.03)
        for _ in range(20):
            run(steps, clock, [(502, 503)], 0.06)
        assert steps.decode_s == pytest.approx(0.06, rel=0.02)
        clock.now += 0.2
        assert steps.decode_s == 0
        run(steps, clock, [(503, 504)], 0.06)
        assert steps.decode_s > 0
        run_empty(steps, clock, 1)
        assert steps.decode_s == 0

    @pytest.mark.parametrize(
        ("decode_tokens", "spans", "phase"),
        [
            (1, [(0, 64)], "prefill"),
            (1, [(0, 64), (7, 8)], "mixed"),
            (1, [(7, 8), (9, 10)], "decode"),
            (1, [(7, 11), (9, 10)], "mixed"),
            (4, [(7, 11), (9, 10)], "decode"),
            (4, [(7, 11), (0, 64)], "mixed"),
        ],
    )
    def test_a_step_is_of_one_phase(self, clock, decode_tokens, spans, phase):
        """Prefill, decode, or both at once; speculated tokens are decoded."""
        steps = Steps(stage="all", clock=clock, decode_tokens=decode_tokens)
        run(steps, clock, spans, 0.5)
        assert taken(steps) == {phase: (0.5, sum(end - first for first, end in spans))}

    def test_a_step_without_tokens_is_of_no_phase(self, steps, clock, seen):
        """An engine that steps only to wait for transfers uses no device; its output is paired all the same.

        It may come when the next step was given long ago: that one began then.
        """
        steps.given([])
        run(steps, clock, [(0, 8)], 1.0)
        clock.now += 0.5
        steps.output()
        assert taken(steps) == {"prefill": (1.5, 8)}
        assert seen == [([(0, 8)], 1.5)]

    def test_an_output_without_a_step_is_ignored(self, steps, clock):
        """What was given before the connector looked is not its to count."""
        clock.now = 3.0
        steps.output()
        assert taken(steps) == {}

    def test_every_rank_is_paid_for(self, clock):
        """Two devices that work on one step for a second are two GPU seconds; the step took one."""
        seconds = []
        steps = Steps(stage="all", clock=clock, ranks=2, observe=lambda _, took: seconds.append(took))
        run(steps, clock, [(0, 8)], 1.0)
        assert (taken(steps), seconds) == ({"prefill": (2.0, 8)}, [1.0])

    def test_given_and_ended_steps_are_told_apart(self, steps):
        """By the number of the last one: outputs come in the order in which the steps were given."""
        assert (steps.last, steps.ended) == (0, 0)
        numbers = [steps.given([(0, 1)]), steps.given([])]
        steps.output()
        assert (steps.last, steps.ended) == (numbers[1], numbers[0])
        steps.output()
        assert steps.ended == steps.last

    def test_outputs_after_a_fault_are_those_of_later_steps(self, steps, clock, seen):
        """Else each is taken for that of the step before, for ever: decodes take what prefills took."""
        steps.given([(0, 300)])
        steps.given([(300, 301)])
        steps.lost()
        run(steps, clock, [(0, 500)], 0.5)
        run(steps, clock, [(500, 501)], 0.03)
        assert seen == [([(0, 500)], pytest.approx(0.5)), ([(500, 501)], pytest.approx(0.03))]

    def test_steps_whose_output_never_comes_are_dropped(self, steps):
        """Oldest first: memory stays bounded."""
        for _ in range(IN_FLIGHT + 3):
            steps.given([(0, 1)])
        steps.output()
        assert steps.ended == 4
        for _ in range(IN_FLIGHT - 1):
            steps.output()
        assert steps.ended == steps.last


class TestMeasured:
    def test_the_device_is_counted_and_the_wall_observed(self, steps, clock, seen):
        """Measured a few steps late, by the step's number; what requests wait is the wall's."""
        steps.measured({0: (9.0,)})  # of before: only tells that there is a worker that measures
        first = run(steps, clock, [(0, 8)], 1.0)
        second = run(steps, clock, [(8, 9)], 1.0)
        assert taken(steps) == {}
        steps.measured({second: (0.125,)})
        steps.measured({first: (0.5,)})
        assert taken(steps) == {"prefill": (0.5, 8), "decode": (0.125, 1)}
        assert [seconds for _, seconds in seen] == [1.0, 1.0]

    def test_an_output_that_is_read_late_takes_nothing_from_the_next_step(self, steps, clock, seen):
        """A prefill is launched for 25 ms before the output of the decode ahead is read, and computed meanwhile.

        By the wall it took 3 ms then, the launch of the step behind it; on the device it took 20.
        """
        steps.measured({0: (9.0,)})
        decode = steps.given([(8, 9)])
        clock.now += 0.003
        prefill = steps.given([(0, 1024)])
        clock.now += 0.025
        steps.output()
        behind = steps.given([(9, 10)])
        clock.now += 0.003
        steps.output()
        steps.measured({decode: (0.008,), prefill: (0.02,)})
        steps.output()
        steps.measured({behind: (0.008,)})
        assert [(spans[0], pytest.approx(seconds)) for spans, seconds in seen] == [
            ((8, 9), 0.028),
            ((0, 1024), 0.02),
            ((9, 10), 0.008),
        ]

    def test_ranks_may_tell_one_by_one(self, clock):
        """All are paid; one that stays silent is taken as the mean. A step took what the slowest did, or the wall."""
        seen = []
        steps = Steps(stage="s", clock=clock, ranks=2, observe=lambda spans, seconds: seen.append(seconds))
        steps.measured({0: (9.0, 9.0)})
        together, one_by_one, silent = (run(steps, clock, [(0, 8)], 1.0) for _ in range(3))
        steps.measured({together: (0.25, 0.5), one_by_one: (1.0,)})
        assert taken(steps) == {"prefill": (0.75, 8)}
        steps.measured({one_by_one: (2.0,), silent: (4.0,)})
        assert taken(steps) == {"prefill": (3.0, 8)}
        run_empty(steps, clock, IN_FLIGHT)
        assert taken(steps) == {"prefill": (8.0, 8)}
        assert seen == [1.0, 2.0, 4.0]

    def test_a_measurement_may_come_before_the_output(self, steps, clock):
        """Both arrive in one message, in whatever order."""
        number = steps.given([(0, 8)])
        clock.now += 1.0
        steps.measured({number: (0.5,)})
        steps.output()
        assert taken(steps) == {"prefill": (0.5, 8)}

    def test_a_step_that_is_never_measured_counts_with_its_wall_time(self, steps, clock):
        """Behind so many newer ones; what is measured after that is not counted again."""
        steps.measured({0: (1.0,)})
        number = run(steps, clock, [(0, 8)], 1.0)
        run_empty(steps, clock, IN_FLIGHT - 1)
        assert taken(steps) == {}
        run_empty(steps, clock, 1)
        assert taken(steps) == {"prefill": (1.0, 8)}
        steps.measured({number: (0.5,)})
        assert taken(steps) == {}

    @given(
        events=st.lists(
            st.tuples(
                st.integers(0, 64),  # tokens of the step
                st.integers(0, 4),  # steps that its output lags behind
                st.one_of(st.none(), st.integers(0, 6)),  # steps that its measurement lags behind; None: never comes
            ),
            max_size=40,
        ),
        measures=st.booleans(),
    )
    def test_nothing_is_lost_or_counted_twice(self, events, measures):
        """Tokens of all phases are those of all steps, each observed once; seconds are the device's where told.

        The device tells more here than any wall.
        """
        clock, observed, added = Clock(), [], []
        steps = Steps(stage="s", clock=clock, observe=lambda spans, seconds: observed.append((spans[0], seconds)))
        add = steps.totals.add
        steps.totals.add = lambda *counted: (added.append(counted[2]), add(*counted))
        if measures:
            steps.measured({0: (0.0,)})
        outputs = 0
        given, reports, late = [], [], {}
        for index, (tokens, lag, measured) in enumerate(events):
            given.append(steps.given([(index, index + tokens)] if tokens else []))
            if measured is not None:
                late.setdefault(index + measured, {})[given[-1]] = (1000.0 + index,)
            clock.now += 0.5
            while outputs < len(given) - lag:
                steps.output()
                outputs += 1
            steps.measured(late.pop(index, {}))
            reports += steps.totals.take()
        while outputs < len(given):
            clock.now += 0.5
            steps.output()
            outputs += 1
        for more in late.values():
            steps.measured(more)
        run_empty(steps, clock, IN_FLIGHT)
        reports += steps.totals.take() + steps.totals.take()
        counted = [(index, event) for index, event in enumerate(events) if event[0]]
        assert sum(report.tokens for report in reports) == sum(event[0] for _, event in counted)
        assert sorted(first for (first, _), _ in observed) == [index for index, _ in counted]
        assert sum(seconds for _, seconds in observed if seconds < 1000) <= 0.5 * 2 * len(events)
        assert sum(report.gpu_seconds for report in reports) == pytest.approx(sum(added))
        device = [seconds for seconds in added if seconds >= 1000]
        assert set(device) <= {1000.0 + index for index, event in counted if event[2] is not None}
        assert len(set(device)) == len(device)
        assert added == [seconds for _, seconds in observed]


class TestReports:
    def test_waiting_is_a_phase_of_its_own(self, steps):
        """Seconds and tokens of requests that waited for chunks."""
        steps.kv_wait(0.5, 512)
        steps.kv_wait(0.25, 256)
        assert taken(steps) == {"kv_wait": (0.75, 768)}

    def test_what_a_store_did_not_take_is_told_later(self):
        """Reports wait for the store, and become one."""
        totals, sink = Totals(), FakeSink(there=False)
        totals.add("a", "decode", 0.5, 3)
        totals.report(sink)
        totals.add("a", "decode", 0.25, 1)
        sink.there = True
        totals.report(sink)
        totals.report(sink)
        assert [(r.stage, r.phase, r.gpu_seconds, r.tokens) for r in sink.taken] == [("a", "decode", 0.75, 4)]

    def test_what_a_store_failed_to_take_is_told_later(self):
        """Whatever went wrong in between."""
        totals, sink = Totals(), FakeSink()
        totals.add("a", "decode", 0.5, 3)
        with pytest.raises(AttributeError):
            totals.report(object())
        totals.report(sink)
        assert [(r.gpu_seconds, r.tokens) for r in sink.taken] == [(0.5, 3)]

    def test_nothing_negative_is_told(self):
        """The store's counters never fall, and it refuses what would make them."""
        totals = Totals()
        totals.add("a", "decode", -0.5, -3)
        (report,) = totals.take()
        assert (report.gpu_seconds, report.tokens) == (0.0, 0)

    def test_the_last_report_is_sent_at_the_end(self):
        """Closing a reporter hands over what was counted since."""
        totals, sink = Totals(), FakeSink()
        reporter = Reporter(totals, sink, every_s=3600)
        totals.add("a", "mixed", 1.0, 2)
        reporter.close()
        assert [report.tokens for report in sink.taken] == [2]

    def test_a_failing_poll_is_counted_and_the_rest_is_reported_later(self):
        """The thread that reports survives whatever a device throws at it, and nothing is lost by it."""
        totals, sink = Totals(), FakeSink()
        reporter = Reporter(totals, sink, every_s=3600, before=Mock(side_effect=RuntimeError("CUDA error")))
        totals.add("a", "mixed", 1.0, 2)
        reporter.close()
        assert (reporter.errors, sink.taken) == (1, [])
        totals.report(sink)
        assert [report.tokens for report in sink.taken] == [2]


def test_a_step_of_64_requests_costs_little(steps, clock):
    """Less than 100 microseconds of the scheduler's thread, in the best of some batches."""
    spans, best = [(n, n + 1) for n in range(64)], 1.0
    for _ in range(20):
        began = perf_counter()
        for _ in range(50):
            run(steps, clock, spans, 0.01)
        best = min(best, (perf_counter() - began) / 50)
    assert best < 100e-6
