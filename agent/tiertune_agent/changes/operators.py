"""Commands of operators: freeze, bypass, flush. Every command leaves an audit row."""

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Condition, Lock
from typing import NamedTuple

from tiertune_agent.changes.control import Refused, Unknown
from tiertune_agent.collector.stores import TIMEOUT_S, Collector
from tiertune_agent.engines import Engines
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.history.models import StoreRow
from tiertune_agent.history.store import History
from tiertune_agent.network import CallError, at_once, calling, json_of
from tiertune_agent.records import Now
from tiertune_connector.httpd.guarded import REMARK

FLUSH_TIMEOUT_S = 20.0
"""Long, because a store waits for its slower tiers."""


@dataclass(frozen=True)
class Caller:
    """Who commands, and from where."""

    who: str
    source: str


class Due(NamedTuple):
    """A bypass, on or off, that a store has not acknowledged."""

    name: str
    url: str
    on: bool


class Operators:
    def __init__(self, history: History, stores: Collector, now: Now, engines: Engines) -> None:
        """``stores`` knows all present stores; ``engines``: those of the settings."""
        self._history = history
        self._stores = stores
        self._now = now
        self._engines = engines
        self._wishing, self._delivering = Lock(), Condition()
        self._under_way = set[str]()
        """Addresses of stores to which a delivery is under way."""

    @contextmanager
    def audited(self, caller: Caller, what: str, detail: Json) -> Iterator[None]:
        """Book a command before it is carried out within; if it is refused there, its row says why."""
        number = self._history.journal.audit(caller.who, caller.source, what, detail, self._now())
        try:
            yield
        except (Refused, Unknown) as error:
            self._history.journal.refused(number, str(error))
            raise

    def freeze(self, caller: Caller, reason: str, seconds: float | None) -> JsonDict:
        """Forbid changes for ``seconds``, or until lifted; an earlier freeze that lasts longer stays."""
        now = self._now()
        until = now + timedelta(seconds=seconds) if seconds is not None else None
        with self.audited(caller, "freeze", {"reason": reason, "until": until.isoformat() if until else None}):
            self._history.journal.freeze(reason, caller.who, now, until)
        longest = self._history.journal.frozen(now)
        return {"frozen": True, "until": longest.until.isoformat() if longest and longest.until else None}

    def unfreeze(self, caller: Caller) -> JsonDict:
        with self.audited(caller, "unfreeze", {}):
            return {"frozen": False, "lifted": self._history.journal.unfreeze(self._now())}

    def bypass(self, caller: Caller, on: bool, store: str | None) -> JsonDict:
        """Switch bypass in the stores; one that does not answer is told again every window until it does.

        Without a ``store`` those are told, too, that left the fleet and come back; if on, also new ones, until any
        bypass is lifted. Of two such commands at once one stands for all.
        """
        with self.audited(caller, "bypass", {"on": on, "store": store}):
            named = self._named(store)
        with self._wishing:
            if store is None:
                self._history.wish_bypass_of_all(on=on)
                named = self._named(None)  # again: whoever was met since heard what held until then
            self._history.wish_bypass(named, on=on)
        return {"on": on, "stores": self.deliver(named)}

    def deliver(self, names: Container[str] | None = None) -> dict[str, str]:
        """Send stores the bypass that they have not acknowledged; per store: ok, or why not.

        One delivery to a store at a time, so that an earlier wish never arrives after a later one; a store that does
        not answer another delivery holds up no other store.
        """
        outcomes: dict[str, str] = {}
        while due := self._taken(names, outcomes):
            try:
                outcomes |= self._delivered(due)
            finally:
                with self._delivering:
                    self._under_way.difference_update(one.url for one in due)
                    self._delivering.notify_all()
        return outcomes

    def _taken(self, names: Container[str] | None, done: Container[str]) -> list[Due]:
        """What is undelivered and not ``done``, of stores to which no other delivery is under way; they are this one's.

        If there are only others, wait for one of them.
        """
        with self._delivering:
            while True:
                wished = self._undelivered()
                due = [one for one in wished if one.name not in done and (names is None or one.name in names)]
                if free := [one for one in due if one.url not in self._under_way]:
                    self._under_way.update(one.url for one in free)
                if free or not due:
                    return free
                self._delivering.wait()

    def _delivered(self, due: Sequence[Due]) -> dict[str, str]:
        self._history.fence()  # what was read may be outdated: another agent may have sent another since
        told = at_once(lambda one: self._told(one.url, "/v1/bypass", {"on": one.on}), due)
        outcomes = {one: outcome for one, (outcome, _) in zip(due, told, strict=True)}
        self._history.acknowledge_bypass(one for one, outcome in outcomes.items() if outcome == "ok")
        return {one.name: outcome for one, outcome in outcomes.items()}

    def _undelivered(self) -> list[Due]:
        """What stores have not acknowledged yet.

        If what was wished of the store and of whoever answers at its address differ, nobody knows which came later: on.
        """
        found = self._wished()
        if any(len(wishes) > 1 for *_, wishes in found):
            with self._wishing:
                differing = {name: url for name, url, wishes in self._wished() if len(wishes) > 1}
                self._history.wish_bypass(differing, on=True)
        return [Due(name, url, True in wishes) for name, url, wishes in found if wishes]

    def _wished(self) -> list[tuple[str, str, set[bool | None]]]:
        """Name and address of each store, and what was wished of it and of its address."""
        stores = self._history.stores()
        fleet = self._fleet(stores)
        pending = {(one.name, one.url): one.pending_bypass for one in stores}
        wished = self._history.wishes(fleet.values())
        return [(*one, {pending.get(one), wished.get(one[1])} - {None}) for one in fleet.items()]

    def flush(self, caller: Caller, which: Json, *, engines: bool = False) -> JsonDict:
        """Drop chunks in all stores; per store how many from which tier. ``complete`` only if none can be left.

        A store that does not know an epoch says so. It may be new, but at least one store must know the epoch.
        ``engines``: first empty the engines' own caches. Raises Unknown if the settings name none.
        """
        with self.audited(caller, "flush", {**which, "engines": True} if engines else which):
            if engines and not self._engines.urls:
                raise Unknown("the agent's settings name no engines: add engines: [http://host:port]")
        # Engines first: what waits in staging would be stored again in stores that are empty already. An engine that
        # computes in between may load a chunk and store it again after the stores' flush, unless they are bypassed.
        reset = self._engines.reset() if engines else {}
        fleet = self._fleet(self._history.stores())
        told = at_once(lambda url: self._told(url, "/v1/flush", which, FLUSH_TIMEOUT_S), fleet.values())
        acknowledged = {name: _flushed(*answer) for name, answer in zip(fleet, told, strict=True)}
        complete = all(ack["ok"] for ack in (*acknowledged.values(), *reset.values()))
        known = not acknowledged or any(ack["reason"] == "ok" for ack in acknowledged.values())
        complete = complete and known and not self._stores.roster.unknown
        return {"complete": complete, "stores": acknowledged} | ({"engines": reset} if engines else {})

    def _fleet(self, stores: Iterable[StoreRow]) -> dict[str, str]:
        """Name and address of every present store, even if it never answered.

        If two stores give the same name, the second goes by its address, so that none is left out.
        """
        known = {store.url: store.name for store in stores}
        fleet: dict[str, str] = {}
        for url, named in self._stores.addresses.items():
            name = known.get(url, named)
            fleet[url if name in fleet else name] = url
        return fleet

    def _named(self, store: str | None) -> dict[str, str]:
        fleet = self._fleet(self._history.stores())
        named = {name: url for name, url in fleet.items() if store in (None, name, url)}
        if store is not None and not named:
            raise Unknown(f"no store is called {store}; known are {', '.join(fleet) or 'none'}")
        return named

    def _told(self, url: str, path: str, body: Json, timeout_s: float = TIMEOUT_S) -> tuple[str, JsonDict]:
        """Send one command. Returns ``ok`` or why not, and the store's answer, with its remark as ``message``."""
        client = self._stores.client(url)
        if client is None:
            return "is not one of the agent's stores any more", {}
        try:
            with calling("store"):
                answer = client.post(path, body, timeout_s)
                document = json_of(answer)
                if not isinstance(document, dict):
                    raise ValueError("no answer to a command")  # noqa: TRY004 (of another's answer)
        except CallError as error:
            return str(error), {}
        if not answer.is_success:
            return str(document.get("message", answer.status_code)), document
        remark = answer.headers.get(REMARK)
        return "ok", document | ({"message": remark} if remark else {})


def _flushed(outcome: str, answer: Json) -> JsonDict:
    if outcome != "ok":
        return {"ok": False, "dropped": answer.get("dropped") or {}, "reason": outcome}
    dropped = {tier: count for tier, count in answer.items() if tier != "message"}
    return {"ok": True, "dropped": dropped, "reason": answer.get("message", outcome)}
