"""What comes over one way at a time: its speed is learned, and the queue told, however many share it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.slow_link import Pipe
from connector.ways import Way
from tiertune_connector.slower.transit import Transit
from tiertune_connector.tiers.base import Outcome

CHUNK = 1 << 20
SPEED = 10.0 * CHUNK


ENDS = {"come": Outcome.OK, "miss": Outcome.MISS, "late": Outcome.TIMEOUT}


class Clockwork:
    """Events in the order of time, and a pipe among them."""

    def __init__(self):
        self._events, self._number = [], 0
        self.traffic = Way(now=0.0)
        self.pipe = Pipe(SPEED, self.at)

    def at(self, at, act):
        self._number += 1
        self._events.append((at, self._number, act))

    def run(self):
        while self._events:
            event = min(self._events)
            self._events.remove(event)
            event[2](event[0])

    def load(self, chunks, told):
        """Ask for chunks; tell the predicted and the actual seconds of the whole."""

        def begin(now):
            left = chunks
            estimate = self.traffic.at(now).estimate()
            predicted_s = estimate and estimate.seconds(chunks, chunks * CHUNK)

            def ended(at):
                nonlocal left
                left -= 1
                self.traffic.at(at).ended(CHUNK, Outcome.OK)
                if not left:
                    told.append((predicted_s, at - now))

            for _ in range(chunks):
                self.traffic.at(now).asked(CHUNK)
                self.pipe.ask(CHUNK, now, ended)

        return begin


def ask(traffic, chunks, now):
    for _ in range(chunks):
        traffic.at(now).asked(CHUNK)


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("chunks", [4, 40])
def test_predictions_are_right_whether_one_load_is_under_way_or_eight(at_once, chunks):
    """The bandwidth is the way's, not a load's share of it, and each load is told its place in the queue."""
    clockwork, told = Clockwork(), []
    for round_ in range(6):
        for _ in range(at_once):
            clockwork.at(1000.0 * round_, clockwork.load(chunks, told))
    clockwork.run()
    assert clockwork.traffic.at(1e6).estimate().bytes_per_s == pytest.approx(SPEED, rel=0.01)
    for predicted_s, actual_s in told[at_once:]:
        # Eight chunks share the pipe, so a load may wait for some that were asked for after it.
        shared_s = 8 * CHUNK / SPEED if at_once > 1 else 0.0
        assert predicted_s == pytest.approx(actual_s, abs=shared_s, rel=0.01)


def test_loads_that_overlap_teach_the_whole_speed():
    """Loads that begin while others are under way, without a pause, are not taken for a slower way."""
    clockwork, told = Clockwork(), []
    for start in range(60):
        clockwork.at(0.35 * start, clockwork.load(3 + start % 3, told))
    clockwork.run()
    assert clockwork.traffic.at(1e6).estimate().bytes_per_s == pytest.approx(SPEED, rel=0.25)
    late = [actual_s - predicted_s for predicted_s, actual_s in told if predicted_s is not None]
    assert max(map(abs, late[10:])) <= 2 * 8 * CHUNK / SPEED


def test_the_queue_is_what_is_under_way():
    """Bytes asked for, over the bandwidth; nothing once they are here."""
    traffic = Way(t0_s=0.5, bytes_per_s=SPEED)
    told = [traffic.at(0.0).asked(CHUNK) for _ in range(20)]
    assert told == pytest.approx([0.5 + 0.1 * (ahead + 1) for ahead in range(20)])
    assert traffic.at(0.0).estimate().queue_s == pytest.approx(2.0)
    for _ in range(20):
        traffic.at(2.5).ended(CHUNK, Outcome.OK)
    assert traffic.at(2.5).estimate().queue_s == 0.0


def test_what_is_under_way_for_others_too_is_no_queue_of_its_own():
    """Who wants 15 of 20 chunks that come waits for five, of a quarter of the loads; of all 20, for nobody."""
    traffic = Way(t0_s=0.5, bytes_per_s=SPEED)
    traffic.transit.awaited(4)
    ask(traffic, 20, 0.0)
    some, all_, ended = (traffic.at(0.0).estimate(chunks, chunks * CHUNK) for chunks in (15, 20, 21))
    assert (some.queue_s, some.transfers) == (pytest.approx(0.5), 1)
    assert (all_.queue_s, all_.transfers) == (ended.queue_s, ended.transfers) == (0.0, 0)


def test_a_long_load_teaches_before_it_ends():
    """After a piece of it, so that a slowdown is known while it lasts."""
    clockwork, told = Clockwork(), []
    clockwork.at(0.0, clockwork.load(40, told))
    clockwork.at(50.0, lambda _: setattr(clockwork.pipe, "bytes_per_s", SPEED / 10))
    clockwork.at(100.0, clockwork.load(400, told))
    seen = []
    clockwork.at(120.0, lambda now: seen.append(clockwork.traffic.at(now).estimate().bytes_per_s))
    clockwork.run()
    assert seen == [pytest.approx(SPEED / 10, rel=0.05)]


def test_a_piece_is_long_enough_in_chunks_and_in_time():
    """Sixteen chunks that came in an eighth of a second teach nothing yet; at a quarter they do, and so each time."""
    traffic = Way(now=0.0)
    ask(traffic, 40, 10.0)
    seen = []
    for at in [10.125] * 16 + [10.25] + [10.375] * 15 + [10.5]:
        traffic.at(at).ended(CHUNK, Outcome.OK)
        seen.append(traffic.transit._cost.samples)
    assert seen == [0] * 16 + [1] * 16 + [2]


def test_a_rest_as_long_as_a_piece_is_believed():
    """What was half done at its begin does not matter in so many chunks."""
    traffic = Way(now=0.0)
    ask(traffic, 32, 10.0)
    for at in (11.0, 13.0):
        for _ in range(16):
            traffic.at(at).ended(CHUNK, Outcome.OK)
    assert traffic.transit._cost.samples == 2


def test_an_estimate_tells_who_waits_for_the_way():
    """Whether bytes are under way or not."""
    traffic = Way(bytes_per_s=SPEED)
    traffic.transit.awaited(3)
    assert traffic.at(0.0).estimate().transfers == 3
    traffic.at(0.0).asked(CHUNK)
    assert traffic.at(0.0).estimate().transfers == 3


def test_the_last_chunks_of_a_long_load_do_not_look_too_fast():
    """Two chunks that were nearly here when the piece before them ended tell nothing of the speed."""
    traffic = Way(now=0.0)
    ask(traffic, 18, 0.0)
    for number in range(1, 17):
        traffic.at(number * CHUNK / SPEED).ended(CHUNK, Outcome.OK)
    for _ in range(2):
        traffic.at(16.1 * CHUNK / SPEED).ended(CHUNK, Outcome.OK)
    assert traffic.at(10.0).estimate().bytes_per_s == pytest.approx(SPEED)
    assert traffic.at(10.0).estimate().queue_s == 0


@pytest.mark.parametrize("seconds", [1e-4, 1.0])
def test_what_failed_teaches_nothing(seconds):
    """A miss is no speed, whether it was told at once or late."""
    traffic = Way(bytes_per_s=SPEED)
    traffic.at(0.0).asked(CHUNK)
    traffic.at(seconds).ended(CHUNK, Outcome.MISS)
    assert traffic.at(1.0).estimate().samples == 0


def test_what_timed_out_was_at_most_so_fast():
    """All that was asked for, as one load that would have taken so long; of a faster way it teaches nothing."""
    traffic = Way(bytes_per_s=SPEED)
    traffic.at(0.0).asked(CHUNK)
    traffic.at(1e-3).ended(CHUNK, Outcome.TIMEOUT)
    assert traffic.at(1.0).estimate().samples == 0
    ask(traffic, 2, 10.0)
    traffic.at(10.5).ended(CHUNK, Outcome.TIMEOUT)
    traffic.at(11.0).ended(CHUNK, Outcome.TIMEOUT)
    assert traffic.at(11.0).estimate().bytes_per_s == pytest.approx(2 * CHUNK)


def test_a_load_given_up_teaches_that_what_is_under_way_takes_longer():
    """As one load of all that could be half done by then, which took at least so long; of a faster way, nothing."""
    traffic, twin = (Way(bytes_per_s=4 * SPEED) for _ in range(2))
    for number in range(10):
        traffic.at(10.0 + number / 10).asked(CHUNK)
    traffic.at(12.0).given_up(None, 2.0)
    twin.transit._cost.observe(1, 8 * CHUNK, 2.0, 12.0)
    assert traffic.at(12.0).estimate().bytes_per_s == twin.at(12.0).estimate().bytes_per_s < 4 * SPEED
    before = traffic.at(12.0).estimate()
    traffic.at(10.0 + 1e-3).given_up(None, 2.0)
    assert traffic.at(12.0).estimate() == before


def test_a_load_given_up_with_nothing_under_way_teaches_no_speed():
    """All of it has come, or failed, meanwhile."""
    traffic = Way(bytes_per_s=SPEED)
    traffic.at(12.0).given_up(None, 2.0)
    assert traffic.at(12.0).estimate().samples == 0


@pytest.mark.parametrize("how", ["loaded", "given up"])
def test_predictions_are_judged_by_what_loads_took(how):
    """One that took longer makes doubt as the cost alone would; one given up before its time, or untold, makes none."""
    traffic, twin = (Way(bytes_per_s=SPEED) for _ in range(2))

    def took(predicted_s, actual_s):
        if how == "loaded":
            traffic.transit.loaded(predicted_s, actual_s)
        else:
            traffic.at(1.0).given_up(predicted_s, actual_s)
        return traffic.at(1.0).estimate().doubt

    sure = took(None, 5.0)
    if how == "given up":
        assert took(5.0, 1.0) == took(1.0, 1.0) == sure
    twin.transit.loaded(1.0, 5.0)
    assert took(1.0, 5.0) == twin.at(1.0).estimate().doubt > sure


def test_a_way_that_hangs_is_slow_while_it_hangs():
    """A load that gives up tells that no more than what was asked for at once can be half done."""
    traffic = Way(bytes_per_s=SPEED)
    predicted_s = [traffic.at(0.0).asked(CHUNK) for _ in range(30)][-1]
    traffic.at(1.0).given_up(predicted_s, 1.0)
    assert traffic.at(1.0).estimate().bytes_per_s == pytest.approx(8 * CHUNK)
    traffic.at(8.0).given_up(predicted_s, 8.0)
    assert traffic.at(8.0).estimate().bytes_per_s == pytest.approx(CHUNK)
    assert traffic.at(8.0).estimate().doubt > 0.5


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "come", "miss", "late", "give_up"]), st.floats(0, 10)), max_size=60
    )
)
def test_no_order_of_events_makes_nonsense(steps):
    """Queues and bandwidths stay positive and finite, and a way on which nothing is left has no queue."""
    traffic, under_way, now = Way(), 0, 0.0
    for step, elapsed_s in steps:
        now += elapsed_s
        if step == "ask":
            under_way += 1
            traffic.at(now).asked(CHUNK)
        elif step == "give_up":
            traffic.at(now).given_up(elapsed_s, now)
        elif under_way:
            under_way -= 1
            traffic.at(now).ended(CHUNK, ENDS[step])
        estimate = traffic.at(now).estimate()
        if estimate is not None:
            assert 0 < estimate.bytes_per_s < float("inf")
            assert (estimate.queue_s == 0) == (under_way == 0)
        assert bool(traffic.transit._sizes) == bool(under_way), "of no size that is not under way"


def test_a_way_that_stalled_has_no_price():
    """What was learned of it is forgotten, and the few chunks that come when it goes on are no new sample."""
    traffic = Way(now=0.0)
    traffic.at(0.0).asked(CHUNK)
    traffic.at(0.1).ended(CHUNK, Outcome.OK)
    ask(traffic, 2, 1.0)
    traffic.at(10.0).given_up(0.1, 9.0)
    assert traffic.at(10.0).estimate().bytes_per_s < SPEED / 10
    traffic.at(11.0).stalled()
    assert traffic.at(11.0).estimate() is None
    for _ in range(2):
        traffic.at(11.001).ended(CHUNK, Outcome.OK)
    assert traffic.at(12.0).estimate() is None
    traffic.at(12.0).asked(CHUNK)
    traffic.at(12.1).ended(CHUNK, Outcome.OK)
    assert traffic.at(13.0).estimate().bytes_per_s == pytest.approx(SPEED)


def test_what_is_asked_after_a_stall_teaches_at_once():
    """What was under way was given up while the stall went on, so nothing that comes then was half done."""
    traffic = Way(now=0.0)
    ask(traffic, 2, 1.0)
    traffic.at(11.0).stalled()
    for _ in range(2):
        traffic.at(11.0).ended(CHUNK, Outcome.MISS)
    traffic.at(12.0).stalled()
    traffic.at(20.0).asked(CHUNK)
    traffic.at(20.1).ended(CHUNK, Outcome.OK)
    assert traffic.at(21.0).estimate().bytes_per_s == pytest.approx(SPEED)


def test_a_way_that_stays_silent_after_a_stall_is_slow_from_then_on():
    """What is still under way counts from the stall, not from when it was asked for."""
    traffic = Way(now=0.0)
    ask(traffic, 2, 1.0)
    traffic.at(11.0).stalled()
    traffic.at(13.0).given_up(None, 12.0)
    assert traffic.at(13.0).estimate().bytes_per_s == pytest.approx(CHUNK)


@pytest.fixture
def transit(clock):
    """Of a tier whose chunks have come in a tenth of a second each."""
    made = Transit(clock)
    for _ in range(8):
        brought(made, clock, 0.1, Outcome.OK)
    return made


def brought(transit, clock, seconds, outcome):
    transit.asked(CHUNK)
    clock.now += seconds
    transit.ended(CHUNK, outcome)


def fetched_s(transit):
    return transit.estimate().seconds(1, CHUNK)


def test_what_timed_out_costs_more_and_what_failed_no_less(transit, clock):
    """A tier that hangs is believed to be slow; one that refuses at once is not believed to be fast."""
    before = fetched_s(transit)
    brought(transit, clock, 0.0, Outcome.ERROR)
    assert fetched_s(transit) == pytest.approx(before)
    brought(transit, clock, 10.0, Outcome.TIMEOUT)
    assert fetched_s(transit) > 2 * before


def test_an_answer_without_bytes_tells_the_round_trip(transit):
    """Part of what chunks took is the way there and back, of which their number and not their size pays."""
    before = transit.estimate().seconds(1, 1)
    transit.answered(1e-2)
    assert transit.estimate().seconds(1, 1) == pytest.approx(1e-2, rel=0.1)
    assert transit.estimate().seconds(1, 1) != pytest.approx(before, rel=0.1)
