"""The documents that the API and the page show, read from history."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

import msgspec
from fastapi import Path, Query
from fastapi.responses import StreamingResponse

from tiertune_agent.changes.control import Unknown
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.followed import Followed
from tiertune_agent.history.models import StoreRow
from tiertune_agent.history.store import History
from tiertune_agent.policy.document import SETTINGS, LoadedPolicy, by_calendar, mode_of
from tiertune_agent.policy.lint import errors, notes
from tiertune_agent.policy.present import NOTHING, frozen_all, of_remote, of_store
from tiertune_agent.records import FLEET, JUDGED, OBSERVED, Now, State
from tiertune_agent.tuners.base import models, pools
from tiertune_agent.verdicts.ledger import hour_of
from tiertune_agent.web.evidence import compared

JSON = "application/json"
Limit = Annotated[int, Query(ge=1, le=1000)]
Number = Annotated[int, Path(ge=1, lt=2**63)]
"""Of a decision, as large as the database can hold."""


@dataclass
class Views:
    """Public methods but ``decision`` are what the API has at their names, with these parameters."""

    history: History
    policy: Followed[LoadedPolicy]
    leads: Callable[[], bool]
    now: Now
    window_s: float
    stores: Callable[[], Mapping[str, str]]
    """This and the next: names of the present stores, and of what is only observed, by address."""
    sources: Mapping[str, str]

    def fleet(self) -> JsonDict:
        """Every store with its tiers, tuning; what tuners last answered; what is frozen.

        A source that is only observed is among the stores: ``observed`` is its kind, what it does not report is null.
        ``unheard``: stores and sources of the settings of which nothing is known yet; ``bypass_unheard``: the
        bypass, on or off, that was commanded to such stores, until they hear it. ``modes`` of a store or the remote:
        the strongest there of each tuner that may change something, by the policy with its overrides; ``frozen``: why
        its calendar lets none of them change anything there now.
        """
        stores, named = self.history.stores(), self.stores()
        known, remote = {store.url for store in stores}, self.history.store(FLEET)
        policy, now = self.policy.content.policy, self.now()
        allowed = {
            store.name: NOTHING if store.status.get(OBSERVED) else of_store(policy, store.name, store.status, now)
            for store in stores
        }
        of_fleet = of_remote(policy, now) if remote else NOTHING
        return {
            "time": now.isoformat(),
            "leader": self.leads(),
            "window_s": self.window_s,
            "frozen": self._frozen(frozen_all(policy, (*allowed.values(), of_fleet), now)),
            "stores": [{**self._store(store), **allowed[store.name].document()} for store in stores],
            "unheard": {
                kind: [name for url, name in at.items() if url not in known]
                for kind, at in (("stores", named), ("sources", self.sources))
            },
            "bypass_unheard": [
                {"name": named[url], "url": url, "on": on} for url, on in self.history.wishes(named).items()
            ],
            "remote": {**_remote(remote), **of_fleet.document()} if remote else None,
            "answers": self._answers(stores),
            "incidents": self.history.journal.open_incidents(),
        }

    def decisions(self, state: State | None = None, limit: Limit = 200) -> JsonDict:
        """Newest first."""
        found = self.history.decisions.find(states=[state] if state else [], limit=limit)
        return {"decisions": [decision.document() for decision in found]}

    def decision(self, number: Number) -> JsonDict:
        decision = self.history.decisions.get(number)
        if decision is None:
            raise Unknown(f"there is no decision {number}")
        verdicts = self.history.verdicts.of(number)
        weighed = compared(decision, [one for one in verdicts if one["verdict"] in JUDGED])  # not weekly reviews
        return {**decision.document(), "verdicts": verdicts, "compared": vars(weighed) if weighed else None}

    def ledger(self, hours: Annotated[float, Query(gt=0, le=8760)] = 24) -> StreamingResponse:
        """Rows by hour, store, namespace and tier, and their sums by tier, from the hour ``since`` on."""
        since = hour_of(self.now() - timedelta(hours=hours))
        head = {"hours": hours, "since": since.isoformat(), "tiers": self.history.ledger.account(since)}
        return StreamingResponse(_listed(head, "ledger", self.history.ledger.hours(since)), media_type=JSON)

    def policies(self) -> JsonDict:
        """The policy in force, what lint says of its file, why a newer one is not in force; earlier revisions.

        ``modes``: of each tuner, without overrides.
        """
        loaded = self.policy.content
        noted = notes(loaded)
        return {
            "source": loaded.source,
            "digest": loaded.digest,
            "problem": self.policy.problem or None,
            "notes": [note.message for note in noted],
            "lint": [vars(found) for found in (*errors(self.policy.problem, loaded.source), *noted)],
            "text": loaded.text,
            "policy": loaded.policy.model_dump(mode="json", by_alias=True),
            "modes": {tuner: mode_of(loaded.policy, tuner) for tuner in SETTINGS},
            "revisions": self.history.journal.policy_revisions(),
        }

    def incidents(self) -> JsonDict:
        return {"incidents": self.history.journal.incidents()}

    def audit(self, limit: Limit = 100) -> JsonDict:
        """Newest first."""
        return {"audit": self.history.journal.audited(limit)}

    def _answers(self, stores: Sequence[StoreRow]) -> list[JsonDict]:
        """Each tuner's last answer on each target.

        None on pools that are gone: each revision of the weights leaves one on every store.
        """
        held = {(name, pool) for store in stores for pool in pools(store.status) for name in (store.name, FLEET)}
        return [
            answer
            for answer in self.history.answers.newest()
            if not answer["pool"] or (answer["store"], answer["pool"]) in held
        ]

    def _frozen(self, until: datetime | None) -> JsonDict | None:
        """Why nothing may change now, by command; or nothing by itself, by the policy's calendar: no ``since``."""
        freeze = self.history.journal.frozen(self.now())
        if freeze:
            return {**freeze.told("reason", "who", "until"), "since": freeze.start.isoformat()}
        return {"reason": by_calendar(until), "who": "policy", "since": None, "until": None} if until else None

    def _store(self, store: StoreRow) -> JsonDict:
        age = (self.now() - store.last_seen).total_seconds()
        return {
            **store.told("name", "url", "boot_id", "version", "last_seen", "pending_bypass", "tuning"),
            "age_s": age,
            "reachable": abs(age) <= 3 * self.window_s,
            "observed": store.status.get(OBSERVED),
            "unknown": store.status.get("unknown") or [],
            "bypass": bool(store.tuning.get("bypass")),
            "tiers": store.status.get("tiers") or {},
            "pools": pools(store.status),
            "models": list(models(store.status)),
        }


def _listed(head: Json, name: str, parts: Iterable[Sequence[Json]]) -> Iterator[bytes]:
    """A JSON document piece by piece: ``head``, and last, by this name, what the parts have, in one list."""
    yield msgspec.json.encode(head)[:-1] + f',"{name}":['.encode()
    comma = b""
    for part in parts:
        yield comma + msgspec.json.encode(part)[1:-1]
        comma = b","
    yield b"]}"


def _remote(found: StoreRow) -> JsonDict:
    """The Redis of the fleet, which is managed: what it holds and is set to."""
    return {**found.told("url", "last_seen"), **found.status["tiers"]["remote"], "tuning": found.tuning["remote"]}
