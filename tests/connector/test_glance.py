"""A look for a reply before one sleeps: how long, how often, and what ends it."""

import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tiertune_connector.client.receiving import Receiver
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.glance import Glance
from tiertune_connector.protocol.messages import Reply

STEP_S = 1e-5


class Ticking:
    """A clock that goes on by a step whenever it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.reads * STEP_S


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        yield here, there


def test_what_is_there_is_seen_at_once(ends):
    here, there = ends
    clock = Ticking()
    glance = Glance(here.fileno(), clock)
    there.sendall(b"x")
    assert glance.comes()
    assert clock.reads == 1
    assert here.recv(1) == b"x"


def test_the_end_of_the_connection_is_seen(ends):
    here, there = ends
    there.close()
    assert Glance(here.fileno(), Ticking()).comes()


def test_what_comes_for_any_of_many_is_seen(ends):
    """As the store looks: through an epoll that watches all its clients."""
    here, there = ends
    with select.epoll() as events:
        events.register(here, select.EPOLLIN)
        assert not Glance(events.fileno(), Ticking()).comes()
        there.sendall(b"x")
        assert Glance(events.fileno(), Ticking()).comes()


def test_a_look_in_vain_ends_after_120_microseconds(ends):
    clock = Ticking()
    assert not Glance(ends[0].fileno(), clock).comes()
    assert 12 <= clock.reads - 1 <= 14


def test_what_comes_within_the_look_is_seen(ends):
    here, there = ends

    class Answering(Ticking):
        def __call__(self) -> float:
            now = super().__call__()
            if self.reads == 3:
                there.sendall(b"x")
            return now

    assert Glance(here.fileno(), Answering()).comes()


def test_after_looks_in_vain_ever_more_chances_pass_by_and_a_success_ends_that(ends):
    """Where processors are short a look takes them from the one who answers; it is tried again, but rarely."""
    here, there = ends
    clock = Ticking()
    glance = Glance(here.fileno(), clock)

    def passed() -> int:
        """Chances until the next look, which is in vain."""
        count, before = 0, clock.reads
        while not glance.comes() and clock.reads == before:
            count += 1
        return count

    assert [passed() for _ in range(8)] == [0, 1, 3, 7, 15, 31, 31, 31]
    there.sendall(b"x")
    assert [glance.comes() for _ in range(32)] == [False] * 31 + [True]
    here.recv(1)
    assert [passed() for _ in range(3)] == [0, 1, 3]


@contextmanager
def signals() -> Iterator[None]:
    """Five in a millisecond, whose handler does nothing."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_is_no_reply(ends):
    """It ends poll(2) early, with nothing to read."""
    with signals():
        assert not any(Glance(ends[0].fileno()).comes() for _ in range(5000))


def test_amid_signals_a_deadline_holds(ends):
    """A store that hangs, in a process with a sampling profiler."""
    here, _ = ends
    receiver = Receiver(here, Frames(here, Reply), lambda _: None, lambda: None)
    started = time.monotonic()
    with signals():
        for _ in range(100):
            receiver.receive(lambda: False, 0.001)
    assert time.monotonic() - started < 10
    receiver.close()
