"""All that the page shows, read once from history and put into plain values for the templates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tiertune_agent.fields import read
from tiertune_agent.history.store import History
from tiertune_agent.records import CHANGED, Decision, State, Window
from tiertune_agent.tuners.remote_fetch import FIELD, typical_candidate
from tiertune_agent.web import figures
from tiertune_agent.web.chart import CostChart, cost_chart, sparkline
from tiertune_agent.web.evidence import Table, tables
from tiertune_agent.web.figures import Flow, Gate
from tiertune_agent.web.headline import Headline, headline
from tiertune_agent.web.text import figure, moment
from tiertune_agent.web.tiers import Fill, Health, fill, fill_of_all, health, healths, own_tiers, present
from tiertune_agent.web.views import Views

Json = Mapping[str, Any]
POINTS = 60
"""Windows that "lately" means."""
ACCOUNT_HOURS = 24.0
SHOWN_DECISIONS = 25
SHOWN_INCIDENTS = 5
JUDGED = (State.KEPT, State.ROLLED_BACK, State.INCONCLUSIVE)


@dataclass(frozen=True)
class TierRow:
    name: str
    health: tuple[Health, ...]
    fill: Fill | None
    flow: Flow
    trend: str
    saved_s: float
    lost_s: float
    money: float
    gate: Gate


@dataclass(frozen=True)
class Estimate:
    """What one fetch is measured to cost now."""

    t0_s: float
    bytes_per_s: float
    age_s: float


@dataclass(frozen=True)
class StoreCard:
    name: str
    url: str
    version: str
    tuning_version: int
    reachable: bool
    last_seen: datetime
    bypass: bool
    bypass_pending: bool
    fetch: str
    """Remote fetch: on, off, or empty without a remote tier."""
    answer: str
    """What remote_fetch last said."""
    estimate: Estimate | None
    chart: CostChart | None
    fills: Mapping[str, Fill]
    health: Mapping[str, Health]


@dataclass(frozen=True)
class DecisionCard:
    id: int
    tuner: str
    target: str
    field: str
    before: str
    after: str
    mode: str
    state: str
    reason: str
    at: datetime
    facts: tuple[tuple[str, str], ...]
    evidence: tuple[Table, ...]
    verdicts: tuple[Json, ...]


@dataclass(frozen=True)
class Overview:
    now: datetime
    as_of: datetime | None
    """When a store last answered."""
    headline: Headline
    lately_s: float
    served_tokens: float
    prompt_tokens: float
    trend: str
    saved_s: float
    lost_s: float
    money: float
    tiers: tuple[TierRow, ...]
    stores: tuple[StoreCard, ...]
    decisions: tuple[DecisionCard, ...]
    answers: tuple[Json, ...]
    incidents: tuple[Json, ...]
    policy: Json
    wait: Json
    """What the policy asks for before a first decision."""


class Overviews:
    def __init__(self, views: Views, history: History, *, now: Callable[[], datetime], window_s: float) -> None:
        self._views = views
        self._history = history
        self._now = now
        self._window_s = window_s

    def read(self) -> Overview:
        now = self._now()
        fleet, policy = self._views.fleet(), self._views.policies()
        since = now - timedelta(seconds=POINTS * self._window_s)
        windows = {store["name"]: self._history.store_windows(store["name"], since) for store in fleet["stores"]}
        every = [window for of_store in windows.values() for window in of_store]
        decisions = self._history.decisions.find(limit=SHOWN_DECISIONS)
        tiers = self._tiers(fleet["stores"], every, since)
        trend = [sum(row.flow.trend[i] for row in tiers) for i in range(POINTS)]
        return Overview(
            now=now,
            as_of=max((moment(store["last_seen"]) for store in fleet["stores"]), default=None),
            headline=headline(
                fleet,
                policy["policy"],
                waiting=sum(decision.state == State.PROPOSED for decision in decisions),
                switched_off=_switched_off(decisions),
            ),
            lately_s=POINTS * self._window_s,
            served_tokens=sum(row.flow.hit_tokens for row in tiers),
            prompt_tokens=figures.prompt_tokens(every),
            trend=sparkline(trend),
            saved_s=sum(row.saved_s for row in tiers),
            lost_s=sum(row.lost_s for row in tiers),
            money=sum(row.money for row in tiers),
            tiers=tiers,
            stores=tuple(
                self._store(store, windows[store["name"]], fleet["answers"], since, now) for store in fleet["stores"]
            ),
            decisions=tuple(self._decision(decision) for decision in decisions),
            answers=tuple(answer for answer in fleet["answers"] if not answer["change"]),
            incidents=tuple(i for i in self._views.incidents()["incidents"] if not i["closed_at"])[:SHOWN_INCIDENTS],
            policy=policy,
            wait=policy["policy"]["tuners"]["remote_fetch"],
        )

    def _tiers(self, stores: Sequence[Json], windows: Sequence[Window], since: datetime) -> tuple[TierRow, ...]:
        account = self._views.ledger(ACCOUNT_HOURS)["tiers"]
        rows = []
        for tier in present(stores, windows):
            flow = figures.flow(windows, tier, since, self._window_s, POINTS)
            booked = account.get(tier, {})
            rows.append(
                TierRow(
                    name=tier,
                    health=healths(stores, tier),
                    fill=fill_of_all(stores, tier),
                    flow=flow,
                    trend=sparkline(flow.trend),
                    saved_s=booked.get("saved", 0.0),
                    lost_s=booked.get("lost", 0.0),
                    money=booked.get("money", 0.0),
                    gate=figures.gate(windows, tier),
                )
            )
        return tuple(rows)

    def _store(
        self, store: Json, windows: Sequence[Window], answers: Sequence[Json], since: datetime, now: datetime
    ) -> StoreCard:
        name, tiers = store["name"], own_tiers(store)
        remote = [window for window in windows if window.tier == "remote" and not window.namespace]
        said = (a["reason"] for a in answers if a["store"] == name and a["tuner"] == "remote_fetch")
        return StoreCard(
            name=name,
            url=store["url"],
            version=store["version"],
            tuning_version=read(store, "tuning.version") or 0,
            reachable=store["reachable"],
            last_seen=moment(store["last_seen"]),
            bypass=store["bypass"],
            bypass_pending=store["pending_bypass"] not in (None, store["bypass"]),
            fetch=str(read(store, "tuning.tiers.remote.fetch") or "") if "remote" in tiers else "",
            answer=next(said, ""),
            estimate=_estimate(remote),
            chart=self._chart(store, remote, since, now) if "remote" in tiers else None,
            fills={tier: held for tier in tiers if (held := fill(store, tier))},
            health={tier: health(store, tier) for tier in tiers},
        )

    def _chart(self, store: Json, remote: Sequence[Window], since: datetime, now: datetime) -> CostChart | None:
        name = store["name"]
        typical = typical_candidate(self._history.candidate_windows(name, "remote"))
        changes = [
            (decision.applied_at, str(decision.after))
            for decision in reversed(self._history.decisions.find(states=CHANGED))
            if decision.applied_at and decision.target.store == name and decision.field == FIELD
        ]
        off = figures.off_spans(changes, str(read(store, "tuning.tiers.remote.fetch")), since, now)
        return cost_chart(figures.costs(remote, typical, now), off)

    def _decision(self, decision: Decision) -> DecisionCard:
        name = decision.field.rpartition(".")[2]
        judged = decision.state in JUDGED
        return DecisionCard(
            id=decision.id,
            tuner=decision.tuner,
            target=str(decision.target),
            field=decision.field,
            before=figure(name, decision.before),
            after=figure(name, decision.after),
            mode=decision.mode,
            state=str(decision.state),
            reason=decision.reason,
            at=decision.applied_at or decision.created_at,
            facts=_facts(decision),
            evidence=tables(decision.evidence),
            verdicts=tuple(self._history.decisions.verdicts(decision.id)) if judged else (),
        )


def _switched_off(decisions: Sequence[Decision]) -> set[str]:
    """Stores whose last change of remote fetch was to off; ``decisions`` newest first."""
    last: dict[str, str] = {}
    for decision in decisions:
        if decision.field == FIELD and decision.state in CHANGED:
            last.setdefault(decision.target.store, str(decision.after))
    return {store for store, to in last.items() if to == "off"}


def _facts(decision: Decision) -> tuple[tuple[str, str], ...]:
    pairs = (
        ("Setting", decision.field),
        ("Mode", decision.mode),
        ("Proposed", f"{decision.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("Approved by", decision.approved_by),
        ("Applied", f"{decision.applied_at:%Y-%m-%d %H:%M:%S} UTC" if decision.applied_at else ""),
        ("Tuning version", _versions(decision)),
        ("Policy revision", str(decision.policy_revision or "")),
    )
    return tuple((name, value) for name, value in pairs if value)


def _versions(decision: Decision) -> str:
    before, after = decision.expected_version, decision.applied_version
    return f"{before} → {after}" if after is not None else f"{before}" if before is not None else ""


def _estimate(remote: Sequence[Window]) -> Estimate | None:
    if not remote:
        return None
    t0, bandwidth, age = (
        remote[-1].gauge(f"fetch_estimate_{name}") for name in ("t0_seconds", "bytes_per_second", "age_seconds")
    )
    return Estimate(t0 or 0.0, bandwidth, age or 0.0) if bandwidth else None
