"""Redis' protocol (RESP2) for what redis-py would copy: payloads between a socket and the memory they belong in.

redis-py makes, logs in and takes back its connections; while one is ours, only this module reads from it.
"""

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

import redis

_LINE_BYTES = 512
"""Longest line; only an error's text is longer in Redis."""
_SEND_BYTES = 1 << 20
"""Between two looks at the clock."""
_END = b"\r\n"
_SHORT = re.compile(rb"\+.*|:-?\d+|\$-1", re.DOTALL)


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def set_once(name: bytes, header: bytes, payload: memoryview) -> tuple[bytes, memoryview, bytes]:
    """The parts of ``SET name <header and payload> NX``."""
    start = b"*4\r\n" + _bulk(b"SET") + _bulk(name) + b"$%d\r\n" % (len(header) + len(payload)) + header
    return start, payload, _END + _bulk(b"NX")


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


@dataclass(eq=False)
class Wire:
    """Commands and their replies, in turn. Not thread-safe; of no use after an exception, unless still `in_step`.

    ``check`` raises when it is too late to go on: it is asked before every step, each of which takes no longer than the
    socket's time-out. RedisError as redis-py would raise it, and OSError of the socket.
    """

    sock: socket.socket
    check: Callable[[], None]

    awaited: int = 0
    """Replies still to come."""
    _held: bytes = b""
    """Received but not looked at yet."""

    @property
    def in_step(self) -> bool:
        """Whether all that was asked is answered, and nothing else came."""
        return not self.awaited and not self._held

    def send(self, *parts: bytes | memoryview) -> None:
        """Send one command."""
        self.awaited += 1
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _SEND_BYTES):
                self.check()
                self.sock.sendall(view[start : start + _SEND_BYTES])

    def reply(self) -> bytes:
        """An answer of one line: a status, a number, or nothing (``$-1``); ResponseError if the server refused."""
        line = self._line()
        if not _SHORT.fullmatch(line):
            raise redis.InvalidResponse(f"an answer that was not expected: {line!r}")
        self.awaited -= 1
        return line

    def fill(self, out: memoryview) -> int:
        """Receive a value into the beginning of ``out``; returns its length."""
        line = self._line()
        if line[:1] != b"$" or not line[1:].isdigit() or int(line[1:]) > len(out):
            raise redis.InvalidResponse(f"at most {len(out)} bytes were asked for, and {line!r} came")
        size = int(line[1:])
        self._receive(out[:size])
        self.awaited -= 1
        return size

    def _receive(self, out: memoryview) -> None:
        """Receive a whole value, and the end of line after it."""
        done = min(len(self._held), len(out))
        out[:done] = self._held[:done]
        self._held = self._held[done:]
        while done < len(out):
            self.check()
            done += _came(self.sock.recv_into(out[done:]))
        while len(self._held) < len(_END):
            self._more()
        if not self._held.startswith(_END):
            raise redis.InvalidResponse("a value is longer than it was said to be")
        self._held = self._held[len(_END) :]

    def _line(self) -> bytes:
        while _END not in self._held and len(self._held) < _LINE_BYTES:
            self._more()
        line, ended, rest = self._held.partition(_END)
        if line.startswith(b"-"):
            if ended:  # a whole answer
                self._held, self.awaited = rest, self.awaited - 1
            told = line[1:].decode(errors="replace")
            raise (redis.exceptions.OutOfMemoryError if told.startswith("OOM ") else redis.ResponseError)(told)
        if not ended:
            raise redis.InvalidResponse("an answer without an end of line")
        self._held = rest
        return line

    def _more(self) -> None:
        self.check()
        data = self.sock.recv(_LINE_BYTES)
        _came(len(data))
        self._held += data


def _came(count: int) -> int:
    if not count:
        raise redis.ConnectionError("the server closed the connection")
    return count
