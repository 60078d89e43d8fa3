"""A crew: everything in its place, as by one who does it alone; several at a time; and nothing that goes on."""

import threading
import time
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import no_more_threads
from tiertune_connector.copying import crew as crew_module
from tiertune_connector.copying.crew import MOST_HELPERS, Crew, usual_helpers

PATIENCE_S = 20


class Held:
    """As the memory of chunks."""


@pytest.fixture(scope="module", params=[0, 1, 3])
def crew(request):
    made = Crew(request.param)
    yield made
    made.close()


@pytest.fixture
def several():
    made = Crew(2)
    yield made
    made.close()


@given(items=st.lists(st.integers(), max_size=12))
def test_every_item_has_its_result_in_its_place(crew, items):
    """Whoever did it."""
    assert crew.each(lambda item: (item, "done"), items) == [(item, "done") for item in items]


@given(count=st.integers(0, 8), until=st.integers(0, 8))
def test_who_stops_has_the_results_of_the_leading_ones(crew, count, until):
    """``goes_on`` is asked once before each; what was begun is done."""
    left = iter([True] * until)
    assert crew.each(str, range(count), goes_on=lambda: next(left, False)) == [
        str(item) for item in range(min(count, until))
    ]


def test_as_many_at_a_time_as_there_are(several):
    """Each waits for two others: alone nobody would come to an end."""
    together = threading.Barrier(3, timeout=PATIENCE_S)
    assert sorted(several.each(lambda _: together.wait(), range(6))) == [0, 0, 1, 1, 2, 2]


def test_a_failure_begins_nothing_more():
    """It is told as it is."""
    begun = []

    def work(item):
        begun.append(item)
        if item == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Crew(0).each(work, range(9))
    assert begun == [0, 1]


def test_a_failure_is_told_when_what_is_under_way_has_ended(several):
    """Of three at a time one fails; the others go on, and nobody touches anything afterwards."""
    together, failed, ended = threading.Barrier(3, timeout=PATIENCE_S), threading.Event(), []

    def work(item):
        together.wait()
        if item == 1:
            failed.set()
            raise ValueError("no")
        failed.wait(PATIENCE_S)
        ended.append(item)

    with pytest.raises(ValueError, match="no"):
        several.each(work, range(3))
    assert sorted(ended) == [0, 2]


def test_without_threads_who_asks_does_it_alone(monkeypatch):
    """As where the process may have no more; and nothing of it is kept for a thread that never comes."""
    no_more_threads(monkeypatch)
    lonely, held = Crew(2), Held()
    kept = weakref.ref(held)
    assert lonely.each(lambda item, held=held: held and str(item), range(4)) == ["0", "1", "2", "3"]
    del held
    assert kept() is None
    lonely.close()


def test_helpers_are_there_before_the_work_is(monkeypatch):
    """When it comes there may be no thread to be had."""
    crew, together = Crew(2), threading.Barrier(3, timeout=PATIENCE_S)
    no_more_threads(monkeypatch)
    assert sorted(crew.each(lambda _: together.wait(), range(3))) == [0, 1, 2]
    crew.close()


def test_a_helper_that_comes_late_is_waited_for():
    """One that was busy with another row finds this one in its queue; what it began of it is seen through."""
    crew, busy, free, helps, helped = Crew(2), threading.Event(), threading.Event(), threading.Event(), []
    other = threading.Thread(target=crew.each, args=(lambda _: (busy.set(), free.wait(PATIENCE_S)), range(2)))
    other.start()
    busy.wait(PATIENCE_S)

    def work(item):
        if threading.current_thread() is threading.main_thread():
            free.set()
            helps.wait(PATIENCE_S)
        else:
            helps.set()
            time.sleep(0.05)  # a wait for it that is missing would be over by now
            helped.append(item)
        return item

    assert crew.each(work, range(4)) == [0, 1, 2, 3]
    assert helped
    other.join()
    crew.close()


def test_a_closed_crew_leaves_no_thread():
    """And what is asked of it is done all the same."""
    before = set(threading.enumerate())
    crew = Crew(3)
    crew.each(str, range(9))
    crew.close()
    assert set(threading.enumerate()) <= before
    assert crew.each(str, range(2)) == ["0", "1"]


@pytest.mark.parametrize(("processors", "helpers"), [(1, 0), (2, 0), (4, 1), (8, 3), (16, 7), (192, MOST_HELPERS)])
def test_half_of_the_processors_copy(monkeypatch, processors, helpers):
    """Who asks among them."""
    monkeypatch.setattr(crew_module, "usable_processors", lambda: processors)
    assert usual_helpers() == helpers
