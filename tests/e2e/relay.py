"""A way to a server of a test that can be spoilt: nothing comes through, or every connection breaks."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Relay:
    """Passes connections on to a loopback port, unless told otherwise."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._passes = threading.Event()
        self._passes.set()
        self.answered = 0
        """Bytes of answers that were passed on; counted before whoever asked has them."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    @contextmanager
    def swallowing(self) -> Iterator[None]:
        """Connections are taken, and what is sent goes nowhere."""
        self._passes.clear()
        try:
            yield
        finally:
            self.drop()  # what was swallowed is lost, as it would be on a network
            self._passes.set()

    def drop(self) -> None:
        """Reset every connection."""
        with self._lock:
            sockets, self._open = self._open, set()
        for sock in sockets:
            _reset(sock)

    def run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # nobody is there
                    _reset(near)
                    continue
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {near, far}
                for source, sink, back in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=(source, sink, back), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._passes.set()
        self.drop()

    def _pump(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._passes.wait()
                if back:
                    with self._lock:
                        self.answered += len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with self._lock:
                self._open.discard(sock)
            _reset(sock)


def _reset(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RD)  # whoever receives from it wakes
    with suppress(OSError):
        sock.close()


@contextmanager
def relay(target: int) -> Iterator[Relay]:
    """To a loopback port."""
    made = Relay(target)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join()
