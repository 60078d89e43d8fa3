"""All that the page shows, put into plain values for the templates. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from operator import itemgetter

from tiertune_agent.fields import Json, read
from tiertune_agent.policy.document import settable
from tiertune_agent.records import CHANGED, STANDING, Decision, grouped, sum_known, sum_of_all
from tiertune_agent.tuners.base import present
from tiertune_agent.web import figures
from tiertune_agent.web.charts import Chart
from tiertune_agent.web.figures import Cost, WindowSums
from tiertune_agent.web.headline import Headline, Modes, headline, tuned
from tiertune_agent.web.look import Seen, approvable
from tiertune_agent.web.over_time import cost_chart

DRAWN = 8
"""Stores whose costs are drawn: a drawing takes some 5 ms of CPU, and each is new with every window."""
FRESH = 3
"""Age in windows; anything older is not called now."""
FETCH = "tuning.tiers.remote.fetch"
LEVELS = {"ok": "ok", "slow": "warn", "recovering": "warn", "dead": "bad"}
"""Of a tier's health; of any other state ``info``."""
ACCOUNT = ("saved", "lost", "money")


@dataclass(frozen=True)
class Health:
    """A state that one or more stores share; ``stores`` is empty where all do."""

    state: str
    reason: str
    level: str
    stores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fill:
    """Bytes held of those allowed (None: no bound, or not told)."""

    resident: float
    capacity: float | None


def health(store: Json, tier: str) -> Health:
    if not store["reachable"]:
        return Health("unknown", "the store does not answer", "warn")
    state = str(read(store, f"tiers.{tier}.health"))
    return Health(state, str(read(store, f"tiers.{tier}.reason") or ""), LEVELS.get(state, "info"))


def healths(stores: Sequence[Json], tier: str) -> tuple[Health, ...]:
    """Each state with its stores, the worst first."""
    owners = [store for store in stores if present(store, tier)]
    sharing = grouped(owners, lambda store: health(store, tier))
    order = ("bad", "warn", "info", "ok")
    return tuple(
        replace(one, stores=tuple(store["name"] for store in those) if len(those) < len(owners) else ())
        for one, those in sorted(sharing.items(), key=lambda item: order.index(item[0].level))
    )


def fill(store: Json, tier: str) -> Fill | None:
    resident = read(store, f"tiers.{tier}.resident_bytes")
    return None if resident is None else Fill(resident, read(store, f"tiers.{tier}.capacity_bytes"))


def fill_of_all(stores: Sequence[Json], tier: str) -> Fill | None:
    """Fill of the stores that answer, or of all if none does."""
    told = [store for store in stores if store["reachable"]] or stores
    fills = [held for store in told if (held := fill(store, tier))]
    if not fills:
        return None
    if tier == "remote" and all(read(store, "tiers.remote.chunks") is None for store in told):
        return max(fills, key=lambda one: one.resident)  # one server for all, which each store tells as its own
    return Fill(sum(one.resident for one in fills), sum_of_all(one.capacity for one in fills))


@dataclass(frozen=True)
class Account:
    """What fetches earned. None: nobody reports it, as for sources that are only observed."""

    saved: float | None
    lost: float | None
    """These two in seconds."""
    money: float | None

    @property
    def net(self) -> float | None:
        return None if self.saved is None or self.lost is None else self.saved - self.lost


@dataclass(frozen=True)
class TierRow:
    name: str
    health: tuple[Health, ...]
    fill: Fill | None
    hit_tokens: float | None
    asked_tokens: float | None
    """That it hit or missed; None here and above: nobody reports it."""
    account: Account


@dataclass(frozen=True)
class StoreCard:
    told: Json
    """As the API shows it."""
    fetch: str
    """Remote fetch: on, off, or empty without a remote tier."""
    answer: str
    """The last answer of remote_fetch, or of loading for a source."""
    cost: Cost | None
    """The newest, if others have more to show and this one is not drawn."""
    chart: Chart | None
    fills: Mapping[str, Fill]


@dataclass(frozen=True)
class Overview:
    headline: Headline
    whole: WindowSums
    """Of all stores. More may be found than was asked for first: some of it of prompts before."""
    account: Account
    tiers: Sequence[TierRow]
    stores: Sequence[StoreCard]
    undrawn: int
    """Stores whose costs are shown in words only."""
    undoable: Collection[int]
    """Numbers of the decisions that can be rolled back."""
    incidents: Mapping[str, Sequence[Json]]
    """Open ones by kind, the newest first: when a network is away there are as many as stores."""


def overview(seen: Seen) -> Overview:
    stores = seen.fleet["stores"]
    whole = figures.added(one.sums for one in seen.stores.values())
    # vLLM's own are only observed
    shown = [tier for tier in figures.TIERS if whole.hits.get(tier) or any(present(store, tier) for store in stores)]
    tiers = [_tier(tier, seen, whole) for tier in shown]
    charts = _charts(seen)
    drawn = dict(islice(charts.items(), DRAWN))
    undrawn = charts.keys() - drawn.keys()
    return Overview(
        headline=headline(
            seen.fleet,
            _modes(seen),
            traffic=whole.busy,
            waiting=sum(map(approvable, seen.decisions)),
        ),
        whole=whole,
        account=Account(*(sum_known(getattr(row.account, name) for row in tiers) for name in ACCOUNT)),
        tiers=tiers,
        stores=[_store(store, seen, drawn, undrawn) for store in stores],
        undrawn=len(undrawn),
        undoable=_undoable(seen.decisions),
        incidents=grouped(seen.incidents, itemgetter("kind")),
    )


def _modes(seen: Seen) -> Modes:
    """Where nothing is known that a tuner is asked about, the policy's alone."""
    told = {place: found["modes"] for place, found in tuned(seen.fleet).items()}
    return {
        key.replace("_", " "): {place: modes[key] for place, modes in told.items() if key in modes}
        or {"": seen.policy["modes"][key]}
        for key in settable()
    }


def _tier(tier: str, seen: Seen, whole: WindowSums) -> TierRow:
    stores = seen.fleet["stores"]
    ours = any(present(store, tier) for store in stores if not store["observed"])
    nothing = 0.0 if ours else None
    hit, missed = whole.hits.get(tier), whole.misses.get(tier)
    if hit is None and missed is None:
        hit = missed = nothing
    return TierRow(
        name=tier,
        health=healths(stores, tier),
        fill=fill_of_all(stores, tier),
        hit_tokens=hit,
        asked_tokens=sum_of_all((hit, missed)),
        account=Account(**seen.account.get(tier) or dict.fromkeys(ACCOUNT, nothing)),
    )


def _store(store: Json, seen: Seen, drawn: Mapping[str, Chart], undrawn: Collection[str]) -> StoreCard:
    name, tiers = store["name"], [tier for tier in figures.TIERS if present(store, tier)]
    tuner = "loading" if store["observed"] else "remote_fetch"
    said = (a["reason"] for a in seen.fleet["answers"] if a["store"] == name and a["tuner"] == tuner)
    return StoreCard(
        store,
        fetch=(read(store, FETCH) or "") if "remote" in tiers else "",
        answer=next(said, ""),
        cost=seen.stores[name].costs[-1] if name in undrawn else None,
        chart=drawn.get(name),
        fills={tier: held for tier in tiers if (held := fill(store, tier))},
    )


def _charts(seen: Seen) -> dict[str, Chart]:
    """Charts by store, first those where fetching came nearest to losing, or lost most."""
    remote = [store for store in seen.fleet["stores"] if not store["observed"] and present(store, "remote")]

    def dearest(store: Json) -> float:
        costs = seen.stores[store["name"]].costs
        return max((one.fetch_s / one.recompute_s for one in costs if one.recompute_s), default=0.0)

    found, fresh = {}, timedelta(seconds=FRESH * seen.fleet["window_s"])
    for store in sorted(remote, key=dearest, reverse=True):
        name = store["name"]
        off = figures.off_spans(seen.switches.get(name, ()), read(store, FETCH), seen.since, seen.now)
        if chart := cost_chart(name, seen.stores[name].costs, off, seen.now, fresh):
            found[name] = chart
    return found


def _undoable(decisions: Sequence[Decision]) -> set[int]:
    """``decisions``: newest first. Only the newest change of a field can still stand, and be rolled back."""
    newest = {(one.target, one.field): one for one in reversed(decisions) if one.state in CHANGED}
    return {one.id for one in newest.values() if one.state in STANDING}


def facts(decision: Decision) -> list[tuple[str, str]]:
    """Names and values of what else is known of a decision."""
    versions = (decision.expected_version, decision.applied_version)
    pairs = (
        ("Setting", decision.field),
        ("Mode", decision.mode),
        ("Proposed", f"{decision.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("Approved by", decision.approved_by),
        ("Applied", f"{decision.applied_at:%Y-%m-%d %H:%M:%S} UTC" if decision.applied_at else ""),
        ("Tuning version", " → ".join(str(version) for version in versions if version is not None)),
        ("Policy revision", str(decision.policy_revision or "")),
    )
    return [(name, value) for name, value in pairs if value]
