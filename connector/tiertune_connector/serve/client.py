"""The client of a store: what an engine's adapter, or a player, speaks through.

Every call returns at once; answers are futures that resolve with what was found, or with nothing found where the store
is away. A background thread keeps the connection.
"""

import contextlib
import logging
import socket
import struct
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tiertune_connector import __version__
from tiertune_connector.chunk import Bytes, copy_checked
from tiertune_connector.keys import Namespace
from tiertune_connector.serve.protocol import (
    PROTOCOL,
    Abort,
    Commit,
    CommitReply,
    DropSegments,
    FirstToken,
    Frames,
    Hello,
    Load,
    LoadReply,
    Lookup,
    LookupReply,
    Message,
    NewSegment,
    Own,
    PrefillLine,
    Release,
    Reply,
    Report,
    Reserve,
    ReserveReply,
    Side,
    SlotRef,
    StepReport,
    Steps,
    TierReport,
    Touch,
    Welcome,
)
from tiertune_connector.tiers.segment import Geometry, Segment

log = logging.getLogger(__name__)
_RECONNECT_S = 0.5
_HELLO_TIMEOUT_S = 5.0
_SEND_TIMEOUT_US = 200_000
Answer = TypeVar("Answer")


@dataclass(eq=False)
class ClientSlot:
    """A chunk's place in shared memory, as one connection knows it."""

    key: bytes
    ref: SlotRef
    connection: int
    checksum: int = 0
    """xxh3_64 of the payload, once written."""


@dataclass(frozen=True)
class Loaded:
    """Chunks that are in DRAM slots, pinned until ``StoreClient.release``."""

    slots: list[ClientSlot]
    outcomes: list[str]
    seconds: dict[str, float]
    lease: int
    connection: int


@dataclass(frozen=True)
class Reserved:
    """Slots to be written, aligned with the keys asked; None where a chunk is not wanted, with its reason."""

    slots: list[ClientSlot | None]
    reasons: list[str]


class StoreClient:
    """One engine's connection to the store of its host. Thread-safe."""

    def __init__(
        self,
        path: Path | str,
        namespace: Namespace | None,
        *,
        chunk_bytes: int = 0,
        chunk_tokens: int = 0,
        engine: str,
        stage: str = "all",
        gpus: Sequence[str] = (),
    ) -> None:
        """``chunk_bytes`` is the payload of every chunk of the namespace; ``gpus`` are UUIDs.

        Without a namespace all that can be done is to report steps.
        """
        self.chunk_bytes = chunk_bytes
        self.chunk_tokens = chunk_tokens
        self.boot_id = ""
        """Of the store connected to last; another one means that it was restarted and knows nothing of before."""
        self.refusal = ""
        """Why the store turned the client away."""
        self.errors = 0
        """Unexpected failures of the connection's thread; it went on each time."""
        self.gpus = list(gpus)
        """May be replaced when it is known only later: it goes with every report of steps."""
        self.prefill: Callable[[], PrefillLine | None] = lambda: None
        """What a prefill costs the engine now; may be replaced. The answer goes with every lookup."""
        self._path = str(path)
        self._hello = Hello(
            PROTOCOL, __version__, uuid.uuid4().hex, engine, stage, namespace, chunk_bytes, chunk_tokens, list(gpus)
        )
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._frames: Frames | None = None
        self._socket: socket.socket | None = None
        self._connection = 0
        self._next_id = 1
        self._pending: dict[int, tuple[Future[Any], Callable[[Message | None], Any]]] = {}
        self._segments: dict[int, Segment] = {}
        self._copying: Counter[int] = Counter()  # copies under way, by segment
        self._idle = threading.Condition(self._lock)
        self._connected = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    def connect(self, timeout_s: float = 5.0) -> bool:
        """Start to keep a connection; whether there is one within ``timeout_s``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_connected, name="tiertune-client", daemon=True)
            self._thread.start()
        return self._connected.wait(timeout_s)

    def close(self) -> None:
        """End the connection; pending answers resolve with nothing found."""
        self._closed.set()
        with self._sending:
            self._hang_up()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def lookup(
        self,
        request: str,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        tenant: bytes = b"",
        sides: Sequence[Side] = (),
        defer: bool = False,
    ) -> "Future[LookupReply]":
        """Where the leading chunks of a prompt are, and what fetching them costs; with ``defer``, ``own`` follows."""
        chain, others = list(keys), list(sides)
        return self._ask(
            lambda number: Lookup(number, request, chain, prompt_tokens, tenant, others, defer, self.prefill()),
            lambda reply, _: reply if isinstance(reply, LookupReply) else LookupReply(0, [], {}, {}, "unreachable"),
        )

    def own(self, request: str, *, gpu_chunks: int, staging_chunks: int) -> None:
        """Tell how many leading chunks of a deferred lookup's prompt the engine had itself."""
        self._tell(Own(request, gpu_chunks, staging_chunks))

    def load(self, request: str, keys: Sequence[bytes], *, deadline_s: float) -> "Future[Loaded]":
        """Bring chunks into DRAM slots and pin them; ``release`` the answer."""
        chain = list(keys)

        def answer(reply: Message | None, connection: int) -> Loaded:
            if not isinstance(reply, LoadReply):
                return Loaded([], ["error"] * len(chain), {}, 0, connection)
            slots = [
                ClientSlot(key, ref, connection, ref.checksum) for key, ref in zip(chain, reply.slots, strict=False)
            ]
            return Loaded(slots, reply.outcomes, reply.seconds, reply.lease, connection)

        return self._ask(lambda number: Load(number, request, chain, deadline_s), answer)

    def read(self, slot: ClientSlot, out: Bytes) -> bool:
        """Copy a loaded chunk into ``out``, uint8 of shape (chunk_bytes,); False: what was copied must not be used."""
        with self._mapped(slot) as segment:
            if segment is None:
                return False
            segment.warm(slot.ref.index)
            copied = copy_checked(out, segment.slot(slot.ref.index))
            same = int(segment.generations[slot.ref.index]) == slot.ref.generation
        return same and copied == slot.ref.checksum

    def release(self, loaded: Loaded) -> None:
        """The slots of a load are read, or not wanted any more."""
        self._tell(Release(loaded.lease), loaded.connection)

    def reserve(self, keys: Sequence[bytes], *, request: str = "", tenant: bytes = b"") -> "Future[Reserved]":
        """Slots for the chunks of a chain that the store wants: ``write`` and ``commit``, or ``abort`` them."""
        chain = list(keys)

        def answer(reply: Message | None, connection: int) -> Reserved:
            if not isinstance(reply, ReserveReply):
                return Reserved([None] * len(chain), ["unreachable"] * len(chain))
            slots = [
                ClientSlot(key, ref, connection) if ref is not None else None
                for key, ref in zip(chain, reply.slots, strict=True)
            ]
            return Reserved(slots, reply.reasons)

        return self._ask(lambda number: Reserve(number, request, chain, tenant), answer)

    def write(self, slot: ClientSlot, data: Bytes) -> bool:
        """Copy a chunk of shape (chunk_bytes,) into a reserved slot; False if the connection it came from is gone."""
        with self._mapped(slot) as segment:
            if segment is None:
                return False
            segment.warm(slot.ref.index)
            slot.checksum = copy_checked(segment.slot(slot.ref.index), data)
        return True

    def commit(self, slots: Sequence[ClientSlot]) -> "Future[list[bool]]":
        """Make written chunks visible to all; whether each one is."""
        refs = [msgspec.structs.replace(slot.ref, checksum=slot.checksum) for slot in slots]
        keys = [slot.key for slot in slots]
        connections = {slot.connection for slot in slots}
        if len(connections) != 1:  # of nothing; or the store was lost in between, and knows only some
            return _resolved([False] * len(keys))
        return self._ask(
            lambda number: Commit(number, keys, refs),
            lambda reply, _: reply.committed if isinstance(reply, CommitReply) else [False] * len(keys),
            connections.pop(),
        )

    def abort(self, slots: Sequence[ClientSlot]) -> None:
        """Give reserved slots back unwritten."""
        for connection in {slot.connection for slot in slots}:
            self._tell(Abort([slot.key for slot in slots if slot.connection == connection]), connection)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Tell of hits that the engine served itself."""
        self._tell(Touch(list(keys)))

    def report(self, request: str, tiers: Sequence[TierReport]) -> None:
        """Tell what the gate decided, and what became of it."""
        self._tell(Report(request, list(tiers)))

    def first_token(self, request: str, tokens: int, seconds: float, group: str) -> None:
        """Tell when a request of a holdout had its first token, or ended without one."""
        self._tell(FirstToken(request, tokens, seconds, group))

    def report_steps(self, steps: Sequence[StepReport]) -> bool:
        """Tell what the engine's steps took; whether it was sent."""
        return self._tell(Steps(list(steps), self.gpus))

    # -- sending

    def _tell(self, message: Message, connection: int | None = None) -> bool:
        """Send to the store, if it is still on the ``connection`` that the message is about; whether it was sent."""
        with self._sending:
            with self._lock:
                frames = self._frames if connection in (None, self._connection) else None
            if frames is None:
                return False
            try:
                frames.send(message)
            except OSError:
                self._hang_up()
                return False
            return True

    def _ask(
        self,
        make: Callable[[int], Message],
        answer: Callable[[Message | None, int], Answer],
        connection: int | None = None,
    ) -> "Future[Answer]":
        """As `_tell`; ``answer`` makes the result of the reply, None if there is none, and its connection's number."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # not to be cancelled: the reply may bring slots to give back
        with self._lock:
            number, self._next_id = self._next_id, self._next_id + 1
            message, current = make(number), self._connection
            connected = self._frames is not None and connection in (None, current)
            if connected:
                self._pending[number] = (future, partial(_answer, answer, current))
        if connected:
            self._tell(message, current)
        else:
            future.set_result(answer(None, current))
        return future

    @contextlib.contextmanager
    def _mapped(self, slot: ClientSlot) -> Iterator[Segment | None]:
        """The slot's segment while it is copied; a reconnect waits for that, so that no old copy meets a new owner."""
        with self._lock:
            valid = slot.connection == self._connection and self._frames is not None
            segment = self._segments.get(slot.ref.segment) if valid else None
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
            except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
                log.debug("no connection to %s: %s", self._path, error)
            except Exception:
                log.exception("the connection to %s failed", self._path)
                self.errors += 1
            self._lose()
            self._closed.wait(_RECONNECT_S)

    def _converse(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        frames = Frames(sock, Reply)
        try:
            sock.settimeout(_HELLO_TIMEOUT_S)
            self._socket = sock
            sock.connect(self._path)
            self._serve(sock, frames)
        finally:
            self._hang_up()
            with self._sending:  # a descriptor that is closed may be another file's a moment later
                self._socket = None
                sock.close()
            frames.close()

    def _serve(self, sock: socket.socket, frames: Frames) -> None:
        """Greet the store, then take its replies until the connection ends."""
        frames.send(self._hello)
        replies = frames.receive()
        welcome = next(replies, None)
        if not isinstance(welcome, Welcome):
            return
        if welcome.refusal and welcome.refusal != self.refusal:
            log.warning("the store at %s refuses this client: %s", self._path, welcome.refusal)
        self.refusal = welcome.refusal
        if welcome.refusal:
            return
        sock.settimeout(None)
        # A store that hangs must not stop the engine: a send that finds no room for so long ends the connection.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, _SEND_TIMEOUT_US))
        with self._lock:
            self.boot_id = welcome.boot_id
            self._connection += 1
            self._frames = frames
        self._connected.set()
        for reply in replies:
            self._receive(frames, reply)

    def _receive(self, frames: Frames, reply: Message) -> None:
        match reply:
            case NewSegment():
                if not frames.descriptors:
                    raise OSError("a segment came without its descriptor: this process has too many open")
                segment = Segment.attach(
                    reply.number, Geometry(reply.slots, reply.chunk_bytes), frames.descriptors.popleft()
                )
                with self._lock:
                    self._segments[reply.number] = segment
            case DropSegments():
                self._unmap(reply.numbers)
            case LookupReply() | LoadReply() | ReserveReply() | CommitReply():
                self._resolve(reply.id, reply)

    def _resolve(self, number: int, reply: Message | None) -> None:
        with self._lock:
            future, answer = self._pending.pop(number, (None, None))
        if future is not None and answer is not None:
            future.set_result(answer(reply))

    def _lose(self) -> None:
        self._connected.clear()
        with self._lock:
            self._frames = None
            pending = list(self._pending)
        for number in pending:
            self._resolve(number, None)
        self._unmap(list(self._segments))

    def _unmap(self, numbers: Sequence[int]) -> None:
        """No copy begins any more; wait for those under way."""
        with self._lock:
            gone = [segment for number in numbers if (segment := self._segments.pop(number, None)) is not None]
            self._idle.wait_for(lambda: not any(self._copying[segment.number] for segment in gone))
        for segment in gone:
            segment.close()

    def _hang_up(self) -> None:
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):  # it has gone by itself
                sock.shutdown(socket.SHUT_RDWR)


def _resolved(value: Answer) -> "Future[Answer]":
    future: Future[Answer] = Future()
    future.set_result(value)
    return future


def _answer(answer: Callable[[Message | None, int], Answer], connection: int, reply: Message | None) -> Answer:
    try:
        return answer(reply, connection)
    except ValueError:  # the reply does not fit its request
        return answer(None, connection)
