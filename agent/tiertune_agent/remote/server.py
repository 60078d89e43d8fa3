"""One Redis of the remote, as the agent reads and sets it; behind Sentinels the master and its replicas."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis
from redis.sentinel import SentinelConnectionPool

from tiertune_agent.network import said
from tiertune_connector.access import Login, connection_pool
from tiertune_connector.addresses import Address

log = logging.getLogger(__name__)
MAXMEMORY, POLICY = "maxmemory", "maxmemory-policy"
_PROBE = "tiertune-may-set"
"""A setting that no Redis has: the answer to setting it tells whether others may be set."""
REFUSALS = (redis.exceptions.NoPermissionError, redis.AuthenticationError)
_CONNECTIONS = 4


@dataclass(frozen=True)
class ServerMemory:
    """What ``INFO`` tells of a server; sizes in bytes, keys counted since it started."""

    server: str
    maxmemory: int
    """0: no bound."""
    policy: str
    used_bytes: int
    evicted_keys: int
    run_id: str
    """Different after every start."""
    version: str


class RedisServer:
    """Commands raise redis.RedisError; each has a time-out. No message carries a password."""

    def __init__(self, address: Address, login: Login, timeout_s: float, environment: Mapping[str, str]) -> None:
        self.name = str(address)
        self._pool_of = partial(
            connection_pool,
            login=login,
            timeout_s=timeout_s,
            connections=_CONNECTIONS,
            environment=environment,
            decode_responses=True,
        )
        self._address = address
        self._redis = redis.Redis(connection_pool=self._pool_of(address))

    def refusal(self) -> str:
        """Why the server does not allow tuning; empty: it does, or it is away now."""
        try:
            self._redis.config_get(MAXMEMORY, POLICY)
            self._redis.config_set(_PROBE, 1)
        except redis.RedisError as error:
            if isinstance(error, REFUSALS) or "unknown command" in str(error).lower():
                return f"{self.name} refuses CONFIG: {error}"
        return ""

    def held(self) -> ServerMemory:
        """What the server answers now; redis.InvalidResponse if no Redis would answer that."""
        try:
            told = self._redis.info()
            return ServerMemory(
                server=self.name,
                maxmemory=int(told["maxmemory"]),
                policy=str(told["maxmemory_policy"]),
                used_bytes=int(told["used_memory"]),
                evicted_keys=int(told["evicted_keys"]),
                run_id=str(told["run_id"]),
                version=str(told["redis_version"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise redis.InvalidResponse(f"answers what no Redis answers: {error!r}") from error

    def set(self, name: str, value: Any) -> None:  # noqa: ANN401 (a number or a word)
        """Set it here and on every replica that the Sentinels know: one of them is the master after a failover."""
        self._redis.config_set(name, value)
        for replica in self._replicas():
            pool = self._pool_of(replica)
            try:
                redis.Redis(connection_pool=pool).config_set(name, value)
            except redis.RedisError as error:
                log.warning("%s: replica %s keeps its %s: %s", self.name, replica, name, said(error))
            finally:
                pool.disconnect()

    def close(self) -> None:
        self._redis.connection_pool.disconnect()

    def _replicas(self) -> list[Address]:
        pool, found = self._redis.connection_pool, []
        if isinstance(pool, SentinelConnectionPool):
            with suppress(redis.RedisError):
                found = pool.sentinel_manager.discover_slaves(pool.service_name)
        return [Address(self._address.tls, self._address.user, ((host, port),)) for host, port in found]
