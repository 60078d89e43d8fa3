"""Redis on a unix socket, limited by the processor and not by a network, beside a bare socket and redis-py.

The bare socket's other side is a process that only sends and takes as many bytes, in windows.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import redis

from benchmarks.store.rounds import ratio
from benchmarks.store.slower import BATCH, IN_DRAM, NBYTES, Measured, NotMeasuredError, Raw, faults, measure
from benchmarks.store.world import MIB, accepts, dial, rows, running, serving

WINDOW = MIB
TIMEOUT_S = 10.0
"""A command that takes longer is a failure, which the benchmark does not measure."""
ENVIRONMENT = ("env", "MALLOC_CONF=dirty_decay_ms:-1", "JE_MALLOC_CONF=dirty_decay_ms:-1")
"""As in `docs/remote.md`: else Redis writes every chunk into memory that is new to it, however many have left."""
NAMES = ("redis_get_32m", "redis_set_32m")
_PEER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[1]); listener.listen(4)
size, window = int(sys.argv[2]), int(sys.argv[3])
data = [memoryview(bytearray(os.urandom(size))) for _ in range(4)]
def serve(sock):
    number = 0
    while order := sock.recv(1):
        number += 1
        for start in range(0, size, window):
            part = data[number % 4][start:start + window]
            if order == b"g":
                sock.sendall(part)
                continue
            got = 0
            while got < len(part):
                got += sock.recv_into(part[got:])
        if order == b"s":
            sock.sendall(b"k")
while True:
    serve(listener.accept()[0])
"""


def remote(folder: Path, rounds: int) -> dict[str, Any]:
    """Every batch finds Redis empty, so that neither side pays for the other's chunks."""
    section = {"url": f"unix://{folder / 'r.sock'}", "timeout": TIMEOUT_S}
    with (
        redis_server(folder) as plain,
        peer(folder) as bare,
        serving(folder, dram=IN_DRAM * NBYTES, remote=section) as store,
    ):
        told = measure(
            store,
            "remote",
            rounds,
            {"raw socket": bare, "redis-py": plainly(plain)},
            cold=lambda: None,
            written=lambda: None,
            fresh=lambda: _empty(plain),
        )
    return {"paths": _paths(told), "faults_per_op": faults(told, *NAMES)}


def _paths(told: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, seconds, nbytes in zip(NAMES, (told.read, told.write), (NBYTES, BATCH * NBYTES), strict=True):
        found[name] = ratio(seconds["ours"], seconds["raw socket"], "raw socket", nbytes)
        found[f"{name}_vs_redispy"] = ratio(seconds["ours"], seconds["redis-py"], "redis-py", nbytes)
    return found


@contextmanager
def redis_server(folder: Path, port: int = 0, before: Sequence[str] = ENVIRONMENT) -> Iterator[redis.Redis]:
    """A Redis that keeps nothing on disk, and listens on ``port`` too unless it is 0; NotMeasuredError without Redis.

    ``before`` begins its command.
    """
    program, path = shutil.which("redis-server"), folder / "r.sock"
    if program is None:
        raise NotMeasuredError("redis-server is not installed (Debian package redis-server)")
    options = {"bind": "127.0.0.1", "port": str(port), "unixsocket": str(path), "save": "", "dir": str(folder)}
    command = [*before, program, *(word for name, value in options.items() for word in (f"--{name}", value))]
    with running(command, folder / "redis.log", lambda: accepts(path)):
        client = redis.Redis.from_url(f"unix://{path}")
        yield client
        client.close()


def plainly(client: redis.Redis) -> Raw:
    """redis-py's own set and get of one value of 32 MiB; what it gets is copied to where it is wanted."""
    row, out = rows(2, NBYTES)
    data = row.data
    client.set("plain", data)

    def read(_: int) -> None:
        np.copyto(out, np.frombuffer(cast("bytes", client.get("plain")), np.uint8))

    def write(number: int) -> None:
        client.set(f"plain {number}", data)

    return Raw(read, write)


@contextmanager
def peer(folder: Path) -> Iterator[Raw]:
    path, row = folder / "p.sock", rows(1, NBYTES)[0].data
    command = [sys.executable, "-c", _PEER, str(path), str(NBYTES), str(WINDOW)]
    with running(command, folder / "peer.log", lambda: accepts(path)), dial(path) as sock:

        def read(_: int) -> None:
            sock.sendall(b"g")
            for start in range(0, NBYTES, WINDOW):
                part = row[start : start + WINDOW]
                while part:
                    part = part[_some(sock.recv_into(part)) :]

        def write(_: int) -> None:
            sock.sendall(b"s")
            for start in range(0, NBYTES, WINDOW):
                sock.sendall(row[start : start + WINDOW])
            _some(len(sock.recv(1)))

        yield Raw(read, write)


def _some(count: int) -> int:
    if not count:
        raise RuntimeError("the other side of the socket has gone")
    return count


def _empty(client: redis.Redis) -> None:
    client.flushdb(asynchronous=True)  # else Redis gives its memory back
