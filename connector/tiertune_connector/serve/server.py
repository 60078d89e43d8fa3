"""The store on a unix socket: one thread for all clients, pools of threads for what waits, one for upkeep."""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal

import msgspec

from tiertune_connector import __version__
from tiertune_connector.counters import Counters
from tiertune_connector.protocol.messages import (
    SERVED,
    Abort,
    Commit,
    FirstToken,
    Hello,
    Load,
    LoadPart,
    Lookup,
    Message,
    Own,
    Release,
    Report,
    Reserve,
    Steps,
    Welcome,
)
from tiertune_connector.serve.connection import Connection
from tiertune_connector.serve.embedded import answers
from tiertune_connector.serve.turns import Turns
from tiertune_connector.serve.waiters import Kind, Waiters
from tiertune_connector.sessions.session import Session
from tiertune_connector.store.storing import AT_ONCE
from tiertune_connector.store.tiered import TieredStore
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.steps import BREATH_S

log = logging.getLogger(__name__)
_STUCK_S = 5.0
"""After so long, a client that takes nothing is dropped."""
_HELLO_TIMEOUT_S = 5.0
_PATIENCE_S = 5.0
"""Time for all threads to end; one may hang in a disk."""
_UPKEEP_S = 0.05
_SOON_S = 0.005
"""Until the next upkeep while a fast tier writes behind: it would be done with all that one queues before 50 ms."""
_EXPIRY_S = 1.0
_AGAIN_S = 0.2
"""Wait after a failure to accept, and while the remote's health is unclear."""
_UNWELL_S = 1.0
"""How soon to probe a remote that requests found unwell, and again while it is dead."""
_UNSEEN = "if it dies in the midst of storing, those slots are lost until the store restarts; share its pid namespace"


@dataclass(eq=False)
class Server:
    """Serves one store on one socket until ``stop``."""

    store: TieredStore
    path: Path
    counters: Counters
    probe_every_s: float

    def __post_init__(self) -> None:
        self.boot_id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._lost: list[Connection] = []
        """Ended connections whose clients may still be copying into reserved slots."""
        self._stopping = threading.Event()
        self._socket_file: os.stat_result | None = None
        self._turns = Turns(self._handle, self._ended)
        self._waiters = Waiters(self.counters)
        store = self.store
        self._takers: dict[type[Message], Callable[[Session, Any], Message | None]] = {
            Reserve: store.storing.reserve,
            Commit: store.storing.commit,
            Own: store.lookups.own,
            Release: store.holdings.release,
            Abort: store.storing.abort,
            Report: store.loads.report,
            FirstToken: store.accounts.first_token,
            Steps: store.accounts.steps,
        }
        """What takes messages, and answers those that need a reply; lookups and loads aside, which may wait."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._threads: list[threading.Thread] = []
        self._accepting: threading.Thread | None = None
        self.counters.gauges_from(lambda: [("clients", (), len(self.sessions()))])

    def start(self, *tasks: Callable[[threading.Event], None]) -> None:
        """Listen; OSError if another store does, or the path cannot be used.

        ``tasks`` run beside, on threads of their own; their event is set when they are to end.
        """
        if self.path.exists() and not self.path.is_socket():
            raise OSError(f"{self.path}: is not a socket, and is left alone: name another path, or remove it")
        if answers(self.path):
            raise OSError(f"{self.path}: another store listens here already: end it, or name another socket")
        self.path.unlink(missing_ok=True)
        try:
            self._listener.bind(str(self.path))
        except OSError as error:  # which names no path
            raise OSError(f"{self.path}: {error.strerror}") from error
        self._socket_file = self.path.stat()
        self.path.chmod(0o600)
        self._listener.listen(64)
        self._spawn(self._turns.run)
        self._accepting = self._spawn(self._accept)
        self._spawn(self._upkeep)
        if self.store.disk is not None:
            self._spawn(self._settle_disk, self.store.disk)
        self._spawn(self._probe)
        self._spawn(self.store.observer.run, self._stopping, self.counters)
        for task in tasks:
            self._spawn(task, self._stopping)

    def stop(self) -> None:
        """End every connection and thread; the socket's path goes too, if it is ours."""
        self._stopping.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # ends a blocked accept
        except OSError:
            self._listener.close()
        with suppress(FileNotFoundError):
            if self._socket_file and os.path.samestat(self.path.stat(), self._socket_file):
                self.path.unlink()
        if self._accepting is not None:
            self._accepting.join(5)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.shutdown()
        self._turns.stop()
        until = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for connection in list(self._connections):  # one that was being welcomed
            self._end(connection)
        with self._lock:
            self._release(list(self._lost))
        self._turns.close()
        self._waiters.close()

    @property
    def hidden(self) -> bool:
        """Whether the socket's file was removed: nobody else can come."""
        return not os.path.lexists(self.path)

    def sessions(self) -> list[Session]:
        with self._lock:
            return [connection.session for connection in self._connections if connection.session is not None]

    def _spawn(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=target.__name__.strip("_"), daemon=True)
        thread.start()
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        return thread

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
                connection = Connection(sock)
            except OSError as error:  # descriptors have run out, or the client has gone again, or we stop
                if not self._stopping.wait(_AGAIN_S):
                    log.warning("a client could not be accepted: %s", error)
                    self.counters.add("internal_errors_total", ("accept",))
                continue
            with self._lock:
                self._connections.add(connection)
            try:
                self._spawn(self._greet, connection, sock)
            except RuntimeError as error:  # threads have run out
                self._ended(connection, error)
        self._listener.close()

    def _greet(self, connection: Connection, sock: socket.socket) -> None:
        """Take a new client's first message; making room for it may take long."""
        try:
            sock.settimeout(_HELLO_TIMEOUT_S)
            try:
                hello = next(connection.frames.receive(), None)
            except msgspec.ValidationError as error:
                self.counters.add("rejected_hellos_total", ("protocol",))
                refusal = f"this store has TierTune {__version__}, the engine a version that greets otherwise: {error}"
                connection.send(Welcome(self.boot_id, refusal))
                raise
            sock.setblocking(False)
            if not isinstance(hello, Hello) or not self._welcome(connection, hello):
                self._end(connection)
                return
            for message in connection.frames.whole():
                self._handle(connection, message)
            self._turns.add(connection)
        except Exception as error:  # noqa: BLE001 (whatever a client sends, the others are served)
            self._ended(connection, error)

    def _ended(self, connection: Connection, error: Exception) -> None:
        """Stop serving a connection."""
        if isinstance(error, OSError | EOFError | msgspec.DecodeError | msgspec.ValidationError):
            log.info("connection of %s ended: %s", connection, str(error) or "closed")
        else:
            log.error("a request of %s failed", connection, exc_info=error)
            self.counters.add("internal_errors_total", ("converse",))
        with self.counters.surviving("converse", f"a connection of {connection} could not be ended"):
            self._end(connection)

    def _welcome(self, connection: Connection, hello: Hello) -> bool:
        session = Session(
            hello.client,
            hello.engine,
            hello.stage,
            hello.namespace,
            hello.chunk_bytes,
            hello.chunk_tokens,
            connection.peer.pid,
            gpus=tuple(hello.gpus),
            looks=hello.looks,
        )
        refusal, reason = "", "chunk_size"
        if hello.protocol not in SERVED:
            versions = f"the engine has TierTune {hello.version}, this store {__version__}"
            refusal, reason = f"protocol {hello.protocol} is not served, only {SERVED}: {versions}", "protocol"
        elif hello.namespace is not None:
            if hello.chunk_bytes <= 0 or hello.chunk_tokens <= 0:
                refusal = "a chunk has at least one byte and one token"
            refusal = refusal or self.store.attach(session)
        if refusal:
            self.counters.add("rejected_hellos_total", (reason,))
        else:
            connection.session = session
            if connection.peer.process is None:
                log.warning("%s runs where this store cannot see it end: %s", hello.engine, _UNSEEN)
            self._forgive(connection)
        connection.send(Welcome(self.boot_id, refusal))
        return not refusal

    def _handle(self, connection: Connection, message: Message) -> None:
        store, session = self.store, connection.session
        assert session is not None
        kind: Kind | Literal[""]
        if session.namespace is None and not isinstance(message, Steps):
            raise msgspec.ValidationError("a client without a namespace only reports steps")
        match message:
            case Lookup():
                kind = "lookup" if store.lookups.needs_remote(session, message) else ""
                until = time.monotonic() + (message.deadline_s or inf)
                serve = partial(self._lookup, connection, session, message, until, wait=bool(kind))
            case Load():
                kind = store.loads.load_waits_for(session, message.keys)
                until, tell = time.monotonic() + message.deadline_s, partial(self._part, connection)
                answer = partial(store.loads.load, session, message, until, wait=bool(kind), tell=tell)
                serve = partial(self._answer, connection, answer)
            case _ if type(message) in self._takers:
                many = isinstance(message, Reserve | Commit) and len(message.keys) > AT_ONCE
                damaged = isinstance(message, Release) and message.damaged
                kind = "store" if many else "damage" if damaged else ""
                serve = partial(self._answer, connection, partial(self._takers[type(message)], session, message))
            case _:
                raise msgspec.ValidationError(f"a client may not send {type(message).__name__} here")
        if kind:
            self._waiters.run(connection, serve, kind)
        else:
            serve()

    def _answer(self, connection: Connection, make: Callable[[], Message | None]) -> None:
        answer = make()
        if answer is not None:
            connection.reply(self.store, answer)

    def _lookup(self, connection: Connection, session: Session, message: Lookup, until: float, *, wait: bool) -> None:
        found = self.store.lookups.lookup(session, message, until, wait=wait)
        if message.id:
            connection.send(found)
        count = partial(self.store.lookups.looked_up, session, message, found)
        if self.store.lookups.long(message) and not wait:
            self._waiters.later(connection, count)
        else:
            count()

    def _part(self, connection: Connection, part: LoadPart) -> None:
        """Called on a thread that reads for others too, so a client that has gone must not fail it."""
        with self.counters.surviving("part", f"{connection} could not be told what has come"):
            try:
                connection.reply(self.store, part)
            except OSError:
                connection.shutdown()

    def _end(self, connection: Connection) -> None:
        connection.close()
        session = connection.session
        with self._lock:
            if connection not in self._connections:
                return
            self._connections.remove(connection)
            if session is not None:
                self.store.holdings.end(session)
                self._lost.append(connection)
                back = any(connection.precedes(other) for other in self._connections)
                if back or not session.quarantined:
                    self._release([connection])
            else:
                connection.peer.forget()

    def _forgive(self, back: Connection) -> None:
        """A client that is back copies nothing from before: its old slots leave quarantine, its old connections end.

        It may have come back even once more: it does not wait for ever to be welcomed.
        """
        with self._lock:
            self._release([lost for lost in self._lost if lost.precedes(back)])
            for other in self._connections:
                if other.precedes(back):
                    other.shutdown()

    def _release(self, ended: list[Connection]) -> None:
        for connection in ended:
            self._lost.remove(connection)
            assert connection.session is not None
            self.store.holdings.leave_quarantine(connection.session)
            connection.peer.forget()

    def _upkeep(self) -> None:
        next_expiry, wait_s = 0.0, _UPKEEP_S
        while not self._stopping.wait(wait_s):
            wait_s = _UPKEEP_S
            with self.counters.surviving("upkeep", "upkeep failed"):
                wait_s = self._step()
                self.store.show()
                if time.monotonic() >= next_expiry:
                    next_expiry = time.monotonic() + _EXPIRY_S
                    self.store.holdings.expire(self.sessions())
                    self.store.watch()
                    self.store.forget()

    def _settle_disk(self, disk: DiskTier) -> None:
        """Upkeep that waits for the disk, on its own thread, as the disk may hang."""
        more = False
        while not self._stopping.wait(BREATH_S if more else _UPKEEP_S):
            more = False
            with self.counters.surviving("upkeep", "the disk's upkeep failed"):
                more = disk.settle()

    def _step(self) -> float:
        """One bounded round of upkeep; seconds until the next, fewer while a tuning is not yet in force."""
        more = self.store.pools.settle()
        drains = self.store.behind.clean_ahead()
        dropped = self.store.dram.dropped_segments()
        with self._lock:
            self._release([lost for lost in self._lost if lost.peer.ended()])
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.drop(dropped)
            except OSError:
                connection.shutdown()
            if connection.stuck_s() > _STUCK_S:
                log.info("%s does not take what it asked for", connection)
                connection.shutdown()
        return BREATH_S if more else _SOON_S if drains else _UPKEEP_S

    def _probe(self) -> None:
        """Probe all tiers regularly, but soon and repeatedly while the remote is not well."""
        due, wait_s = time.monotonic(), 0.0
        while not self._stopping.wait(wait_s):
            regular, wait_s = time.monotonic() >= due, _UNWELL_S
            with self.counters.surviving("probe", "a probe failed"):
                if regular:
                    self.store.health.try_again()
                if (regular or self.store.health.remote_unwell) and self.store.health.probe():
                    wait_s = _AGAIN_S
            if regular:
                due = time.monotonic() + self.probe_every_s
            wait_s = max(0.0, min(wait_s, due - time.monotonic()))
