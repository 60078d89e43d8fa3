"""Threads of a store for what waits."""

import threading
import weakref
from unittest.mock import Mock

from connector.stores import no_more_threads
from tiertune_connector.counters import Counters
from tiertune_connector.serve.waiters import _MOST_UNSERVED, Waiters


class Request:
    """Takes no arguments, and does nothing."""

    def __call__(self): ...


def test_what_was_served_without_a_thread_is_not_kept_for_one(monkeypatch):
    """Its place in the queue is: with the keys of each prompt a store would grow by gigabytes until a thread comes."""
    waiters, request = Waiters(Counters()), Request()
    kept = weakref.ref(request)
    no_more_threads(monkeypatch)
    assert not waiters.run(Mock(), request, "lookup")
    del request
    assert kept() is None
    waiters.close()


def test_places_of_what_was_served_without_a_thread_are_forgotten(monkeypatch):
    """If there is never a thread, a place for each request would fill the memory in days."""
    waiters = Waiters(Counters())
    no_more_threads(monkeypatch)
    most = 0
    for _ in range(2 * _MOST_UNSERVED):
        assert not waiters.run(Mock(), Request(), "lookup")
        most = max(most, waiters._pools["lookup"]._work_queue.qsize())
    assert most < _MOST_UNSERVED
    waiters.close()


def test_who_has_waited_long_for_a_thread_gets_one_when_there_is(monkeypatch):
    """Also after places were forgotten."""
    waiters, served = Waiters(Counters()), threading.Event()
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        for _ in range(_MOST_UNSERVED + 1):
            waiters.run(Mock(), Request(), "lookup")
    assert waiters.run(Mock(), served.set, "lookup")
    assert served.wait(30)
    waiters.close()
