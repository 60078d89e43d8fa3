"""A lasting connection to a store: what is asked and told over it, and the segments that came with it.

A background thread connects and reconnects. What is pending when a connection ends is answered with nothing.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import msgspec

from tiertune_connector.client.receiving import Live, PendingReply, Question, Receiver
from tiertune_connector.cost import FetchEstimate
from tiertune_connector.eviction import Keys
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.messages import (
    CommitReply,
    DropSegments,
    Hello,
    LoadPart,
    LoadReply,
    Lookup,
    LookupReply,
    Message,
    NewIndex,
    NewSegment,
    Reply,
    ReserveReply,
    SlotRef,
    Welcome,
)
from tiertune_connector.tiers.index import LAYOUT, Place, SharedIndex
from tiertune_connector.tiers.segment import Geometry, Segment

log = logging.getLogger(__name__)
_RECONNECT_S = 0.5
_MOST_UNTOLD_BYTES = 32 << 10
"""So much no longer waits for a question or a tick."""
_MOST_LOOKS = 4
"""Prompts that a client looks up itself between two ticks or loads. Beyond these it asks the store, which hears of
each lookup and counts it, so that no client runs ahead of it."""
_HELLO_TIMEOUT_S = 5.0
_SEND_TIMEOUT_US = 200_000
_BELIEVED_S = 1.0
"""How long the store's index is believed; a store that does not renew it in time hangs, and is asked."""
ROOT = 0
"""Root, who owns whatever a user owns."""
_NUMBERS = len(FetchEstimate.__struct_fields__)
Answer = TypeVar("Answer")


@dataclass(eq=False)
class StoreLink:
    """Thread-safe.

    ``hello`` begins every connection to the store at ``path``.

    With an ``owner``, only a store that this user or root runs is trusted.
    """

    path: str
    hello: Hello
    owner: int | None = None

    def __post_init__(self) -> None:
        self.boot_id = ""
        """Boot id of the store last connected to; a new one means that it restarted and knows nothing of before."""
        self.refusal = ""
        """Why the store turned the client away, or the client the store."""
        self.failure = ""
        """Why the latest attempt to connect, or the latest connection, came to nothing."""
        self.errors = 0
        """Unexpected failures in the connection's thread; it went on each time."""
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._live: Live | None = None
        self._socket: socket.socket | None = None
        self._connection = 0
        """The number of the latest connection."""
        self._numbers = count(1)
        self._pending: dict[int, Question] = {}
        self._untold = bytearray()
        """Frames that go with the next one sent."""
        self._looks = 0
        self._segments: dict[int, Segment] = {}
        self._index: SharedIndex | None = None
        self._copying: Counter[int] = Counter()  # copies under way, by segment
        self._idle = threading.Condition(self._lock)
        self._connected = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    def connect(self, timeout_s: float = 5.0) -> bool:
        """Start to keep a connection; returns whether there is one within ``timeout_s``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_connected, name="tiertune-client", daemon=True)
            self._thread.start()
        return self._connected.wait(timeout_s)

    def close(self) -> None:
        """End the connection; pending answers resolve with nothing found."""
        self._closed.set()
        self.send()
        with self._sending:
            self._hang_up()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    # -- what is said

    def tell(self, message: Message, connection: int | None = None) -> None:
        """Have a message go with the next question, or within a tick, without waiting.

        Nobody waits for it, and waking the store can take longer than all that it does for a request.
        """
        with self._lock:
            if live := self._meant(connection):
                self._untold += live.frames.encode(message)
        if len(self._untold) >= _MOST_UNTOLD_BYTES:
            self._tell_all()

    def send(self, message: Message | None = None, connection: int | None = None) -> bool:
        """Send after what was told, if the ``connection`` meant is still the current one; whether it was sent."""
        with self._sending:
            return self._put(message, connection)

    def _tick(self) -> None:
        self._tell_all()
        if not self._untold:
            self._looks = 0

    def _tell_all(self) -> None:
        """Send what was told, unless that would wait for the store or a sender: nobody receives meanwhile."""
        if self._untold and self._sending.acquire(blocking=False):
            try:
                live = self._live
                if live is not None and live.frames.takes():
                    self._put()
            finally:
                self._sending.release()

    def _put(self, message: Message | None = None, connection: int | None = None) -> bool:
        with self._lock:
            live = self._meant(connection)
            if live is None:
                return False
            asked = b"" if message is None else live.frames.encode(message)
            told, self._untold = self._untold, bytearray()
        try:
            live.frames.put(told + asked)
        except OSError:
            self._hang_up()
            return False
        return True

    def _meant(self, connection: int | None) -> Live | None:
        """The present connection, if it is the one meant; None means any. Call with the lock held."""
        live = self._live
        return live if live is not None and connection in (None, live.number) else None

    def ask(
        self,
        make: Callable[[int], Message],
        answer: Callable[[Message | None, int], Answer],
        connection: int | None = None,
        hear: Callable[[LoadPart, int], None] | None = None,
    ) -> "Future[Answer]":
        """As `send`; ``answer`` makes the result from the reply, None if there is none, and its connection's number.

        ``hear`` gets what comes before the reply, on the receiving thread.
        """
        with self._lock:
            number = next(self._numbers)
            message, live = make(number), self._meant(connection)
            if not isinstance(message, Lookup):
                self._looks = 0
            if live is None:
                return resolved(answer(None, self._connection))
            future = PendingReply[Answer](live.receiver)
            self._pending[number] = Question(future, answer, hear, live.number)
        self.send(message, live.number)
        return future

    def look(self, keys: Keys) -> FetchEstimate | None:
        """Cost of fetching a chain that lies wholly in host memory, by the store's index; None: ask the store.

        If there is one, the caller tells the store of the lookup.
        """
        if self._looks >= _MOST_LOOKS:
            return None
        with self._lock:
            index = self._index
            if index is None or self._live is None or self._live.frames.ended():
                return None
            # Mostly the last chunk decides, as it is the first to leave.
            if not self._seen(index, keys[-1:]) or (len(keys) > 1 and len(self._seen(index, keys)) < len(keys)):
                return None
            self._looks += 1
            told = dict(zip(FetchEstimate.__struct_fields__, index.numbers(_NUMBERS), strict=True))
            return msgspec.convert(told, FetchEstimate, strict=False)

    def find(self, keys: Keys) -> tuple[list[Place], int]:
        """Where a chain's leading chunks lie by the store's index, and the connection's number.

        That may be wrong by the time it is read.
        """
        with self._lock:
            index = self._index
            return ([] if index is None else self._seen(index, keys)), self._connection

    def _seen(self, index: SharedIndex, keys: Keys) -> list[Place]:
        fresh = 0 <= time.monotonic() - index.told_at < _BELIEVED_S
        return index.find(keys, self._segments) if fresh else []

    @contextlib.contextmanager
    def mapped(self, slot: SlotRef, connection: int) -> Iterator[Segment | None]:
        """The slot's segment during a copy; a reconnect waits for it, so that no old copy meets a new owner."""
        with self._lock:
            segment = self._segments.get(slot.segment) if self._meant(connection) else None
            if segment is not None:
                self._copying[segment.number] += 1
        try:
            yield segment
        finally:
            if segment is not None:
                with self._lock:
                    self._copying[segment.number] -= 1
                    self._idle.notify_all()

    # -- the connection

    def _keep_connected(self) -> None:
        while not self._closed.is_set():
            try:
                self._converse()
            except (EOFError, OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
                log.debug("no connection to %s: %s", self.path, error)
                self.failure = getattr(error, "strerror", None) or str(error)
            except Exception:
                log.exception("the connection to %s failed", self.path)
                self.errors += 1
            self._lose()
            self._closed.wait(_RECONNECT_S)

    def _converse(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        frames = Frames(sock, Reply)
        try:
            sock.settimeout(_HELLO_TIMEOUT_S)
            self._socket = sock
            if self._closed.is_set():  # it found no socket to hang up
                return
            sock.connect(self.path)
            if self._trusts(sock):
                self._serve(sock, frames)
        finally:
            self._hang_up()
            with self._sending:  # a descriptor that is closed may be another file's a moment later
                self._socket = None
                sock.close()
            frames.close()

    def _trusts(self, sock: socket.socket) -> bool:
        """Whether the owner or root listens, if an owner is set: else anybody could be told what chunks hold."""
        _, user, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if self.owner in (None, user) or user == ROOT:
            return True
        self._refused(f"user {user} runs it, and user {self.owner} should")
        return False

    def _refused(self, why: str) -> None:
        if why and why != self.refusal:
            log.warning("the store at %s is not used: %s", self.path, why)
        self.refusal = why

    def _serve(self, sock: socket.socket, frames: Frames) -> None:
        """Greet the store, then take its replies until the connection ends."""
        frames.send(self.hello)
        try:
            welcome = next(frames.receive(), None)
        except msgspec.ValidationError as error:
            self._refused(f"it has not our {self.hello.version}, but a version that greets otherwise: {error}")
            return
        if not isinstance(welcome, Welcome):
            self.failure = "the store ended the connection without a greeting"
            return
        self._refused(welcome.refusal)
        if welcome.refusal:
            return
        sock.settimeout(None)
        # A store that hangs must not stop the engine: a send that finds no room for so long ends the connection.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, _SEND_TIMEOUT_US))
        receiver = Receiver(sock, frames, partial(self._receive, frames), self._tick)
        with self._lock:
            self.boot_id = welcome.boot_id
            self._connection += 1
            self._live = Live(self._connection, frames, receiver)
        self._connected.set()
        try:
            receiver.run()
        finally:
            self._hang_up()
            receiver.close()

    def _receive(self, frames: Frames, reply: Message) -> None:
        match reply:
            case NewSegment():
                geometry = Geometry(reply.slots, reply.chunk_bytes)
                segment = Segment(reply.number, geometry, _descriptor(frames, "a segment"))
                with self._lock:
                    self._segments[reply.number] = segment
            case NewIndex():
                descriptor = _descriptor(frames, "an index")
                if reply.layout != LAYOUT:
                    os.close(descriptor)
                    return
                index = SharedIndex(reply.buckets, descriptor)
                with self._lock:
                    self._index = index
            case DropSegments():
                self._unmap(reply.numbers)
            case LoadPart():
                if (asked := self._pending.get(reply.id)) is not None and asked.hear is not None:
                    try:
                        asked.hear(reply, asked.connection)
                    except Exception:  # it does not fit the request, or the hearer fails: the reply will still tell
                        log.exception("what has come of a load could not be heard")
                        self.errors += 1
            case LookupReply() | LoadReply() | ReserveReply() | CommitReply():
                self._resolve(reply.id, reply)

    def _resolve(self, number: int, reply: Message | None) -> None:
        with self._lock:
            asked = self._pending.pop(number, None)
        if asked is not None:
            try:
                answer = asked.answer(reply, asked.connection)
            except ValueError:  # the reply does not fit its request
                answer = asked.answer(None, asked.connection)
            asked.future.set_result(answer)

    def _lose(self) -> None:
        with self._lock:
            self._connected.clear()
            self._live = None
            self._untold = bytearray()
            pending = list(self._pending)
            index, self._index = self._index, None
        if index is not None:
            index.close()
        for number in pending:
            self._resolve(number, None)
        self._unmap(list(self._segments))

    def _unmap(self, numbers: Sequence[int]) -> None:
        """Unmap segments: no copy begins any more, those under way are waited for."""
        with self._lock:
            gone = [segment for number in numbers if (segment := self._segments.pop(number, None)) is not None]
            self._idle.wait_for(lambda: not any(self._copying[segment.number] for segment in gone))
            for segment in gone:
                del self._copying[segment.number]
        for segment in gone:
            segment.close()

    def _hang_up(self) -> None:
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):  # it has gone by itself
                sock.shutdown(socket.SHUT_RDWR)


def resolved(value: Answer) -> "Future[Answer]":
    """A future that is done."""
    future: Future[Answer] = Future()
    future.set_result(value)
    return future


def _descriptor(frames: Frames, of: str) -> int:
    """The descriptor that came with a message; OSError if none did."""
    if not frames.descriptors:
        raise OSError(f"{of} came without its descriptor: this process has too many open")
    return frames.descriptors.popleft()
