"""The receiving side of a client's connection: whoever waits for a reply receives it.

While nobody waits, a thread of its own receives. If it handed on every reply, each would cost two more thread
switches, which take longer than what the store does for most requests.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, TypeVar

from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.glance import Glance
from tiertune_connector.protocol.messages import LoadPart, Message

Answer = TypeVar("Answer")
_TICK_S = 0.05
_DONTWAIT = int(socket.MSG_DONTWAIT)


@dataclass(eq=False)
class Receiver:
    """Takes what one connection brings, one thread at a time.

    ``take`` is called with every message, in order, by whichever thread received it.

    ``tick`` is called by ``run`` at least every 50 ms, once what has come is taken. It must not wait.
    """

    sock: socket.socket
    frames: Frames
    take: Callable[[Message], None]
    tick: Callable[[], None]

    def __post_init__(self) -> None:
        self._turn = threading.Lock()
        self._bell = select.epoll()
        self._bell.register(self.sock, select.EPOLLIN)
        self._poll = select.poll()
        self._poll.register(self.sock, select.POLLIN)
        self._glance = Glance(self.sock.fileno())
        self._failure: Exception | None = None

    def run(self) -> None:
        """Receive whenever nobody else does. For a thread of its own.

        Raises what ended the connection, whichever thread met it: EOFError if the other side has closed.
        """
        with self._turn:
            self._take_whole()
        while True:
            if self._bell.poll(_TICK_S) and self._turn.acquire(timeout=_TICK_S):
                try:
                    self._hear()
                finally:
                    self._turn.release()
            self.tick()

    def receive(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Receive until ``done``, or until the time or the connection is over, unless another thread receives.

        What has come by then is taken, even with a time of 0. It may return earlier: ``run`` goes on receiving in any
        case.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            if not self._bell.closed and self._failure is None:
                self._lead(done, timeout_s)
        finally:
            self._turn.release()

    def close(self) -> None:
        """Call after the socket is shut down and before it is closed: nobody receives from now on."""
        with self._turn:
            self._bell.close()

    def _hear(self) -> None:
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(BlockingIOError):  # a waiting thread was quicker
            self.frames.read(_DONTWAIT)
            self._take_whole()

    def _lead(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._bell.modify(self.sock, 0)  # the other thread sleeps on, whatever comes
        try:
            while not done() and self._readable(until):
                self.frames.read()
                self._take_whole()
        except EOFError:  # `run` meets it too
            return
        except BaseException as error:  # a message may be lost, or half of one: the rest cannot be trusted
            with contextlib.suppress(OSError):  # it has gone by itself
                self.sock.shutdown(socket.SHUT_RDWR)
            if not isinstance(error, Exception):
                self._failure = ConnectionAbortedError("interrupted")
                raise
            self._failure = error
        finally:
            self._bell.modify(self.sock, select.EPOLLIN)

    def _readable(self, until: float | None) -> bool:
        left_s = inf if until is None else until - time.monotonic()
        if left_s <= 0:
            return bool(self._poll.poll(0))
        return self._glance.comes() or until is None or bool(self._poll.poll(1000 * left_s))

    def _take_whole(self) -> None:
        for message in self.frames.whole():
            self.take(message)


class PendingReply(Future[Answer]):
    """A reply that comes through ``receiver``; waiting for it receives."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self._receiver = receiver
        self.set_running_or_notify_cancel()  # not to be cancelled: the reply may bring slots to give back

    def result(self, timeout: float | None = None) -> Answer:
        """As `Future.result`."""
        if not self.done():
            started = time.monotonic()
            self._receiver.receive(self.done, timeout)
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - started))
        return super().result(timeout)


class Question(NamedTuple):
    """One whose reply has not come."""

    future: Future[Any]
    answer: Callable[[Message | None, int], Any]
    hear: Callable[[LoadPart, int], None] | None
    """Who hears what comes before the reply."""
    connection: int


class Live(NamedTuple):
    """The present connection."""

    number: int
    frames: Frames
    receiver: Receiver
