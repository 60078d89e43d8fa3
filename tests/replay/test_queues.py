"""Queues of a replay: who waits, for how long, and that nobody waits in vain."""

from hypothesis import given
from hypothesis import strategies as st

from tiertune_agent.replay.play import LinkQueue, PrefillQueue

REQUESTS = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0.01, 3)),  # since the last arrival, fetch, prefill
    min_size=1,
    max_size=30,
)


def played(requests):
    """Arrival, readiness and seconds of every request, and when each ended."""
    queue, at_s, told, ends = PrefillQueue(), 0.0, [], {}
    for number, (gap_s, fetch_s, seconds) in enumerate(requests):
        at_s += gap_s
        ends.update(queue.until(at_s))
        queue.put(number, at_s + fetch_s, seconds)
        told.append((at_s, at_s + fetch_s, seconds))
    ends.update(queue.until(float("inf")))
    return told, ends


@given(REQUESTS)
def test_an_engine_serves_the_ready_ones_in_order_and_never_idles_before_them(requests):
    """Its queue equals the definition: when free it takes whoever has been ready for the longest."""
    told, ends = played(requests)
    waiting = sorted((ready, number) for number, (_, ready, _) in enumerate(told))
    free_s, expected = 0.0, {}
    while waiting:
        ready_s, number = waiting.pop(0)
        free_s = expected[number] = max(free_s, ready_s) + told[number][2]
    assert ends == expected


@given(REQUESTS, st.floats(0, 40))
def test_the_backlog_is_the_work_that_is_left(requests, later_s):
    """All seconds put in less those that were worked until then; nobody is left once all is done."""
    queue = PrefillQueue()
    for number, (_, fetch_s, seconds) in enumerate(requests):
        queue.put(number, fetch_s, seconds)
    ends = dict(queue.until(later_s))
    worked_s = 0.0
    for number, end in ends.items():
        start = end - requests[number][2]
        worked_s += min(end, later_s) - start
    left_s = sum(seconds for *_, seconds in requests) - worked_s
    assert abs(queue.backlog_s(later_s) - left_s) < 1e-6
    left = len(requests) - sum(end <= later_s for end in ends.values())
    assert queue.requests(later_s) == left


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=30))
def test_a_link_passes_one_transfer_after_another(transfers):
    """In the order of asking, without a gap while anyone waits; the told waits are the true ones."""
    link, at_s, free_s = LinkQueue(), 0.0, 0.0
    ends = []
    for gap_s, seconds in transfers:
        at_s += gap_s
        assert link.transfers(at_s) == sum(end > at_s for end in ends)
        assert link.start_s(at_s) == max(at_s, free_s)
        free_s = link.start_s(at_s) + seconds
        link.add(free_s)
        ends.append(free_s)
