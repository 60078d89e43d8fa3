"""Reads the stores. One that does not answer, or answers nonsense, becomes a value, never an exception."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any
from urllib.parse import urlsplit

import httpx

from tiertune_agent.collector.counters import Leapt, Reading, parse, windows
from tiertune_agent.collector.direct_commands import AGENT
from tiertune_agent.collector.roster import Roster
from tiertune_agent.collector.schema import STATUS, TUNING, check
from tiertune_agent.credentials import PLAIN, Access
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.network import asked_whole, at_once, json_of, read_whole, said
from tiertune_agent.records import FLEET, Now, Snapshot
from tiertune_connector.units import Clock

TIMEOUT_S = 3.0
KEPT_S = 60.0
"""How long an idle connection is kept: from one window to the next, and shorter than stores keep it."""
AHEAD_S = 60.0
"""More than answers take: a store's clock that gains this much on the agent's between two answers was set."""


@dataclass(frozen=True)
class Trouble:
    """Why there is no snapshot of a store."""

    store: str
    kind: str
    message: str
    gone: bool = False
    """Its name no longer has its address: it is missed, but nothing waits for it."""


Heard = Snapshot | Trouble
"""What a store told, or why it told nothing."""


class StoreHttp:
    """A store's HTTP interface. Methods raise httpx.HTTPError if the store does not answer."""

    def __init__(self, url: str, access: Access = PLAIN) -> None:
        kept, headers = httpx.Limits(keepalive_expiry=KEPT_S), {"User-Agent": AGENT}
        self._http = access.client(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=kept)
        self._known: tuple[Any, JsonDict] = None, {}
        """The tuning last read for a status: the store's boot and its version, then the document."""

    def get(self, path: str) -> Any:  # noqa: ANN401 (JSON)
        """The JSON at a path; ValueError if the answer is not JSON."""
        return json_of(read_whole(self._http, path))

    def samples(self, since: int) -> str:
        """JSON lines: a header, then samples from number ``since`` on."""
        return read_whole(self._http, f"/v1/samples?since={since}").text

    def put_sampling(self, document: JsonDict) -> httpx.Response:
        """Send the sampling; returns whatever the store answers."""
        return asked_whole(self._http, "PUT", "/v1/sampling", json=document)

    def tuning(self) -> JsonDict:
        """The document, with its version; KeyError, TypeError or ValueError if the answer is malformed."""
        told: JsonDict = self.get("/v1/tuning")
        check(told, TUNING, "tuning")
        return {**told, "version": int(told["version"])}

    def tuning_of(self, status: Json) -> JsonDict:
        """The tuning that a status names by its version, read unless it was before; errors as of `tuning`."""
        named = status.get("boot_id"), status.get("tuning_version")
        if None in named or named != self._known[0]:
            tuning = self.tuning()
            self._known = (named[0], tuning["version"]), tuning
        return self._known[1]

    def put_tuning(self, document: Json, *, expected: int, key: str) -> httpx.Response:
        """Send the tuning; returns whatever the store answers."""
        headers = {"If-Match": f'"{expected}"', "Idempotency-Key": key}
        return asked_whole(self._http, "PUT", "/v1/tuning", json=dict(document), headers=headers)

    def post(self, path: str, body: Json, timeout_s: float = TIMEOUT_S) -> httpx.Response:
        """Send a command; returns whatever the store answers."""
        return asked_whole(self._http, "POST", path, json=dict(body), timeout=timeout_s)

    def close(self) -> None:
        self._http.close()


ClientOf = Callable[[str], StoreHttp | None]
"""Gives the client of a store by its address; None: it is not one of the fleet's."""


@dataclass
class _Met:
    """What is kept of a store."""

    http: StoreHttp
    name: str = ""
    """What it called itself last."""
    last: tuple[Reading, float] | None = None
    """Its last reading, and when it was asked for, in steady seconds."""


@dataclass
class Collector:
    """Reads all stores at once; keeps the last reading of each, to take the difference to the next."""

    roster: Roster
    now: Now
    steady_s: Clock
    """Counts seconds by a clock that nobody sets."""
    access: Access

    def __post_init__(self) -> None:
        self._met: dict[str, _Met] = {}
        """By address; always replaced as a whole, as others may read it at any time."""
        self.addresses: dict[str, str] = {}
        """What each store is called until it reports its name."""
        self._meet()

    def look(self) -> None:
        """Look up the stores."""
        if self.roster.look():
            self._meet()

    def collect(self) -> list[Heard]:
        """One answer per store, in the order of the roster."""
        met, told = self._met, []
        seen: dict[str, str] = {}
        for url, answer in zip(met, at_once(self._ask, met), strict=True):
            first = seen.setdefault(answer.store, url)
            if first == url:
                gone = url in self.roster.former
                told.append(replace(answer, gone=gone) if isinstance(answer, Trouble) else answer)
            elif url in self.roster.former:
                self.roster.leave(url)
            elif isinstance(answer, Trouble) and answer.kind != "stale_counters":  # such a store does answer
                told.append(replace(answer, store=url))
            else:
                message = f"{url} calls itself {answer.store}, as {first} did, which comes first"
                mend = f"it is not tuned until {first} is taken out, or it has another name"
                told.append(Trouble(url, "duplicate_store", f"{message}: {mend}"))
        return told

    def ahead_s(self) -> float:
        """Seconds that the agent's clock is ahead of every store's; 0 if no store reported its time."""
        ahead_s = self.now().timestamp() - self.steady_s()
        told = [met.last for met in self._met.values()]
        return min((ahead_s - (last[0].time_s - last[1]) for last in told if last), default=0.0)

    def forget(self) -> None:
        """Drop all readings, so that the next one of each store counts as its first."""
        for met in self._met.values():
            met.last = None

    def client(self, url: str) -> StoreHttp | None:
        """The client of a store; None: not one of the fleet's."""
        met = self._met.get(url)
        return met.http if met else None

    def close(self) -> None:
        for met in self._met.values():
            met.http.close()

    def _meet(self) -> None:
        """Keep what is known of the roster's stores.

        The client of a store that left is not closed: a command may be under way, and keeps it until it has ended.
        """
        stores = self.roster.stores
        self._met = {url: self._met.get(url) or _Met(StoreHttp(url, self.access)) for url in stores}
        self.addresses = {url: store.name or urlsplit(url).netloc for url, store in stores.items()}

    def _ask(self, url: str) -> Heard:
        met = self._met[url]
        client, called = met.http, self.roster.stores[url].name or met.name or self.addresses[url]
        try:
            reading, status = parse(client.get("/v1/counters")), client.get("/v1/status")
            check(status, STATUS, "status")
            tuning = client.tuning_of(status)
            if misnamed := self._misnamed(url, reading.store):
                return Trouble(called, "store_misnamed", f"{url} is called {misnamed}")
            return self._snapshot(url, reading, status, tuning)
        except httpx.HTTPError as error:
            return Trouble(called, "store_unreachable", f"{url}: {said(error)}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, Leapt):
                met.last = None  # the next answer says from where to count on
            return Trouble(called, "store_nonsense", f"{url} answers what no store answers: {error!r}")

    def _misnamed(self, url: str, name: str) -> str:
        """What is wrong with the name that a store gives itself; empty: nothing, and it is called so from now on."""
        if name == FLEET:
            return f"{FLEET}, which stands for the whole fleet: give it another name"
        listed = self.roster.stores[url].name
        if listed and name != listed:
            return f"{listed} where it is listed, and {name} by itself"
        self._met[url].name = name
        return ""

    def _snapshot(self, url: str, reading: Reading, status: Json, tuning: Json) -> Heard:
        at, asked_s, met = self.now(), self.steady_s(), self._met[url]
        before, last_s = met.last or (None, asked_s)
        if before and before.store != reading.store:
            before = None  # what another store counted since its boot was read where it was before
        if before and (odd := _odd(reading.time_s - before.time_s, asked_s - last_s)):
            # what was counted goes into the next window
            met.last = replace(before, time_s=reading.time_s), asked_s
            return Trouble(reading.store, "stale_counters", f"{url}: its clock {odd}")
        if before and before.boot_id != reading.boot_id:  # it was away: nothing was held or counted then
            up_s = status.get("uptime_s") or inf
            before = replace(before, time_s=max(before.time_s, reading.time_s - up_s))
        counted, stages = windows(before, reading, at) if before else ((), ())
        met.last = reading, asked_s
        return Snapshot(
            store=reading.store,
            url=url,
            boot_id=reading.boot_id,
            version=str(status.get("version", "")),
            at=at,
            status={name: told for name, told in status.items() if name != "writes"},
            tuning=tuning,
            windows=counted,
            stages=stages,
            writes=status.get("writes"),
        )


def _odd(passed_s: float, asked_s: float) -> str:
    """What is wrong with a clock on which ``passed_s`` passed, and ``asked_s`` on the agent's; empty: nothing."""
    if passed_s <= 0:
        return "stands still or went back"
    return "was set ahead" if passed_s > asked_s + AHEAD_S else ""
