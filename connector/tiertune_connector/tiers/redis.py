"""Redis or Valkey as the remote tier: one key per chunk, so that its eviction never leaves half a chunk.

A chunk is written by one command, so that it is visible only whole, also after a failover, and read in windows straight
into the caller's buffer. Payloads go past redis-py, which would copy them (`resp`); all else is its work. Redis evicts
by itself; its capacity is fleet tuning and not this class's.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import cast

import numpy as np
import redis
import xxhash

from tiertune_connector.access import Login, connection_pool
from tiertune_connector.addresses import Address
from tiertune_connector.chunk import HEADER_BYTES, NOBODY, Header, Origin, decode_header
from tiertune_connector.codec import Codec, readable
from tiertune_connector.tiers.base import UNKNOWN, Came, Counted, Outcome, Read, Usage, unheard
from tiertune_connector.tiers.resp import Wire, command, set_once

PREFIX = b"tiertune:"
_EVERY = b"[0-9a-f]" * 32
"""Matches a namespace alone: other keys may begin as chunks' do."""
WINDOW_BYTES = 1 << 20
"""Asked for at once: half as much takes an eighth longer, more no less."""
_SEND_ROOM_BYTES = 4 << 20
"""What a unix socket is to hold of ours; Linux gives less if `net.core.wmem_max` is. TCP sees to it by itself."""
_PAGE = 1000
"""Chunks that a flush finds or drops at a time: a round trip for each would take minutes."""
_AHEAD = 2
"""Windows asked for before they are read: Redis has one ready while the one before is on its way. With more, it copies
what has left the processor's caches by its turn."""
PATIENT_BYTES = 16 << 20
"""With a time-out of a second, a host's eight readers need a gigabit a second at most."""


class RedisTier:
    """Every command has a time-out; a connection that failed is dropped, and the next operation makes a new one.

    An operation of many commands begins none after ``timeout_s``, and ends within twice that. For every `PATIENT_BYTES`
    of its chunk it may take as long again: several hosts, each with several readers, share one server's link.
    """

    name = "remote"

    def __init__(
        self, address: Address, *, writer: str, timeout_s: float, login: Login, codec: Codec, connections: int = 24
    ) -> None:
        self._writer = writer
        self._codec = codec
        self._timeout_s = timeout_s
        pool = connection_pool(
            address,
            login,
            timeout_s=timeout_s,
            connections=connections,
            protocol=2,  # nothing comes unasked; a connection where something did is not used
        )
        self._redis = redis.Redis(connection_pool=pool)
        self.why = ""

    def present(self, namespace: str, keys: Sequence[bytes]) -> Counted:
        """A round trip or two, unless chunks are here after a missing one: then a binary search follows."""
        names, until = [_name(namespace, key) for key in keys], time.monotonic() + self._timeout_s

        def here(start: int, stop: int) -> int:
            self._check(until)
            return int(self._redis.exists(*names[start:stop]))

        try:
            return Outcome.OK, _leading(len(names), here)
        except redis.RedisError as error:
            return self._failed(error), 0

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> Read:
        name, until = _name(namespace, key), self._until(len(out))
        head, stored, found, nbytes = memoryview(bytearray(HEADER_BYTES)), out, None, len(out)
        try:
            with self._wire(until) as wire:
                wire.send(_range(name, 0, HEADER_BYTES))
                for start in range(0, nbytes, WINDOW_BYTES)[:_AHEAD]:  # saves a round trip; most are as long
                    wire.send(_window(name, start, nbytes))
                there, header = wire.fill(head), decode_header(head)
                if header and (header.namespace, header.key, header.length) != (namespace, key, nbytes):
                    header = None
                others = header is not None and not readable(header)
                if header and not others:
                    if header.codec:
                        # which touches nothing: a bytearray would be filled with the GIL held
                        stored, nbytes = np.empty(nbytes, np.uint8).data, min(header.stored, nbytes)
                    found = _filled(wire, name, stored, nbytes, unheard if header.codec else came)
                while wire.awaited:  # what is short, useless, or not there
                    wire.fill(out)
            if not there or others:
                return Outcome.MISS, NOBODY  # perhaps whole for others
            sound = header is not None and found == header.sum_of_stored
            if header and sound and (not header.codec or self._codec.decode(header, stored[:nbytes], out)):
                self._codec.moved("read", len(out), nbytes)
                return Outcome.OK, header.origin
            self._check(until)
            length = HEADER_BYTES + nbytes if found is None else None
            return self._unfit(name, head, length) if header else self._drop(name), NOBODY
        except redis.RedisError as error:
            return self._failed(error), NOBODY

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        name, until = _name(namespace, key), self._until(len(payload))
        try:
            with self._wire(until) as wire:
                wire.send(command(b"EXISTS", name))
                if wire.reply() != b":0":
                    return Outcome.THERE
                header = Header.of(namespace, key, payload, replace(origin, writer=self._writer))
                header, stored = self._codec.encode(header, payload)
                wire.send(*set_once(name, header.encode(), stored))
                wire.reply()
                self._codec.moved("write", len(payload), len(stored))
        except redis.RedisError as error:
            return self._failed(error)
        return Outcome.OK

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> Counted:
        pattern = PREFIX + (namespace.encode() if namespace else _EVERY) + b":*"
        count = 0
        try:
            with self._redis.client() as one:  # type: ignore[no-untyped-call] # a cursor is of one server
                names = one.scan_iter(pattern, count=_PAGE)
                while page := list(islice(names, _PAGE)):
                    ours = page if tenant is None else self._of(tenant, page)
                    count += int(one.unlink(*ours)) if ours else 0
        except redis.RedisError as error:
            return self._failed(error), count
        return Outcome.OK, count

    def usage(self) -> Usage:
        """Usage of the whole server, whoever uses it."""
        try:
            memory = self._redis.info("memory")
        except redis.RedisError:
            return UNKNOWN
        return Usage(int(memory["used_memory"]), int(memory["maxmemory"]) or None, None)

    def close(self) -> None:
        self._redis.connection_pool.disconnect()

    @contextmanager
    def _wire(self, until: float) -> Iterator[Wire]:
        """Lend a connection of the pool. It is used again if all is answered, also by a refusal for want of room."""
        pool, fine = self._redis.connection_pool, False
        connection = pool.get_connection()
        try:
            if connection._sock is None:  # noqa: SLF001 # closed by another thread, which met a new master
                raise redis.ConnectionError("the connection was closed")
            sock = connection._sock  # noqa: SLF001 # the library has no other way
            if sock.family == socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_ROOM_BYTES)
            wire = Wire(sock, lambda: self._check(until))
            try:
                yield wire
            except redis.exceptions.OutOfMemoryError:
                fine = wire.in_step  # it answered: who measures what it refuses needs a connection that is up to speed
                raise
            fine = wire.in_step
        except TimeoutError:
            raise redis.TimeoutError("the server did not answer in time") from None
        except OSError as error:
            raise redis.ConnectionError(str(error)) from None
        finally:
            if not fine:
                connection.disconnect()  # type: ignore[no-untyped-call]
            pool.release(connection)

    def _of(self, tenant: bytes, names: Sequence[bytes]) -> list[bytes]:
        """The names of a tenant's chunks."""
        asked = self._redis.pipeline(transaction=False)
        for name in names:
            asked.getrange(name, 0, HEADER_BYTES - 1)
        headers = map(decode_header, asked.execute())
        return [name for name, told in zip(names, headers, strict=True) if told and told.origin.tenant == tenant]

    def _failed(self, error: redis.RedisError) -> Outcome:
        if isinstance(error, redis.exceptions.OutOfMemoryError):
            return Outcome.FULL
        if isinstance(error, redis.TimeoutError):
            return Outcome.TIMEOUT
        self.why = str(error) or type(error).__name__
        return Outcome.ERROR

    def _until(self, nbytes: int) -> float:
        """Until when a chunk of so many bytes may be on its way."""
        return time.monotonic() + self._timeout_s * (1 + nbytes / PATIENT_BYTES)

    def _check(self, until: float) -> None:
        if time.monotonic() > until:
            raise redis.TimeoutError("the operation took too long")

    def _unfit(self, name: bytes, head: memoryview, length: int | None) -> Outcome:
        """A miss if the chunk left since its ``head`` was read, and perhaps is whole again; else it is damaged.

        Whoever computed it again may have written other bytes. ``length`` is the full one if it came cut short.
        """
        now = cast("bytes", self._redis.getrange(name, 0, HEADER_BYTES - 1))
        left = now.ljust(HEADER_BYTES, b"\0") != bytes(head) or self._redis.strlen(name) == length
        return Outcome.MISS if left else self._drop(name)

    def _drop(self, name: bytes) -> Outcome:
        """Remove a damaged chunk; a miss if it is gone already."""
        return Outcome.CORRUPT if self._redis.unlink(name) else Outcome.MISS


def _name(namespace: str, key: bytes) -> bytes:
    return PREFIX + namespace.encode() + b":" + key


def _leading(count: int, here: Callable[[int, int], int]) -> int:
    """How many of ``count`` come before the first missing one; ``here`` counts those present in a range."""
    low, high = 0, count
    asked, guessed = count, False
    while low < high:
        found = here(low, asked)
        if found == asked - low:
            low = asked
        else:
            high = min(asked - 1, low + found)
        asked = (low + high + 1) // 2 if guessed else high  # mostly nothing is behind a run that is there
        guessed = True
    return low


def _range(name: bytes, start: int, length: int) -> bytes:
    return command(b"GETRANGE", name, b"%d" % start, b"%d" % (start + length - 1))


def _window(name: bytes, start: int, nbytes: int) -> bytes:
    """Ask for a window from ``start``, of ``nbytes`` stored in all."""
    return _range(name, HEADER_BYTES + start, min(WINDOW_BYTES, nbytes - start))


def _filled(wire: Wire, name: bytes, out: memoryview, nbytes: int, came: Came) -> int | None:
    """Read the ``nbytes`` stored, whose first windows are asked for already; returns their `checksum`.

    None if a part is missing. ``out`` has room for all that was asked for.
    """
    digest = xxhash.xxh3_64()
    for start in range(0, nbytes, WINDOW_BYTES):
        window, wanted = out[start : start + WINDOW_BYTES], min(WINDOW_BYTES, nbytes - start)
        if wire.fill(window) < wanted:
            return None
        ahead = start + _AHEAD * WINDOW_BYTES
        if ahead < nbytes:
            wire.send(_window(name, ahead, nbytes))
        digest.update(window[:wanted])
        came(start + wanted)
    return digest.intdigest()
