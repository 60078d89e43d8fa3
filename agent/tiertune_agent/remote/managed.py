"""The Redis that the fleet shares: reads and changes its settings.

It answers as a store's tuning does, with ``{"version", "remote": {"capacity_bytes", "policy"}}``, so that one actuator
changes both. Several servers are one document, with the sum of their capacities; a new sum is set in equal shares.
Every command has a time-out. No message carries a password.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from zlib import crc32

import httpx
import redis

from tiertune_agent.collector.stores import Heard, Trouble
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.network import said
from tiertune_agent.records import FLEET, Snapshot, Window, sum_of_all
from tiertune_agent.remote.server import MAXMEMORY, POLICY, RedisServer, ServerMemory
from tiertune_agent.settings import RemoteAccess
from tiertune_agent.whatif.shapes import EMPTY
from tiertune_connector.addresses import listed, parse_addresses
from tiertune_connector.documents import DocumentError
from tiertune_connector.units import Clock

log = logging.getLogger(__name__)
KIND = "remote_unmanaged"
"""Kind of incident: the remote ought to be managed, but cannot be."""
UNNAMED = (
    "the policy says remote.manage, but the agent's settings name no remote: add remote: {url: redis://host:port/0}"
)
Change = tuple[RedisServer, str, int | str, int | str]
"""Change of a setting: server, name, old and new value."""


def remote_of(access: RemoteAccess | None, steady_s: Clock, *, manages: str) -> "Remote | None":
    """The remote that the settings name, if any. DocumentError if it is to be managed, but cannot be.

    ``manages`` is the place in the policy that has it managed; empty: none does. ``steady_s`` as in ``Remote``.
    """
    if access is None:
        if manages:
            raise DocumentError([f"{manages}: {UNNAMED}"])
        return None
    remote = Remote(access, steady_s)
    refusal = remote.refusal() if manages else ""
    if refusal:
        remote.close()
        raise DocumentError([f"{manages}: the policy says remote.manage, but {refusal}"])
    return remote


class Remote:
    """A change by hand between reading and setting goes unnoticed: Redis has no versions."""

    def __init__(
        self,
        access: RemoteAccess,
        steady_s: Clock,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """DocumentError if a password or certificate cannot be read.

        ``steady_s`` returns seconds of a clock that nobody sets.
        """
        access.check()
        addresses = parse_addresses(listed(access.url))
        self.url = ", ".join(map(str, addresses))
        self._servers = [RedisServer(address, access, access.timeout, environment) for address in addresses]
        self._steady_s = steady_s
        self._asked_s: float | None = None
        """When it was last asked, whether it answered or not."""
        self._silent = False
        """Whether a server did not answer when it was last read."""
        self._permits = False
        """Whether no server refused when last asked, nor a change since."""

    def forget(self) -> None:
        """Treat the next reading as the first one."""
        self._asked_s = None

    def refusal(self) -> str:
        """Why a server does not allow tuning; empty: all do, or are away now."""
        refusal = next(filter(None, (server.refusal() for server in self._servers)), "")
        self._permits = not refusal
        return refusal

    def unmanaged(self) -> str:
        """``refusal`` of a remote that has just answered; once there is none, not asked until a change is refused."""
        return "" if self._permits else self.refusal()

    def read(self, at: datetime) -> Heard:
        """What it is set to and holds now, as a store would tell it; Trouble if one server does not answer.

        From the second reading on, it includes the window since the last one, for the ledger. When it falls silent, and
        when it answers again, is logged: where it is not managed, that is no incident.
        """
        asked_s, self._asked_s = self._asked_s, self._steady_s()
        seconds = 0.0 if asked_s is None else self._asked_s - asked_s
        try:
            held = self._held()
        except httpx.TransportError as error:
            if not self._silent:
                log.warning("the remote does not answer, so its gauges and its rent are left out: %s", error)
            self._silent = True
            return Trouble(FLEET, KIND, str(error))
        if self._silent:
            log.info("the remote answers")
        self._silent = False
        tuning = _document(held)
        state = _state(held, tuning["remote"]["capacity_bytes"])
        return Snapshot(
            store=FLEET,
            url=self.url,
            boot_id=f"{crc32(''.join(one.run_id for one in held).encode()):08x}",
            version=", ".join(sorted({one.version for one in held})),
            at=at,
            status={"tiers": {"remote": state}},
            tuning=tuning,
            windows=(_window(seconds, at, state["resident_bytes"]),) if seconds > 0 else (),
        )

    def tuning(self) -> JsonDict:
        """As in a store's client. Raises httpx.TransportError if a server does not answer."""
        return _document(self._held())

    def put_tuning(self, document: Json, *, expected: int, key: str) -> httpx.Response:  # noqa: ARG002
        """As in a store's client: 412 if it was changed since, 422 if a server refuses; then the others are set back.

        If one does not answer, httpx.TransportError: it may have been set.
        """
        held = self._held()
        stands = _document(held)
        if stands["version"] != expected:
            return _answer(httpx.codes.PRECONDITION_FAILED, "it was changed meanwhile")
        made: list[Change] = []
        for change in _changes(self._servers, held, stands["remote"], document["remote"]):
            server, name, before, value = change
            if value == before:
                continue
            try:
                server.set(name, value)
            except redis.ResponseError as error:
                self._permits = False
                return _answer(httpx.codes.UNPROCESSABLE_ENTITY, f"{server.name}: {error}{_set_back(made)}")
            except redis.RedisError as error:  # it may have been set all the same; of one server that is seen later
                doubted = [change] if len(self._servers) > 1 else []
                raise _away(error, f"{server.name}: {said(error)}{_set_back(made, doubted)}") from error
            made.append(change)
        return _answer(httpx.codes.OK, "")

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def _held(self) -> list[ServerMemory]:
        """A server that is away, or refuses to answer, raises the same as a store that is away."""
        found = []
        for server in self._servers:
            try:
                found.append(server.held())
            except redis.RedisError as error:
                raise _away(error, f"{server.name}: {said(error)}") from error
        return found


def shares(capacity: int | None, servers: int) -> list[int]:
    """``maxmemory`` of each server: together the capacity, at least ``EMPTY`` each; None: no bound."""
    if capacity is None:
        return [0] * servers
    each, rest = divmod(int(capacity), servers)
    return [max(EMPTY, each + (1 if number < rest else 0)) for number in range(servers)]


def _changes(servers: Sequence[RedisServer], held: Sequence[ServerMemory], old: Json, new: Json) -> Iterator[Change]:
    """Settings that must be as told. Servers of unequal sizes stay so until the sum changes."""
    for server, one, share in zip(servers, held, shares(new["capacity_bytes"], len(servers)), strict=True):
        if new["capacity_bytes"] != old["capacity_bytes"]:
            yield server, MAXMEMORY, one.maxmemory, share
        if new["policy"] != old["policy"]:
            yield server, POLICY, one.policy, new["policy"]


def _set_back(made: Sequence[Change], doubted: Sequence[Change] = ()) -> str:
    """Undo the changes, and those of which nobody knows whether they were made; say how that went."""
    told = []
    for change in reversed((*made, *doubted)):
        server, name, before, after = change
        try:
            server.set(name, before)
        except redis.RedisError as error:
            stands = "may be" if change in doubted else "is"
            told.append(f"{server.name} could not be set back ({said(error)}): its {name} {stands} {after}")
    if told:
        return "; " + "; ".join(told)
    return "; the servers set before it were set back" if made else ""


def _away(error: redis.RedisError, told: str) -> httpx.TransportError:
    return httpx.ReadTimeout(told) if isinstance(error, redis.TimeoutError) else httpx.ConnectError(told)


def _answer(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"message": message}, request=httpx.Request("PUT", "http://remote/v1/tuning"))


def _document(held: Sequence[ServerMemory]) -> JsonDict:
    """The version is a digest of what every server is set to: Redis has no versions."""
    # Policies that evict no chunk come first: they are the ones to mend.
    policies = sorted({one.policy for one in held}, key=lambda policy: (policy.startswith("allkeys-"), policy))
    stands = {
        "capacity_bytes": sum_of_all(_capacity(one.maxmemory) for one in held),
        "policy": ", ".join(policies),
    }
    each = [[one.maxmemory, one.policy] for one in held]
    return {"version": crc32(json.dumps(each).encode()), "remote": stands}


def _state(held: Sequence[ServerMemory], capacity_bytes: int | None) -> JsonDict:
    """A tier's state as a store tells it, and that of each server."""
    servers = [
        {
            "server": one.server,
            "run_id": one.run_id,
            "capacity_bytes": _capacity(one.maxmemory),
            "policy": one.policy,
            "resident_bytes": one.used_bytes,
            "evicted_keys": one.evicted_keys,
        }
        for one in held
    ]
    return {
        "health": "ok",
        "reason": "",
        "capacity_bytes": capacity_bytes,
        "resident_bytes": sum(one.used_bytes for one in held),
        "evicted_keys": sum(one.evicted_keys for one in held),
        "servers": servers,
    }


def _window(seconds: float, at: datetime, resident: int) -> Window:
    held = {"tier_resident_bytes": float(resident)}
    return Window(FLEET, "", "", "remote", at - timedelta(seconds=seconds), seconds, held)


def _capacity(maxmemory: int) -> int | None:
    return None if maxmemory == 0 else 0 if maxmemory == EMPTY else maxmemory
