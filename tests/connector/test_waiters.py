"""Threads of a store for what waits."""

import weakref
from unittest.mock import Mock

from connector.stores import no_more_threads
from tiertune_connector.counters import Counters
from tiertune_connector.serve.waiters import Waiters


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
