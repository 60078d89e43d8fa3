"""Threads that are there from the start, and those that come as they can be had."""

import threading
from unittest.mock import Mock

import pytest

from connector.stores import eventually, no_more_threads
from tiertune_connector.counters import Counters
from tiertune_connector.serve.waiters import Waiters
from tiertune_connector.threads import Threads

PATIENCE_S = 20


def test_where_no_more_threads_can_be_had_those_that_are_there_do_all(monkeypatch):
    """In its order; nothing is refused, and nothing is left for later."""
    threads, done = Threads(4, "few"), list[int]()
    no_more_threads(monkeypatch)
    for each in [threads.submit(done.append, number) for number in range(50)]:
        each.result(PATIENCE_S)
    assert done == list(range(50))
    assert threads._work_queue.qsize() == 0
    threads.shutdown()


@pytest.mark.parametrize("lacked", [0, 50])
def test_there_are_as_many_as_work_waits_for(monkeypatch, lacked):
    """Also after a time in which none could be had. Each waits for two others: alone nobody would come to an end."""
    threads, together = Threads(3, "several"), threading.Barrier(3, timeout=PATIENCE_S)
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        for each in [threads.submit(int) for _ in range(lacked)]:
            each.result(PATIENCE_S)
    for each in [threads.submit(together.wait) for _ in range(3)]:
        each.result(PATIENCE_S)
    threads.shutdown()


def test_first_threads_that_cannot_be_had_are_an_error_and_none_is_left(monkeypatch):
    """A store that cannot have them says so when it starts."""
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        no_more_threads(patch, left=2)
        with pytest.raises(OSError, match="threads"):
            Threads(4, "none", ready=3)
    eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("closed", [False, True])
def test_what_fails_is_told_unless_the_store_has_ended_meanwhile(caplog, closed):
    """Then that which serves it has ended, too."""
    waiters, connection, begun, ended = Waiters(counters := Counters()), Mock(), threading.Event(), threading.Event()

    def serve():
        begun.set()
        ended.wait(PATIENCE_S)
        raise RuntimeError("nobody foresaw this")

    waiters.run(connection, serve, "lookup")
    begun.wait(PATIENCE_S)
    if closed:
        waiters.close()
    ended.set()
    eventually(lambda: connection.shutdown.called)
    assert [record.levelname for record in caplog.records] == ([] if closed else ["ERROR"])
    assert bool(counters.snapshot()[1]) is not closed
    waiters.close()
