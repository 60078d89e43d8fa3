"""Messages as length-prefixed frames on a unix socket: 4 bytes of length, little-endian, then msgpack."""

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator

import msgspec

from tiertune_connector.protocol.messages import Message

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_FD = struct.Struct("i")
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)  # enums are slow to combine
_FDS_BYTES = socket.CMSG_LEN(16 * _FD.size)
_READ_BYTES = 1 << 16
"""Most per read, into memory that is kept: new memory for each would cost more than all else of a small message."""


class Frames:
    """Frames on a connected unix socket. One thread at a time receives; sending is the caller's to serialise."""

    def __init__(self, connection: socket.socket, message_type: object, *, descriptors: bool = True) -> None:
        """Without ``descriptors``, those that the other side sends are not taken from the kernel, which closes them."""
        self._socket = connection
        self._ancillary_bytes = _FDS_BYTES if descriptors else 0
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)
        self._encoder = msgspec.msgpack.Encoder()
        self._room = memoryview(bytearray(_READ_BYTES))
        self._buffer = bytearray()
        self._bodies: deque[bytes] = deque()
        """Bodies of frames that were read but not taken."""
        self.descriptors: deque[int] = deque()
        """Received ones, in the order of the messages that they belong to."""

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def encode(self, message: Message) -> bytes:
        """The frame of a message."""
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def send(self, message: Message) -> None:
        """Send; OSError if the other side has gone or does not read."""
        self.put(self.encode(message))

    def put(self, encoded: bytes | bytearray) -> None:
        """Send what ``encode`` made; OSError as in ``send``."""
        self._socket.sendall(encoded)

    def takes(self) -> bool:
        """Whether a little could be sent without waiting."""
        return bool(self._polled(select.POLLOUT) & select.POLLOUT)

    def ended(self) -> bool:
        """Whether either side has closed, even before the reader has noticed."""
        return bool(self._polled(0))

    def _polled(self, events: int) -> int:
        """Which ``events`` there are, or that the connection has ended."""
        poll = select.poll()
        try:
            poll.register(self._socket, events)
        except ValueError:  # this side has closed
            return select.POLLHUP
        return next((told for _, told in poll.poll(0)), 0)

    def receive(self) -> Iterator[Message]:
        """Messages as they come, until the other side closes; OSError, msgspec.DecodeError if the connection broke."""
        while True:
            yield from self.whole()
            try:
                self.read()
            except EOFError:
                return

    def read(self, flags: int = 0) -> None:
        """Read once from the socket, with ``flags`` as in recv; EOFError if the other side has closed, OSError.

        msgspec.DecodeError if what comes is no frame.
        """
        count, ancillary, _, _ = self._socket.recvmsg_into([self._room], self._ancillary_bytes, flags | _CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) // _FD.size * _FD.size
                self.descriptors.extend(fd for (fd,) in _FD.iter_unpack(data[:whole]))
        if not count:
            raise EOFError
        self._buffer += self._room[:count]
        self._split()

    def whole(self) -> Iterator[Message]:
        """The whole messages read so far; msgspec.DecodeError if one is none."""
        while (message := self.next()) is not None:
            yield message

    @property
    def waiting(self) -> bool:
        """Whether a frame that was read is whole."""
        return bool(self._bodies)

    def next(self) -> Message | None:
        """The first message read, if whole, else None; msgspec.DecodeError if it is no message."""
        if not self._bodies:
            return None
        try:
            return self._decoder.decode(self._bodies.popleft())
        except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these two through
            raise msgspec.DecodeError(str(error)) from None

    def _split(self) -> None:
        buffer, start = self._buffer, 0
        with memoryview(buffer) as view:
            while (body := start + _LENGTH.size) <= len(view):
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_FRAME_BYTES:
                    raise msgspec.DecodeError(f"a frame of {length} bytes")
                if body + length > len(view):
                    break
                start = body + length
                self._bodies.append(view[body:start].tobytes())
        del buffer[:start]
