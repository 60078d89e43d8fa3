"""One client of a store: its process, what it maps, and its socket, which never makes the store wait."""

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from tiertune_connector.protocol.frames import MAX_FRAME_BYTES, Frames
from tiertune_connector.protocol.messages import (
    DropSegments,
    Message,
    NewIndex,
    NewSegment,
    Request,
)
from tiertune_connector.tiers.index import LAYOUT

if TYPE_CHECKING:
    from tiertune_connector.sessions.session import Session
    from tiertune_connector.store.tiered import TieredStore

NO_FD = -1
_MOST_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
_numbers = count()
_SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)
"""From asm-generic/socket.h: Python's ``socket`` lacks it."""


class Connection:
    """Thread-safe except ``frames``, from which one thread receives. Sending never waits."""

    def __init__(self, sock: socket.socket) -> None:
        self.session: Session | None = None
        self.number = next(_numbers)
        """Higher numbers were accepted later."""
        self.peer = Peer(sock)
        self.frames = Frames(sock, Request, descriptors=False)
        self._socket = sock
        self._sending = threading.RLock()
        self._segments: set[int] = set()
        self._indexed = False
        self._unsent: deque[tuple[memoryview, int]] = deque()
        """What the client has not taken yet, each with a copy of the descriptor that goes with it."""
        self._unsent_bytes = 0
        self._taken_at = 0.0
        """When the client last took anything, or was first sent what waits."""
        self._on_stuck: Callable[[bool], None] = lambda _: None

    def __str__(self) -> str:
        """Who it is, for the log."""
        name = self.session.engine if self.session else "a client"
        return f"{name} (pid {self.peer.pid or 'of another namespace'})"

    def fileno(self) -> int:
        """-1 once it is closed."""
        return self._socket.fileno()

    def watch(self, on_stuck: Callable[[bool], None]) -> None:
        """Call ``on_stuck``, now and at every change, with whether something is to ``flush`` once the client takes it.

        Nothing is sent during the call, so that no change is missed.
        """
        with self._sending:
            self._on_stuck = on_stuck
            on_stuck(self.stuck)

    def reply(self, store: "TieredStore", message: Message) -> None:
        """Send a reply, preceded by descriptors of segments new to the client, and of the index if it looks there."""
        assert self.session is not None
        named = {slot.segment for slot in getattr(message, "slots", ()) if slot is not None}
        pool = store.dram.pools.get(self.session.digest)
        segments = pool.segments if pool else {}
        with self._sending:
            # The store closes none of these descriptors meanwhile, for the client holds slots of the segments.
            for number in (named - self._segments) & segments.keys():
                segment = segments[number]
                self.send(NewSegment(number, segment.geometry.slots, segment.geometry.chunk_bytes), segment.fd)
                self._segments.add(number)
            if pool and pool.index and not self._indexed and self.session.looks:
                self.send(NewIndex(LAYOUT, pool.index.buckets), pool.index.fd)
                self._indexed = True
            self.send(message)

    def send(self, message: Message, descriptor: int = NO_FD) -> None:
        """Send what the client takes now, with a ``descriptor``; ``flush`` sends the rest. OSError if it has gone."""
        frame = memoryview(self.frames.encode(message))
        with self._sending:
            if self.fileno() < 0:
                raise BrokenPipeError("the connection was closed")
            if not self._unsent:
                self._taken_at = time.monotonic()
                with suppress(BlockingIOError):
                    frame, descriptor = frame[self._put(frame, descriptor) :], NO_FD
            if not frame:
                return
            if self._unsent_bytes + len(frame) > _MOST_UNSENT_BYTES:
                raise OSError(f"{self._unsent_bytes} bytes wait for a client that does not take them")
            self._unsent.append((frame, os.dup(descriptor) if descriptor != NO_FD else NO_FD))
            self._unsent_bytes += len(frame)
            if len(self._unsent) == 1:
                self._on_stuck(True)

    def flush(self) -> bool:
        """Send what waits; returns whether the client has taken it all. OSError if it has gone."""
        with self._sending:
            while self._unsent:
                frame, descriptor = self._unsent[0]
                try:
                    sent = self._put(frame, descriptor)
                except BlockingIOError:
                    return False
                _close(descriptor)
                self._unsent_bytes -= sent
                self._taken_at = time.monotonic()
                if sent < len(frame):
                    self._unsent[0] = frame[sent:], NO_FD
                else:
                    self._unsent.popleft()
            self._on_stuck(False)
            return True

    def _put(self, frame: memoryview, descriptor: int) -> int:
        """Send, a descriptor with the first byte; returns the bytes taken."""
        if descriptor == NO_FD:
            return self._socket.send(frame)
        return socket.send_fds(self._socket, [frame], [descriptor])

    @property
    def stuck(self) -> bool:
        """Whether something waits until the client takes it."""
        return bool(self._unsent)

    def stuck_s(self) -> float:
        """Seconds since the client last took anything of what waits for it; 0: nothing waits."""
        return time.monotonic() - self._taken_at if self.stuck else 0.0

    def drop(self, segments: list[int]) -> None:
        """Tell the client to unmap segments."""
        with self._sending:
            known = self._segments & set(segments)
            if known:
                self._segments -= known
                self.send(DropSegments(sorted(known)))

    def precedes(self, other: "Connection") -> bool:
        """Whether both are connections of one client object, and this one was accepted before the other."""
        mine, others = self.session, other.session
        same = mine is not None and others is not None and mine.client == others.client
        return same and self.number < other.number

    def shutdown(self) -> None:
        """End the connection from this side; its receiver notices."""
        with self._sending, suppress(OSError):  # it has gone by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        with self._sending:  # a descriptor that is closed may be another file's a moment later
            self._socket.close()
            for _, descriptor in self._unsent:
                _close(descriptor)
            self._unsent.clear()
        self.frames.close()


def _close(descriptor: int) -> None:
    if descriptor != NO_FD:
        os.close(descriptor)


class Peer:
    """Watches the process by a descriptor until ``forget``."""

    def __init__(self, sock: socket.socket) -> None:
        self.pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.process = _process(sock, self.pid)

    def ended(self) -> bool:
        """Whether the process is known to be gone."""
        if self.process is None:
            return False
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(0))

    def forget(self) -> None:
        if self.process is not None:
            os.close(self.process)
            self.process = None


def _process(sock: socket.socket, pid: int) -> int | None:
    """A descriptor of the process, in another pid namespace too if Linux can (6.5 and later).

    Without one, what the process may be writing to when its connection is lost can never be used again.
    """
    with suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with suppress(OSError):  # the process has gone, or is in another namespace: it has no number here
        return os.pidfd_open(pid)
    return None
