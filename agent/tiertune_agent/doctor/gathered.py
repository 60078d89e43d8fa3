"""Reads the facts: agent and stores by HTTP, engines by vLLM's metrics, the remote's servers."""

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import httpx
import redis

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.collector.counters import parse
from tiertune_agent.collector.schema import STATUS, TUNING, check
from tiertune_agent.credentials import PLAIN, Access, turned_away
from tiertune_agent.doctor.checks.of_engines import WANTED
from tiertune_agent.doctor.facts import AgentFacts, Clock, EngineFacts, ServerFacts, StoreFacts, counted_in
from tiertune_agent.engines import shown as engine_key
from tiertune_agent.fields import JsonDict, read
from tiertune_agent.network import asked_whole, at_once, json_of, read_whole, said
from tiertune_agent.remote.server import RedisServer
from tiertune_connector.access import Login
from tiertune_connector.addresses import Urls, listed, parse_addresses

TIMEOUT_S = 5.0
"""Of one operation; a whole answer may take twice as long."""
FAILED = (httpx.HTTPError, KeyError, TypeError, ValueError, AttributeError)
"""Errors if nobody answers, or if the answer is not one of a store, agent or engine."""


class _ClosedError(ValueError):
    """It wants a token that we do not have."""


class _AwayError(ValueError):
    """An agent's database is away; the message is the agent's."""


@dataclass(frozen=True)
class Reader:
    """Asks others over HTTP."""

    access: Access = PLAIN
    """Of the command line, to the agent; also to stores and engines where no other one is given."""
    now: Callable[[], float] = time.time
    """Unix seconds."""

    def agent(self, url: str) -> AgentFacts:
        try:
            with self._http(url, self.access) as http:
                asked = self.now()
                fleet = _document(http, "/api/v1/fleet")
                clock = _clock(datetime.fromisoformat(str(fleet["time"])).timestamp(), asked, self.now())
                incidents = _document(http, "/api/v1/incidents")["incidents"]
                policies = _document(http, "/api/v1/policies")
        except _AwayError as error:
            return AgentFacts(url, problem=str(error), away=True)
        except FAILED as error:
            return AgentFacts(url, problem=_why(error))
        opened = [one for one in incidents if not one.get("closed_at")]
        return AgentFacts(url, fleet=fleet, incidents=opened, policies=policies, clock=clock)

    def stores(self, urls: Mapping[str, str], access: Access) -> list[StoreFacts]:
        """``urls``: addresses, each with its name in the settings."""
        return at_once(lambda url: self._store(url, urls[url], access), urls)

    def engines(self, urls: Collection[str], access: Access | None = None) -> list[EngineFacts]:
        """``access``: its authorities, if it names some, else the command line's; an engine is shown no token."""
        trust = (access and access.trust) or self.access.trust
        return at_once(lambda url: self._engine(url, Access(trust=trust)), urls)

    def _store(self, url: str, called: str, access: Access) -> StoreFacts:
        try:
            with self._http(url, access) as http:
                status, tuning = _document(http, "/v1/status"), _document(http, "/v1/tuning")
                check(status, STATUS, "status")
                check(tuning, TUNING, "tuning")
                asked = self.now()
                reading = parse(_document(http, "/v1/counters"))
                clock = _clock(reading.time_s, asked, self.now())
        except FAILED as error:
            return StoreFacts(url, called, problem=_why(error), closed=isinstance(error, _ClosedError))
        return StoreFacts(url, called, status=status, tuning=tuning, counted=counted_in(reading.rows), clock=clock)

    def _engine(self, url: str, access: Access) -> EngineFacts:
        try:
            with self._http(url, access, headers=engine_key()) as http:
                told = Exposition(read_whole(http, "/metrics").text, WANTED)
        except FAILED as error:
            return EngineFacts(url, problem=_why(error))
        return EngineFacts(url, told=told)

    def _http(self, url: str, access: Access, **more: Any) -> httpx.Client:  # noqa: ANN401 (httpx's own)
        return replace(access, transport=self.access.transport).client(base_url=url, timeout=TIMEOUT_S, **more)


def servers(urls: Urls, login: Login, timeout_s: float) -> list[ServerFacts]:
    """Ask each Redis server of the remote for its bound and eviction policy."""
    addresses = parse_addresses(listed(urls))
    return at_once(lambda one: _server(RedisServer(one, login, timeout_s, os.environ)), addresses)


def _server(server: RedisServer) -> ServerFacts:
    try:
        held = server.held()
    except (redis.RedisError, OSError) as error:
        return ServerFacts(server.name, problem=said(error))
    finally:
        server.close()
    return ServerFacts(held.server, maxmemory=held.maxmemory, policy=held.policy, used_bytes=held.used_bytes)


def _document(http: httpx.Client, path: str) -> JsonDict:
    answer = asked_whole(http, "GET", path)
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise _ClosedError(f"it {turned_away(http)}")
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and (why := read(json_of(answer), "detail")):
        raise _AwayError(str(why))
    document = json_of(answer.raise_for_status())
    if not isinstance(document, dict):
        raise TypeError(f"{path}: an object was expected")
    return document


def _clock(told_s: float, asked_s: float, answered_s: float) -> Clock:
    """The other clock was read between question and answer."""
    return Clock(told_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)


def _why(error: Exception) -> str:
    if isinstance(error, KeyError | TypeError | AttributeError):
        return f"it answers what was not expected ({error!r})"
    return said(error)
