"""The process at the other end of a socket."""

import os
import select
import socket
import struct

_SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)
"""From asm-generic/socket.h: Python's ``socket`` lacks it."""


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
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        try:
            return os.pidfd_open(pid) if pid > 0 else None
        except OSError:
            return None
