"""What comes over one way at a time: its speed is learned, and the queue told, however many share it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.slow_link import Pipe
from tiertune_connector.cost import FetchCost, Traffic

CHUNK = 1 << 20
SPEED = 10.0 * CHUNK


def way(**cost):
    """One without latency."""
    return Traffic(FetchCost(**{"t0_s": 0.0} | cost))


class Clockwork:
    """Events in the order of time, and a pipe among them."""

    def __init__(self):
        self._events, self._number = [], 0
        self.traffic = way(now=0.0)
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
            estimate = self.traffic.estimate(now)
            predicted_s = estimate and estimate.seconds(chunks, chunks * CHUNK)

            def ended(at):
                nonlocal left
                left -= 1
                self.traffic.ended(CHUNK, at, came=True)
                if not left:
                    told.append((predicted_s, at - now))

            for _ in range(chunks):
                self.traffic.asked(CHUNK, now)
                self.pipe.ask(CHUNK, now, ended)

        return begin


def ask(traffic, chunks, now):
    for _ in range(chunks):
        traffic.asked(CHUNK, now)


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("chunks", [4, 40])
def test_predictions_are_right_whether_one_load_is_under_way_or_eight(at_once, chunks):
    """The bandwidth is the way's, not a load's share of it, and each load is told its place in the queue."""
    clockwork, told = Clockwork(), []
    for round_ in range(6):
        for _ in range(at_once):
            clockwork.at(1000.0 * round_, clockwork.load(chunks, told))
    clockwork.run()
    assert clockwork.traffic.estimate(1e6).bytes_per_s == pytest.approx(SPEED, rel=0.01)
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
    assert clockwork.traffic.estimate(1e6).bytes_per_s == pytest.approx(SPEED, rel=0.25)
    late = [actual_s - predicted_s for predicted_s, actual_s in told if predicted_s is not None]
    assert max(map(abs, late[10:])) <= 2 * 8 * CHUNK / SPEED


def test_the_queue_is_what_is_under_way():
    """Bytes asked for, over the bandwidth; nothing once they are here."""
    traffic = way(t0_s=0.5, bytes_per_s=SPEED)
    told = [traffic.asked(CHUNK, 0.0) for _ in range(20)]
    assert told == pytest.approx([0.5 + 0.1 * (ahead + 1) for ahead in range(20)])
    assert traffic.estimate(0.0).queue_s == pytest.approx(2.0)
    for _ in range(20):
        traffic.ended(CHUNK, 2.5, came=True)
    assert traffic.estimate(2.5).queue_s == 0.0


def test_what_is_under_way_for_others_too_is_no_queue_of_its_own():
    """Who wants 15 of 20 chunks that come waits for five, of a quarter of the loads; of all 20, for nobody."""
    traffic = way(t0_s=0.5, bytes_per_s=SPEED)
    traffic.transfers = 4
    ask(traffic, 20, 0.0)
    some, all_, ended = (traffic.estimate(0.0, chunks, chunks * CHUNK) for chunks in (15, 20, 21))
    assert (some.queue_s, some.transfers) == (pytest.approx(0.5), 1)
    assert (all_.queue_s, all_.transfers) == (ended.queue_s, ended.transfers) == (0.0, 0)


def test_a_long_load_teaches_before_it_ends():
    """After a piece of it, so that a slowdown is known while it lasts."""
    clockwork, told = Clockwork(), []
    clockwork.at(0.0, clockwork.load(40, told))
    clockwork.at(50.0, lambda _: setattr(clockwork.pipe, "bytes_per_s", SPEED / 10))
    clockwork.at(100.0, clockwork.load(400, told))
    seen = []
    clockwork.at(120.0, lambda now: seen.append(clockwork.traffic.estimate(now).bytes_per_s))
    clockwork.run()
    assert seen == [pytest.approx(SPEED / 10, rel=0.05)]


def test_a_piece_is_long_enough_in_chunks_and_in_time():
    """Sixteen chunks that came in an eighth of a second teach nothing yet; at a quarter they do, and so each time."""
    traffic = way(now=0.0)
    ask(traffic, 40, 10.0)
    seen = []
    for at in [10.125] * 16 + [10.25] + [10.375] * 15 + [10.5]:
        traffic.ended(CHUNK, at, came=True)
        seen.append(traffic.cost.samples)
    assert seen == [0] * 16 + [1] * 16 + [2]


def test_a_rest_as_long_as_a_piece_is_believed():
    """What was half done at its begin does not matter in so many chunks."""
    traffic = way(now=0.0)
    ask(traffic, 32, 10.0)
    for at in (11.0, 13.0):
        for _ in range(16):
            traffic.ended(CHUNK, at, came=True)
    assert traffic.cost.samples == 2


def test_an_estimate_tells_who_waits_for_the_way():
    """Whether bytes are under way or not."""
    traffic = Traffic(FetchCost(bytes_per_s=SPEED))
    traffic.transfers = 3
    assert traffic.estimate(0.0).transfers == 3
    traffic.asked(CHUNK, 0.0)
    assert traffic.estimate(0.0).transfers == 3


def test_the_last_chunks_of_a_long_load_do_not_look_too_fast():
    """Two chunks that were nearly here when the piece before them ended tell nothing of the speed."""
    traffic = way(now=0.0)
    ask(traffic, 18, 0.0)
    for number in range(1, 17):
        traffic.ended(CHUNK, number * CHUNK / SPEED, came=True)
    for _ in range(2):
        traffic.ended(CHUNK, 16.1 * CHUNK / SPEED, came=True)
    assert traffic.estimate(10.0).bytes_per_s == pytest.approx(SPEED)
    assert traffic.estimate(10.0).queue_s == 0


@pytest.mark.parametrize("seconds", [1e-4, 1.0])
def test_what_failed_teaches_nothing(seconds):
    """A miss is no speed, whether it was told at once or late."""
    traffic = way(bytes_per_s=SPEED)
    traffic.asked(CHUNK, 0.0)
    traffic.ended(CHUNK, seconds, came=False)
    assert traffic.estimate(1.0).samples == 0


def test_what_timed_out_was_at_most_so_fast():
    """All that was asked for, as one load that would have taken so long; of a faster way it teaches nothing."""
    traffic = way(bytes_per_s=SPEED)
    traffic.asked(CHUNK, 0.0)
    traffic.ended(CHUNK, 1e-3, came=False, timed_out=True)
    assert traffic.estimate(1.0).samples == 0
    ask(traffic, 2, 10.0)
    traffic.ended(CHUNK, 10.5, came=False, timed_out=True)
    traffic.ended(CHUNK, 11.0, came=False, timed_out=True)
    assert traffic.estimate(11.0).bytes_per_s == pytest.approx(2 * CHUNK)


def test_a_load_given_up_teaches_that_what_is_under_way_takes_longer():
    """As one load of all that could be half done by then, which took at least so long; of a faster way, nothing."""
    traffic, twin = (way(bytes_per_s=4 * SPEED) for _ in range(2))
    for number in range(10):
        traffic.asked(CHUNK, 10.0 + number / 10)
    traffic.given_up(None, 2.0, 12.0)
    twin.cost.observe(1, 8 * CHUNK, 2.0, 12.0)
    assert traffic.estimate(12.0).bytes_per_s == twin.estimate(12.0).bytes_per_s < 4 * SPEED
    before = traffic.estimate(12.0)
    traffic.given_up(None, 2.0, 10.0 + 1e-3)
    assert traffic.estimate(12.0) == before


def test_a_load_given_up_with_nothing_under_way_teaches_no_speed():
    """All of it has come, or failed, meanwhile."""
    traffic = way(bytes_per_s=SPEED)
    traffic.given_up(None, 2.0, 12.0)
    assert traffic.estimate(12.0).samples == 0


@pytest.mark.parametrize("how", ["loaded", "given up"])
def test_predictions_are_judged_by_what_loads_took(how):
    """One that took longer makes doubt as the cost alone would; one given up before its time, or untold, makes none."""
    traffic, twin = (way(bytes_per_s=SPEED) for _ in range(2))

    def took(predicted_s, actual_s):
        if how == "loaded":
            traffic.loaded(predicted_s, actual_s)
        else:
            traffic.given_up(predicted_s, actual_s, 1.0)
        return traffic.estimate(1.0).doubt

    sure = took(None, 5.0)
    if how == "given up":
        assert took(5.0, 1.0) == took(1.0, 1.0) == sure
    twin.loaded(1.0, 5.0)
    assert took(1.0, 5.0) == twin.estimate(1.0).doubt > sure


def test_a_way_that_hangs_is_slow_while_it_hangs():
    """A load that gives up tells that no more than what was asked for at once can be half done."""
    traffic = way(bytes_per_s=SPEED)
    predicted_s = [traffic.asked(CHUNK, 0.0) for _ in range(30)][-1]
    traffic.given_up(predicted_s, 1.0, 1.0)
    assert traffic.estimate(1.0).bytes_per_s == pytest.approx(8 * CHUNK)
    traffic.given_up(predicted_s, 8.0, 8.0)
    assert traffic.estimate(8.0).bytes_per_s == pytest.approx(CHUNK)
    assert traffic.estimate(8.0).doubt > 0.5


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "come", "miss", "late", "give_up"]), st.floats(0, 10)), max_size=60
    )
)
def test_no_order_of_events_makes_nonsense(steps):
    """Queues and bandwidths stay positive and finite, and a way on which nothing is left has no queue."""
    traffic, under_way, now = Traffic(FetchCost()), 0, 0.0
    for step, elapsed_s in steps:
        now += elapsed_s
        if step == "ask":
            under_way += 1
            traffic.asked(CHUNK, now)
        elif step == "give_up":
            traffic.given_up(elapsed_s, now, now)
        elif under_way:
            under_way -= 1
            traffic.ended(CHUNK, now, came=step == "come", timed_out=step == "late")
        estimate = traffic.estimate(now)
        if estimate is not None:
            assert 0 < estimate.bytes_per_s < float("inf")
            assert (estimate.queue_s == 0) == (under_way == 0)
        assert bool(traffic._sizes) == bool(under_way), "of no size that is not under way"


def test_a_way_that_stalled_has_no_price():
    """What was learned of it is forgotten, and the few chunks that come when it goes on are no new sample."""
    traffic = way(now=0.0)
    traffic.asked(CHUNK, 0.0)
    traffic.ended(CHUNK, 0.1, came=True)
    ask(traffic, 2, 1.0)
    traffic.given_up(0.1, 9.0, 10.0)
    assert traffic.estimate(10.0).bytes_per_s < SPEED / 10
    traffic.stalled(11.0)
    assert traffic.estimate(11.0) is None
    for _ in range(2):
        traffic.ended(CHUNK, 11.001, came=True)
    assert traffic.estimate(12.0) is None
    traffic.asked(CHUNK, 12.0)
    traffic.ended(CHUNK, 12.1, came=True)
    assert traffic.estimate(13.0).bytes_per_s == pytest.approx(SPEED)


def test_what_is_asked_after_a_stall_teaches_at_once():
    """What was under way was given up while the stall went on, so nothing that comes then was half done."""
    traffic = way(now=0.0)
    ask(traffic, 2, 1.0)
    traffic.stalled(11.0)
    for _ in range(2):
        traffic.ended(CHUNK, 11.0, came=False)
    traffic.stalled(12.0)
    traffic.asked(CHUNK, 20.0)
    traffic.ended(CHUNK, 20.1, came=True)
    assert traffic.estimate(21.0).bytes_per_s == pytest.approx(SPEED)


def test_a_way_that_stays_silent_after_a_stall_is_slow_from_then_on():
    """What is still under way counts from the stall, not from when it was asked for."""
    traffic = way(now=0.0)
    ask(traffic, 2, 1.0)
    traffic.stalled(11.0)
    traffic.given_up(None, 12.0, 13.0)
    assert traffic.estimate(13.0).bytes_per_s == pytest.approx(CHUNK)
