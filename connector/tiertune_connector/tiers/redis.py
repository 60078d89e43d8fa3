"""Redis or Valkey as the remote tier: one key per chunk, so that its eviction never leaves half a chunk.

A chunk is written in windows to a temporary key that expires, then renamed: visible only whole. It is read in windows
straight into the caller's buffer. Redis evicts by itself; its capacity is fleet tuning and not this class's.
"""

import uuid
from collections.abc import Sequence
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tiertune_connector.chunk import HEADER_BYTES, NOBODY, Header, Origin, checksum, decode_header
from tiertune_connector.tiers.base import Outcome, Usage

PREFIX = b"tiertune:"
WINDOW_BYTES = 1 << 20
_TEMPORARY_SECONDS = 60


class RedisTier:
    """Every command has a time-out; a connection that failed is dropped and made anew by the next operation."""

    name = "remote"

    def __init__(self, url: str, *, writer: str, timeout_s: float, connections: int = 8) -> None:
        self._writer = writer
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = redis.Redis(connection_pool=pool)

    def present(self, namespace: str, keys: Sequence[bytes]) -> tuple[Outcome, int]:
        """One round trip where all or none are here; else a binary search, one round trip a step."""
        names = [_name(namespace, key) for key in keys]
        low, high, asked = 0, len(names), len(names)
        try:
            while low < high:
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
        try:
            header = decode_header(self._range(name, 0, HEADER_BYTES))
            if header is None or (header.namespace, header.key, header.length) != (namespace, key, len(out)):
                return (self._drop(name) if self._redis.exists(name) else Outcome.MISS), NOBODY
            for start in range(0, len(out), WINDOW_BYTES):
                window = out[start : start + WINDOW_BYTES]
                data = self._range(name, HEADER_BYTES + start, len(window))
                if len(data) != len(window):  # evicted between two windows
                    return Outcome.MISS, NOBODY
                window[:] = data
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
            if self._redis.exists(name):
                return Outcome.OK
            # The last window first: it makes the value at its full size; a value that grows takes up to twice that.
            *starts, last = range(0, len(payload), WINDOW_BYTES)
            with self._redis.pipeline(transaction=False) as commands:
                commands.setrange(aside, HEADER_BYTES + last, payload[last:])
                commands.expire(aside, _TEMPORARY_SECONDS)
                commands.setrange(aside, 0, header.encode())
                commands.execute()
            for start in starts:
                self._redis.setrange(aside, HEADER_BYTES + start, payload[start : start + WINDOW_BYTES])
            with self._redis.pipeline(transaction=True) as commands:
                commands.rename(aside, name)
                commands.persist(name)
                commands.execute()
        except redis.RedisError as error:
            return _outcome(error)
        return Outcome.OK

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> int:
        pattern = PREFIX + (namespace.encode() if namespace else b"[0-9a-f]*") + b":*"
        count = 0
        try:
            for name in self._redis.scan_iter(pattern, count=1000):
                if tenant is not None:
                    header = decode_header(self._range(name, 0, HEADER_BYTES))
                    if header is None or header.origin.tenant != tenant:
                        continue
                count += int(self._redis.unlink(name))
        except redis.RedisError:
            return count
        return count

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

    def _drop(self, name: bytes) -> Outcome:
        self._redis.unlink(name)
        return Outcome.CORRUPT


def _name(namespace: str, key: bytes) -> bytes:
    return PREFIX + namespace.encode() + b":" + key


def _outcome(error: redis.RedisError) -> Outcome:
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return Outcome.FULL
    return Outcome.TIMEOUT if isinstance(error, redis.TimeoutError) else Outcome.ERROR
