"""The store on a unix socket: a thread for each client, a pool of threads for what waits, one for upkeep."""

import logging
import os
import select
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from tiertune_connector import __version__
from tiertune_connector.counters import Counters
from tiertune_connector.serve.protocol import (
    PROTOCOL,
    SERVED,
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
    Release,
    Report,
    Request,
    Reserve,
    ReserveReply,
    Steps,
    Touch,
    Welcome,
)
from tiertune_connector.session import Session
from tiertune_connector.store import TieredStore

log = logging.getLogger(__name__)
_SEND_TIMEOUT_S = 5
_UPKEEP_S = 0.05
_EXPIRY_S = 1.0
_AGAIN_S = 0.2
"""After a failure to accept, and while it is not clear whether the remote is well."""
_LISTEN_TIMEOUT_S = 1.0


class Connection:
    """One client's socket and session."""

    def __init__(self, sock: socket.socket) -> None:
        self.session: Session | None = None
        self._socket = sock
        # A client that does not read must not stop the store: sends time out, receives do not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.pid = pid
        self.process = _pidfd(pid)
        self.frames = Frames(sock, Request)
        self._sending = threading.Lock()
        self._lifetime = threading.Lock()  # a descriptor that is closed may be another file's a moment later
        self._segments: set[int] = set()

    def reply(self, store: TieredStore, message: LoadReply | ReserveReply) -> None:
        """Send a reply after the descriptors of segments that the client does not know yet."""
        assert self.session is not None
        named = {slot.segment for slot in message.slots if slot is not None}
        with self._sending:
            for segment in store.dram.segments(self.session.digest) if named - self._segments else ():
                if segment.number in named - self._segments:
                    geometry = segment.geometry
                    announcement = NewSegment(segment.number, geometry.slots, geometry.chunk_bytes)
                    self.frames.send(announcement, descriptor=segment.fd)
                    self._segments.add(segment.number)
            self.frames.send(message)

    def send(self, message: Message) -> None:
        with self._sending:
            self.frames.send(message)

    def drop(self, segments: list[int]) -> None:
        """Tell the client to unmap."""
        known = self._segments & set(segments)
        if known:
            self._segments -= known
            self.send(DropSegments(sorted(known)))

    def same_client(self, other: "Connection") -> bool:
        """Whether both are connections of one client object."""
        mine, others = self.session, other.session
        return mine is not None and others is not None and mine.client == others.client

    def process_ended(self) -> bool:
        """Whether the client's process is known to be gone."""
        if self.process is None:
            return False
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(0))

    def shutdown(self) -> None:
        """End the connection from this side; its thread notices, and so does a send that is under way."""
        with self._lifetime, suppress(OSError):  # it has gone by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        with self._sending, self._lifetime:
            self._socket.close()
        self.frames.close()

    def forget_process(self) -> None:
        if self.process is not None:
            os.close(self.process)
            self.process = None


class Server:
    """Serves one store on one socket until ``stop``."""

    def __init__(self, store: TieredStore, path: Path, counters: Counters, *, probe_every_s: float) -> None:
        self.boot_id = uuid.uuid4().hex
        self.store = store
        self.path = path
        self._counters = counters
        self._probe_every_s = probe_every_s
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._lost: list[Connection] = []
        """Ended connections whose clients may still be copying into reserved slots."""
        self._stopping = threading.Event()
        self._listens = False
        self._waiters = ThreadPoolExecutor(32, thread_name_prefix="wait")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._threads: list[threading.Thread] = []
        counters.gauges_from(lambda: [("clients", (), float(len(self.sessions())))])

    def start(self) -> None:
        """Listen; OSError if another store is there, or the path cannot be used."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_socket():
            raise OSError(f"{self.path}: is not a socket, and is left alone")
        if _answers(self.path):
            raise OSError(f"{self.path}: another store listens here already")
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self._listens = True
        self.path.chmod(0o600)
        self._listener.listen(64)
        self._spawn(self._accept)
        self._spawn(self._upkeep)
        self._spawn(self._probe)
        self._spawn(self.store.observer.run, self._stopping, self._counters)

    def stop(self) -> None:
        """End every connection and thread; the socket's path goes too, if it is ours."""
        self._stopping.set()
        _wake(self._listener)
        if self._listens:
            self.path.unlink(missing_ok=True)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.shutdown()
        for thread in self._threads:
            thread.join(5)
        self._waiters.shutdown(wait=False, cancel_futures=True)

    def sessions(self) -> list[Session]:
        with self._lock:
            return [connection.session for connection in self._connections if connection.session is not None]

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=target.__name__.strip("_"), daemon=True)
        thread.start()
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
                connection = Connection(sock)
            except OSError as error:  # descriptors have run out, or the client has gone again, or we stop
                if not self._stopping.wait(_AGAIN_S):
                    log.warning("a client could not be accepted: %s", error)
                    self._counters.add("internal_errors_total", ("accept",))
                continue
            with self._lock:
                self._connections.add(connection)
            self._spawn(self._converse, connection)
        self._listener.close()

    def _converse(self, connection: Connection) -> None:
        try:
            messages = connection.frames.receive()
            hello = next(messages, None)
            if isinstance(hello, Hello) and self._welcome(connection, hello):
                for message in messages:
                    self._handle(connection, message)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            log.info("connection of pid %d ended: %s", connection.pid, error)
        except Exception:
            log.exception("a request of pid %d failed", connection.pid)
            self._counters.add("internal_errors_total", ("converse",))
        finally:
            self._end(connection)

    def _welcome(self, connection: Connection, hello: Hello) -> bool:
        session = Session(
            hello.client,
            hello.engine,
            hello.stage,
            hello.namespace,
            hello.chunk_bytes,
            hello.chunk_tokens,
            connection.pid,
            gpus=tuple(hello.gpus),
        )
        refusal, reason = "", "chunk_size"
        if hello.protocol not in SERVED:
            refusal, reason = f"protocol {hello.protocol} is not served, only {SERVED}", "protocol"
        elif hello.namespace is not None:
            if hello.chunk_bytes <= 0 or hello.chunk_tokens <= 0:
                refusal = "a chunk has at least one byte and one token"
            refusal = refusal or self.store.attach(session)
        if refusal:
            self._counters.add("rejected_hellos_total", (reason,))
        else:
            connection.session = session
            self._forgive(connection)
        connection.send(Welcome(PROTOCOL, __version__, self.boot_id, self.store.name, refusal))
        return not refusal

    def _handle(self, connection: Connection, message: Message) -> None:
        store, session = self.store, connection.session
        assert session is not None
        if session.namespace is None and not isinstance(message, Steps):
            raise msgspec.ValidationError("a client without a namespace only reports steps")
        match message:
            case Lookup():
                waits = store.needs_remote(session, message.keys, message.sides)
                self._run(connection, self._lookup, message, waits=waits)
            case Load():
                waits = not store.loads_at_once(session, message.keys)
                self._run(connection, partial(self._load, time.monotonic()), message, waits=waits)
            case Reserve():
                reserved = store.reserve(session, message.request, message.keys, message.tenant)
                connection.reply(store, msgspec.structs.replace(reserved, id=message.id))
            case Commit():
                connection.send(CommitReply(message.id, store.commit(session, message.keys, message.slots)))
            case _:
                self._told(session, message)

    def _told(self, session: Session, message: Message) -> None:
        """What needs no reply."""
        store = self.store
        match message:
            case Own():
                store.own(session, message.request, message.gpu_chunks, message.staging_chunks)
            case Release():
                store.release(session, message.lease)
            case Abort():
                store.abort(session, message.keys)
            case Touch():
                store.touch(session, message.keys)
            case Report():
                store.report(session, message)
            case FirstToken():
                store.first_token(message)
            case Steps():
                store.accounts.steps(message.steps)
                if message.gpus:
                    session.gpus = tuple(message.gpus)
            case _:
                raise msgspec.ValidationError(f"a client may not send {type(message).__name__} here")

    def _run(self, connection: Connection, serve: Callable[..., None], message: Message, *, waits: bool) -> None:
        if not waits:
            serve(connection, message)
            return

        def guarded() -> None:
            try:
                serve(connection, message)
            except OSError:
                connection.shutdown()
            except Exception:
                log.exception("a request of pid %d failed", connection.pid)
                self._counters.add("internal_errors_total", ("wait",))
                connection.shutdown()

        self._waiters.submit(guarded)

    def _lookup(self, connection: Connection, message: Lookup) -> None:
        assert connection.session is not None
        self.store.observer.prefill(connection.session, message.prefill)
        found: LookupReply = self.store.lookup(
            connection.session,
            message.request,
            message.keys,
            message.prompt_tokens,
            tenant=message.tenant,
            sides=message.sides,
            defer=message.defer,
        )
        connection.send(msgspec.structs.replace(found, id=message.id))

    def _load(self, received: float, connection: Connection, message: Load) -> None:
        assert connection.session is not None
        waited_s = time.monotonic() - received
        loaded = self.store.load(connection.session, message.keys, message.deadline_s, waited_s)
        connection.reply(self.store, msgspec.structs.replace(loaded, id=message.id))

    def _end(self, connection: Connection) -> None:
        connection.close()
        session = connection.session
        with self._lock:
            self._connections.discard(connection)
            if session is not None:
                self.store.detach(session)
                self._lost.append(connection)
                back = any(other.same_client(connection) for other in self._connections)
                if back or not session.quarantined:
                    self._release([connection])
            else:
                connection.forget_process()

    def _forgive(self, back: Connection) -> None:
        """A client that is back copies nothing of before: its old slots leave quarantine, its old connection ends."""
        with self._lock:
            self._release([lost for lost in self._lost if lost.same_client(back)])
            for other in self._connections:
                if other is not back and other.same_client(back):
                    other.shutdown()

    def _release(self, ended: list[Connection]) -> None:
        for connection in ended:
            self._lost.remove(connection)
            assert connection.session is not None
            self.store.leave_quarantine(connection.session)
            connection.forget_process()

    def _upkeep(self) -> None:
        next_expiry, wait_s = 0.0, _UPKEEP_S
        while not self._stopping.wait(wait_s):
            try:
                wait_s = 0.0 if self._step() else _UPKEEP_S
                if time.monotonic() >= next_expiry:
                    next_expiry = time.monotonic() + _EXPIRY_S
                    self.store.expire(self.sessions())
            except Exception:
                log.exception("upkeep failed")
                self._counters.add("internal_errors_total", ("upkeep",))

    def _step(self) -> bool:
        """One bounded round; True while memory is still to be taken or given back."""
        more = self.store.dram.settle()
        self.store.clean_ahead()
        dropped = self.store.dram.dropped_segments()
        with self._lock:
            self._release([lost for lost in self._lost if lost.process_ended()])
            connections = list(self._connections) if dropped else []
        for connection in connections:
            try:
                connection.drop(dropped)
            except OSError:
                connection.shutdown()
        return more

    def _probe(self) -> None:
        while True:
            wait_s = self._probe_every_s
            try:
                if self.store.probe():
                    wait_s = min(wait_s, _AGAIN_S)
            except Exception:
                log.exception("a probe failed")
                self._counters.add("internal_errors_total", ("probe",))
            if self._stopping.wait(wait_s):
                return


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _answers(path: Path) -> bool:
    """Whether somebody listens there, if only with a full backlog."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_LISTEN_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False
        return True


def _wake(listener: socket.socket) -> None:
    """End a blocked accept."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        listener.close()
