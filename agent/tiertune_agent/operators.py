"""What operators command: freeze, bypass, flush. Every command leaves an audit row."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import httpx

from tiertune_agent.change import Unknown
from tiertune_agent.collector.stores import TIMEOUT_S, StoreClient
from tiertune_agent.history.store import History

FLUSH_TIMEOUT_S = 20.0
"""A store waits for its slower tiers."""


@dataclass(frozen=True)
class Caller:
    """Who commands, and from where."""

    who: str
    source: str


class Operators:
    def __init__(
        self, history: History, client_of: Callable[[str], StoreClient | None], now: Callable[[], datetime]
    ) -> None:
        self._history = history
        self._client_of = client_of
        self._now = now

    def audit(self, caller: Caller, what: str, detail: Mapping[str, Any]) -> None:
        self._history.audit(caller.who, caller.source, what, detail, self._now())

    def freeze(self, caller: Caller, reason: str, seconds: float | None) -> dict[str, Any]:
        """Nothing changes any more, for ``seconds`` or until lifted."""
        now = self._now()
        until = now + timedelta(seconds=seconds) if seconds is not None else None
        self.audit(caller, "freeze", {"reason": reason, "until": until.isoformat() if until else None})
        self._history.freeze(reason, caller.who, now, until)
        return {"frozen": True, "until": until.isoformat() if until else None}

    def unfreeze(self, caller: Caller) -> dict[str, Any]:
        self.audit(caller, "unfreeze", {})
        return {"frozen": False, "lifted": self._history.unfreeze(self._now())}

    def frozen(self) -> str:
        """Why a command forbids changes now; empty: none does."""
        freeze = self._history.frozen(self._now())
        if freeze is None:
            return ""
        until = f" until {freeze.until:%Y-%m-%d %H:%M} UTC" if freeze.until else ""
        return f"by {freeze.who}{until}: {freeze.reason}"

    def bypass(self, caller: Caller, on: bool, store: str | None) -> dict[str, Any]:
        """Tell the stores; one that does not answer is told again every window until it does."""
        self.audit(caller, "bypass", {"on": on, "store": store})
        names = self._named(store)
        for name in names:
            self._history.wish_bypass(name, on)
        return {"on": on, "stores": self.deliver(names)}

    def deliver(self, names: list[str] | None = None) -> dict[str, str]:
        """Tell stores what they have not acknowledged; per store: ok, or why not."""
        told = {}
        for store in self._history.stores():
            if store.pending_bypass is not None and (names is None or store.name in names):
                told[store.name] = self._told(store.url, "/v1/bypass", {"on": store.pending_bypass})[0]
                if told[store.name] == "ok":
                    self._history.wish_bypass(store.name, None)
        return told

    def flush(self, caller: Caller, which: Mapping[str, Any]) -> dict[str, Any]:
        """Drop chunks in all stores; per store how many from which tier. ``complete`` only if none can be left."""
        self.audit(caller, "flush", which)
        stores = self._history.stores()
        with ThreadPoolExecutor(max_workers=16) as pool:
            told = pool.map(lambda store: self._told(store.url, "/v1/flush", which, FLUSH_TIMEOUT_S), stores)
            acknowledged = {store.name: _flushed(*answer) for store, answer in zip(stores, told, strict=True)}
        return {"complete": all(ack["ok"] for ack in acknowledged.values()), "stores": acknowledged}

    def _named(self, store: str | None) -> list[str]:
        stores = self._history.stores()
        names = [known.name for known in stores if store in (None, known.name, known.url)]
        if store is not None and not names:
            raise Unknown(f"no store is called {store}; known are {', '.join(s.name for s in stores) or 'none'}")
        return names

    def _told(
        self, url: str, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S
    ) -> tuple[str, dict[str, Any]]:
        """``ok`` or why not, and what the store answered."""
        client = self._client_of(url)
        if client is None:
            return "is not one of the agent's stores any more", {}
        try:
            answer = client.post(path, body, timeout_s)
            document = answer.json()
        except httpx.HTTPError as error:
            return f"did not answer: {error or type(error).__name__}", {}
        except ValueError:
            return "answers what no store answers", {}
        if not isinstance(document, dict):
            return "answers what no store answers", {}
        return ("ok" if answer.is_success else str(document.get("message", answer.status_code))), document


def _flushed(outcome: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    dropped = answer if outcome == "ok" else answer.get("dropped") or {}
    return {"ok": outcome == "ok", "dropped": dropped, "reason": outcome}
