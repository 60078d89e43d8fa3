"""The Redis that the fleet shares: what it is set to, and the change of it.

It answers as a store's tuning does, with ``{"version", "remote": {"capacity_bytes", "policy"}}``, so that one actuator
changes both. Every command has a time-out. Nothing told carries a password.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

import httpx
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tiertune_agent.collector.stores import Trouble
from tiertune_agent.records import FLEET, Snapshot
from tiertune_agent.settings import RemoteAccess
from tiertune_agent.shapes import EMPTY
from tiertune_connector.documents import DocumentError

KIND = "remote_unmanaged"
"""Of incident: the remote ought to be managed, and cannot be."""
UNNAMED = (
    "the policy says remote.manage, but the agent's settings name no remote: add remote: {url: redis://host:port/0}"
)
PASSWORD = "TIERTUNE_REMOTE_PASSWORD"  # noqa: S105 (the name of a variable)
_PROBE = "tiertune-may-set"
"""A setting that no Redis has: whether it may be set tells whether others may."""


def remote_of(access: RemoteAccess | None, *, managed: bool) -> "Remote | None":
    """The remote that the settings name. DocumentError where it is to be managed, and cannot be."""
    if access is None:
        if managed:
            raise DocumentError([UNNAMED])
        return None
    remote = Remote(access)
    refusal = remote.refusal() if managed else ""
    if refusal:
        remote.close()
        raise DocumentError([f"the policy says remote.manage, but {refusal}"])
    return remote


class Remote:
    """A change by hand between reading and setting is not seen: Redis knows no versions."""

    def __init__(self, access: RemoteAccess, environment: Mapping[str, str] = os.environ) -> None:
        """DocumentError if the password cannot be read."""
        parts = urlsplit(access.url)
        self.url = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        pool = redis.ConnectionPool.from_url(
            access.url,
            password=_password(access, environment),
            socket_timeout=access.timeout,
            socket_connect_timeout=access.timeout,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
        self._redis = redis.Redis(connection_pool=pool)

    def refusal(self) -> str:
        """Why the Redis lets nobody tune it; empty: it does, or it is away now."""
        try:
            self._redis.config_get("maxmemory", "maxmemory-policy")
            self._redis.config_set(_PROBE, 1)
        except (redis.exceptions.NoPermissionError, redis.AuthenticationError) as error:
            return f"{self.url} refuses CONFIG: {error}"
        except redis.ResponseError as error:
            return f"{self.url} refuses CONFIG: {error}" if "unknown command" in str(error).lower() else ""
        except redis.RedisError:
            return ""
        return ""

    def read(self, at: datetime) -> Snapshot | Trouble:
        """What it is set to and holds now, as a store would tell it."""
        try:
            memory, stats, server = (self._redis.info(section) for section in ("memory", "stats", "server"))
        except redis.RedisError as error:
            return Trouble(FLEET, KIND, f"{self.url}: {error or type(error).__name__}")
        tuning = _document(memory)
        state = {
            "health": "ok",
            "reason": "",
            "capacity_bytes": tuning["remote"]["capacity_bytes"],
            "resident_bytes": int(memory["used_memory"]),
            "evicted_keys": int(stats["evicted_keys"]),
        }
        return Snapshot(
            store=FLEET,
            url=self.url,
            boot_id=str(server["run_id"]),
            version=str(server["redis_version"]),
            at=at,
            status={"tiers": {"remote": state}},
            tuning=tuning,
            totals={},
        )

    def tuning(self) -> tuple[int, dict[str, Any]]:
        """As a store's client. Raises httpx.TransportError where the Redis does not answer."""
        with _as_http():
            document = _document(self._redis.info("memory"))
        return int(document["version"]), document

    def put_tuning(self, document: Mapping[str, Any], *, expected: int, key: str) -> httpx.Response:  # noqa: ARG002
        """As a store's client: 412 if it was changed since, 422 where the Redis refuses."""
        version, stands = self.tuning()
        if version != expected:
            return _answer(httpx.codes.PRECONDITION_FAILED, "it was changed meanwhile")
        old, new = stands["remote"], document["remote"]
        settings = {"maxmemory": _maxmemory(new["capacity_bytes"]), "maxmemory-policy": new["policy"]}
        before = {"maxmemory": _maxmemory(old["capacity_bytes"]), "maxmemory-policy": old["policy"]}
        try:
            with _as_http():
                for name, value in settings.items():
                    if value != before[name]:
                        self._redis.config_set(name, value)
        except redis.ResponseError as error:
            return _answer(httpx.codes.UNPROCESSABLE_ENTITY, str(error))
        return _answer(httpx.codes.OK, "")

    def close(self) -> None:
        self._redis.connection_pool.disconnect()


def _answer(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"message": message}, request=httpx.Request("PUT", "http://remote/v1/tuning"))


def _document(memory: Mapping[str, Any]) -> dict[str, Any]:
    """The version is a digest of the rest: Redis counts none."""
    limit = int(memory["maxmemory"])
    capacity = None if limit == 0 else 0 if limit == EMPTY else limit
    stands = {"capacity_bytes": capacity, "policy": str(memory["maxmemory_policy"])}
    return {"version": crc32(json.dumps(stands).encode()), "remote": stands}


def _maxmemory(capacity: int | None) -> int:
    return 0 if capacity is None else max(EMPTY, int(capacity))


@contextmanager
def _as_http() -> Iterator[None]:
    """A Redis that is away is a store that is away; what it refuses stays redis.ResponseError."""
    try:
        yield
    except redis.TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except redis.ConnectionError as error:
        raise httpx.ConnectError(str(error)) from error


def _password(access: RemoteAccess, environment: Mapping[str, str]) -> str | None:
    if access.password_file is None:
        return environment.get(PASSWORD) or None
    try:
        return access.password_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise DocumentError([f"remote.password_file: {access.password_file} cannot be read: {reason}"]) from None
