"""Serves many connections from one thread: one message at a time from each that has sent something, in turn.

A thread for each would wait for the interpreter after every read and write while others compute, up to a switch
interval each time; a request takes less than that.
"""

import os
import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tiertune_connector.protocol.glance import Glance
from tiertune_connector.protocol.messages import Message
from tiertune_connector.serve.connection import Connection

_READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR


@dataclass(eq=False)
class Turns:
    """Takes what connections bring; ``handle`` must not wait.

    ``ended`` is called with a connection no longer served, and why: EOFError if the client closed it.
    """

    handle: Callable[[Connection, Message], None]
    ended: Callable[[Connection, Exception], None]

    def __post_init__(self) -> None:
        self._events = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._bell = os.eventfd(0)
        self._events.register(self._bell, select.EPOLLIN)

    def add(self, connection: Connection) -> None:
        """Have ``run`` take what a connection brings."""
        number = connection.fileno()
        self._connections[number] = connection
        self._events.register(number, 0)
        connection.watch(lambda stuck: self._listen(number, select.EPOLLOUT if stuck else select.EPOLLIN))

    def run(self) -> None:
        """Run until ``stop``, and until every connection has ended. For a thread of its own."""
        speaking: list[Connection] = []
        stopping, glance = False, Glance(self._events.fileno())
        last, before = -1, -2  # who spoke: while it is one client alone, it mostly goes on
        while self._connections or not stopping:
            comes = bool(speaking) or (last == before and glance.comes())
            for number, event in self._events.poll(0 if comes else None):
                last, before = number, last
                if number == self._bell:
                    stopping = bool(os.eventfd_read(self._bell))
                elif self._hear(number, event):
                    speaking.append(self._connections[number])
            speakers = dict.fromkeys(speaking)
            speaking = [each for each in speakers if self._turn(each)]
            if len(speakers) > 1:  # a client that was woken on this processor would wait for all of a time slice
                os.sched_yield()

    def stop(self) -> None:
        """Have ``run`` end with the last connection; what was said before is handled."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Call after ``run``; nothing may be added any more."""
        self._events.close()
        os.close(self._bell)

    def _hear(self, number: int, event: int) -> bool:
        """Read from a connection, or write to one that was stuck; whether it is still served."""
        connection = self._connections[number]
        try:
            if connection.stuck and not connection.flush():
                return True
            if event & _READABLE and not connection.frames.waiting:
                connection.frames.read()
        except BlockingIOError:  # nothing has come, after all
            return True
        except Exception as error:  # noqa: BLE001 (whatever a client sends, the others are served)
            self._end(connection, error)
            return False
        return True

    def _turn(self, connection: Connection) -> bool:
        """Handle one message, if one is whole and the client takes its answers; whether another waits."""
        if connection.fileno() not in self._connections or connection.stuck:
            return False
        try:
            message = connection.frames.next()
            if message is not None:
                self.handle(connection, message)
        except Exception as error:  # noqa: BLE001 (whatever a client sends, the others are served)
            self._end(connection, error)
            return False
        return connection.frames.waiting

    def _listen(self, number: int, events: int) -> None:
        with suppress(OSError, ValueError):  # the connection, or all, has ended meanwhile
            self._events.modify(number, events)

    def _end(self, connection: Connection, error: Exception) -> None:
        number = connection.fileno()
        del self._connections[number]
        self._events.unregister(number)
        self.ended(connection, error)
