"""Redis or Valkey as the remote tier: one key per chunk, so that its eviction never leaves half a chunk.

A chunk is written in windows to a temporary key that expires, then renamed: visible only whole. All its windows go over
one connection: after a failover a window that the old master alone had would be missing in the new one. It is read in
windows straight into the caller's buffer. Redis evicts by itself; its capacity is fleet tuning and not this class's.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np
import redis

from tiertune_connector.access import Login, connection_pool
from tiertune_connector.addresses import Address, parse_address
from tiertune_connector.chunk import HEADER_BYTES, NOBODY, Header, Origin, checksum, decode_header
from tiertune_connector.tiers.base import Outcome, Usage

PREFIX = b"tiertune:"
WINDOW_BYTES = 1 << 20
_AT_ONCE = 4
"""Windows of a chunk that are sent together: Redis deals with one while the next is on its way."""
_TEMPORARY_SECONDS = 60
_PUBLISH = """
if redis.call('persist', KEYS[1]) == 0 then
  redis.call('del', KEYS[1])
  return 0
end
redis.call('rename', KEYS[1], KEYS[2])
return 1
"""
"""A value without an expiry was evicted while it was written, and made anew by a later window: it is not whole."""


class RedisTier:
    """Every command has a time-out; a connection that failed is dropped and made anew by the next operation.

    An operation of many commands begins none after ``timeout_s``; it ends within twice that.
    """

    name = "remote"

    def __init__(
        self,
        address: Address | str,
        *,
        writer: str,
        timeout_s: float,
        login: Login | None = None,
        connections: int = 24,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` gives monotonic seconds; ValueError if the address is not understood."""
        self._writer = writer
        self._timeout_s = timeout_s
        self._clock = clock
        where = parse_address(address) if isinstance(address, str) else address
        pool = connection_pool(where, login or Login(), timeout_s=timeout_s, connections=connections)
        self._redis = redis.Redis(connection_pool=pool)

    def present(self, namespace: str, keys: Sequence[bytes]) -> tuple[Outcome, int]:
        """One round trip where all or none are here; else a binary search, one round trip a step."""
        names = [_name(namespace, key) for key in keys]
        low, high, asked = 0, len(names), len(names)
        until = self._clock() + self._timeout_s
        try:
            while low < high:
                self._check(until)
                here = int(self._redis.exists(*names[low:asked]))
                if here == asked - low:
                    low = asked
                else:
                    high = min(asked - 1, high)
                asked = min(high, (low + high + 1) // 2) if high > low else low
        except redis.RedisError as error:
            return _outcome(error), 0
        return Outcome.OK, low

    def read(self, namespace: str, key: bytes, out: memoryview) -> tuple[Outcome, Origin]:
        name = _name(namespace, key)
        until = self._clock() + self._timeout_s
        try:
            head = self._range(name, 0, HEADER_BYTES)
            if not head:
                return Outcome.MISS, NOBODY
            header = decode_header(head)
            if header is None or (header.namespace, header.key, header.length) != (namespace, key, len(out)):
                return self._drop(name), NOBODY
            for start in range(0, len(out), WINDOW_BYTES):
                self._check(until)
                window = out[start : start + WINDOW_BYTES]
                data = self._range(name, HEADER_BYTES + start, len(window))
                if len(data) != len(window):
                    return self._cut_short(name, HEADER_BYTES + len(out)), NOBODY
                np.copyto(np.frombuffer(window, np.uint8), np.frombuffer(data, np.uint8))
            if checksum(out) != header.checksum:
                return self._drop(name), NOBODY
        except redis.RedisError as error:
            return _outcome(error), NOBODY
        return Outcome.OK, header.origin

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        name = _name(namespace, key)
        header = Header(namespace, key, Origin(self._writer, origin.tenant), len(payload), checksum(payload))
        aside = PREFIX + b"writing:" + uuid.uuid4().hex.encode()
        try:
            with self._one_connection() as connection:
                if _sent(connection, ("EXISTS", name)):
                    return Outcome.OK
                self._write_aside(connection, aside, header, payload)
                whole = _sent(connection, ("EVAL", _PUBLISH, 2, aside, name))
        except redis.exceptions.ResponseError as error:  # what was refused takes room until it expires
            with suppress(redis.RedisError):
                self._redis.unlink(aside)
            return _outcome(error)
        except redis.RedisError as error:
            return _outcome(error)
        return Outcome.OK if whole else Outcome.FULL

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> tuple[Outcome, int]:
        pattern = PREFIX + (namespace.encode() if namespace else b"[0-9a-f]*") + b":*"
        count = 0
        try:
            with self._redis.client() as one:  # type: ignore[no-untyped-call] # a cursor is of one server
                for name in one.scan_iter(pattern, count=1000):
                    if tenant is not None:
                        header = decode_header(self._range(name, 0, HEADER_BYTES))
                        if header is None or header.origin.tenant != tenant:
                            continue
                    count += int(one.unlink(name))
        except redis.RedisError as error:
            return _outcome(error), count
        return Outcome.OK, count

    def usage(self) -> Usage:
        try:
            memory = self._redis.info("memory")
        except redis.RedisError:
            return Usage(0, None, None)
        return Usage(int(memory["used_memory"]), int(memory["maxmemory"]) or None, None)

    def close(self) -> None:
        self._redis.connection_pool.disconnect()

    def _range(self, name: bytes, start: int, length: int) -> bytes:
        return cast("bytes", self._redis.getrange(name, start, start + length - 1))

    @contextmanager
    def _one_connection(self) -> Iterator[Any]:
        """One of the pool's; not used again if it failed, since replies may still come."""
        pool = self._redis.connection_pool
        connection = pool.get_connection()
        try:
            yield connection
        except redis.exceptions.ResponseError:
            raise
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        finally:
            pool.release(connection)

    def _write_aside(self, connection: Any, aside: bytes, header: Header, payload: memoryview) -> None:  # noqa: ANN401
        """The last window first: it makes the value at its full size; one that grows takes up to twice that."""
        until = self._clock() + self._timeout_s
        *starts, last = range(0, len(payload), WINDOW_BYTES)
        _sent(
            connection,
            ("SETRANGE", aside, HEADER_BYTES + last, payload[last:]),
            ("EXPIRE", aside, _TEMPORARY_SECONDS),
            ("SETRANGE", aside, 0, header.encode()),
        )
        for first in range(0, len(starts), _AT_ONCE):
            self._check(until)
            windows = ((start, payload[start : start + WINDOW_BYTES]) for start in starts[first : first + _AT_ONCE])
            _sent(connection, *(("SETRANGE", aside, HEADER_BYTES + start, window) for start, window in windows))

    def _check(self, until: float) -> None:
        if self._clock() > until:
            raise redis.TimeoutError("the operation took too long")

    def _cut_short(self, name: bytes, length: int) -> Outcome:
        """A miss if the chunk was evicted between two windows, and perhaps is whole again; else it is damaged."""
        return Outcome.MISS if self._redis.strlen(name) in (0, length) else self._drop(name)

    def _drop(self, name: bytes) -> Outcome:
        """Remove what is not the chunk that it should be; a miss if it is gone already."""
        return Outcome.CORRUPT if self._redis.unlink(name) else Outcome.MISS


def _name(namespace: str, key: bytes) -> bytes:
    return PREFIX + namespace.encode() + b":" + key


def _sent(connection: Any, *commands: tuple[Any, ...]) -> Any:  # noqa: ANN401 (the library's connection, and reply)
    """Send commands together: the last one's reply; the first one's error, when all have replied."""
    connection.send_packed_command(connection.pack_commands(commands))
    reply, refused = None, None
    for _ in commands:
        try:
            reply = connection.read_response()
        except redis.exceptions.ResponseError as error:
            refused = refused or error
    if refused is not None:
        raise refused
    return reply


def _outcome(error: redis.RedisError) -> Outcome:
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return Outcome.FULL
    return Outcome.TIMEOUT if isinstance(error, redis.TimeoutError) else Outcome.ERROR
