"""The documents that the API and the page show, read from history."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from tiertune_agent.history.store import History
from tiertune_agent.policy import PolicyFile, frozen_by, without_effect
from tiertune_agent.records import FLEET, OBSERVED, StoreRecord, Window

SHOWN_PER_WINDOW = {
    "hit_tokens": ("tier_lookup_tokens_total", {"result": "hit"}),
    "saved_s": ("saved_seconds_total", {}),
    "lost_s": ("lost_seconds_total", {}),
    "fetched": ("gate_requests_total", {"decision": "fetch"}),
    "recomputed": ("gate_requests_total", {"decision": "recompute"}),
    "resident_bytes": ("tier_resident_bytes", {}),
}


class Views:
    def __init__(
        self,
        history: History,
        policy: PolicyFile,
        *,
        leads: Callable[[], bool],
        now: Callable[[], datetime],
        window_s: float,
    ) -> None:
        self._history = history
        self._policy = policy
        self._leads = leads
        self._now = now
        self._window_s = window_s

    def fleet(self) -> dict[str, Any]:
        """Every store with its tiers, counters since its boot, tuning; what tuners last answered; what is frozen.

        A source that is only observed stands among them: ``observed`` is its kind, null is what it does not tell.
        """
        return {
            "time": self._now().isoformat(),
            "leader": self._leads(),
            "window_s": self._window_s,
            "frozen": self.frozen(),
            "stores": [self._store(store) for store in self._history.stores()],
            "remote": self._remote(),
            "answers": self._history.decisions.answers(),
            "incidents": self._history.open_incidents(),
        }

    def frozen(self) -> dict[str, Any] | None:
        """Why nothing may change now, by command or by the policy's calendar."""
        freeze = self._history.frozen(self._now())
        if freeze:
            until = freeze.until.isoformat() if freeze.until else None
            return {"reason": freeze.reason, "who": freeze.who, "since": freeze.start.isoformat(), "until": until}
        calendar = frozen_by(self._policy.loaded.policy, self._now())
        return {"reason": calendar, "who": "policy", "since": None, "until": None} if calendar else None

    def decisions(self, state: str | None, limit: int) -> dict[str, Any]:
        """Newest first."""
        found = self._history.decisions.find(states=[state] if state else [], limit=limit)
        return {"decisions": [decision.document() for decision in found]}

    def decision(self, number: int) -> dict[str, Any] | None:
        decision = self._history.decisions.get(number)
        if decision is None:
            return None
        decisions = self._history.decisions
        return {**decision.document(), "verdicts": decisions.verdicts(number), "reviews": decisions.reviews(number)}

    def ledger(self, hours: float) -> dict[str, Any]:
        """Rows by hour, store, namespace and tier, and their sums by tier."""
        since = self._now() - timedelta(hours=hours)
        return {"hours": hours, "tiers": self._history.account(since), "ledger": self._history.ledger(since)}

    def windows(self, store: str, tier: str, namespace: str, limit: int) -> dict[str, Any]:
        """The last windows of a tier (``namespace`` empty: of all its pools together), oldest first."""
        windows = self._history.windows(store, tier=tier, namespace=namespace, limit=limit)
        return {"windows": [_shown(window) for window in windows]}

    def curves(self) -> dict[str, Any]:
        """Miss-ratio curves: this version samples none."""
        return {"curves": [], "reason": "the stores sample no accesses in this version"}

    def policies(self) -> dict[str, Any]:
        """The policy in force, what of it has no effect, why a newer file is not in force; earlier revisions."""
        loaded = self._policy.loaded
        return {
            "source": loaded.source,
            "digest": loaded.digest,
            "problem": self._policy.problem or None,
            "notes": without_effect(loaded.policy),
            "policy": loaded.policy.model_dump(mode="json", by_alias=True),
            "revisions": self._history.policy_revisions(),
        }

    def incidents(self) -> dict[str, Any]:
        return {"incidents": self._history.incidents()}

    def audit(self) -> dict[str, Any]:
        return {"audit": self._history.audited()}

    def _remote(self) -> dict[str, Any] | None:
        """The Redis of the fleet where it is managed: what it holds and is set to."""
        found = self._history.store(FLEET)
        if found is None:
            return None
        state = (found.status.get("tiers") or {}).get("remote") or {}
        return {"url": found.url, "last_seen": found.last_seen.isoformat(), **state, "tuning": found.tuning["remote"]}

    def _store(self, store: StoreRecord) -> dict[str, Any]:
        age = (self._now() - store.last_seen).total_seconds()
        return {
            "name": store.name,
            "url": store.url,
            "boot_id": store.boot_id,
            "version": store.version,
            "last_seen": store.last_seen.isoformat(),
            "age_s": age,
            "reachable": age <= 3 * self._window_s,
            "observed": store.status.get(OBSERVED),
            "unknown": store.status.get("unknown") or [],
            "bypass": bool(store.tuning.get("bypass")),
            "pending_bypass": store.pending_bypass,
            "tiers": {
                tier: {**state, **store.totals.get(tier, {})}
                for tier, state in (store.status.get("tiers") or {}).items()
            },
            "pools": store.status.get("pools") or {},
            "tuning": store.tuning,
        }


def _shown(window: Window) -> dict[str, Any]:
    figures = {title: window.known(name, **labels) for title, (name, labels) in SHOWN_PER_WINDOW.items()}
    return {"start": window.start.isoformat(), "seconds": window.seconds, **figures}
