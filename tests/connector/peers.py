"""Who speaks to the socket of a store with no more than its protocol."""

import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from connector.stores import CHUNK_BYTES, NAMESPACE
from tiertune_connector.protocol.frames import Frames
from tiertune_connector.protocol.messages import Hello, Reply, Welcome


def hello(protocol: int = 1, client: str = "raw", chunk_bytes: int = CHUNK_BYTES) -> Hello:
    return Hello(protocol, "test", client, "engine", "all", NAMESPACE, chunk_bytes, 16)


def dial(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(str(path))
    return sock


def say(sock: socket.socket, message: list[Any]) -> None:
    """What need not be one of the protocol's."""
    body = msgspec.msgpack.encode(message)
    sock.sendall(struct.pack("<I", len(body)) + body)


def raw(path: Path, greeting: Hello) -> tuple[socket.socket, Frames, Welcome]:
    """A connection without a client around it."""
    sock = dial(path)
    frames = Frames(sock, Reply)
    frames.send(greeting)
    return sock, frames, next(frames.receive())
