"""Watches applied changes through their soak, then keeps them, rolls them back, or calls them inconclusive."""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from tiertune_agent.changes.control import VERDICT, ChangeControl, Refused
from tiertune_agent.changes.round import Round
from tiertune_agent.changes.survey import MEMORY, concerning
from tiertune_agent.fields import in_force, read
from tiertune_agent.history.changed import place
from tiertune_agent.history.store import History
from tiertune_agent.policy.document import rates
from tiertune_agent.records import FLEET, Decision, Now, Snapshot, State, Target, Windows, parts
from tiertune_agent.remote.split import SPLIT
from tiertune_agent.tuners import remote_fetch
from tiertune_agent.tuners.base import pools, served
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS
from tiertune_agent.verdicts.soak import fill_seconds, slowest, soak_seconds
from tiertune_agent.verdicts.trials import (
    NO_PRICES,
    admission_trial,
    coarse,
    eviction_trial,
    fetch_trial,
    floor_trial,
    measure,
    shapes,
    size_trial,
    unweighed,
)
from tiertune_agent.verdicts.verdict import Spells, Trial, Verdict, weigh

PATIENCE = timedelta(days=1)
"""If a store stays away for this long after a soak, the verdict is inconclusive."""
GAP = timedelta(minutes=10)
"""Longer than two windows: who has not looked for this long does not know what a soak has shown meanwhile."""
WEEK = timedelta(days=7)
RARELY = timedelta(hours=1)
"""From one search for decisions to review to the next, as it goes through all that were ever made."""
FILLS = 2
"""Times that a tier fills while a change of its admission soaks; the first fill mixes in what the old one wrote."""
PARTS = 168
"""Parts in which a week is weighed, about its hours: neighbouring windows are much alike."""
STANDS = {State.KEPT: "still pays", State.ROLLED_BACK: "no longer pays", State.INCONCLUSIVE: "not clear"}
SUPERSEDED = "a later change of the same field came before the soak was over"
UNDONE = "it counts as undone, and is held off the longer each time"
DOUBTED = "; not rolled back: a switch-on was undone before, and its tuner makes it when it is held off no more"


class Judge:
    def __init__(self, history: History, changes: ChangeControl, now: Now, lately: Callable[[str], Windows]) -> None:
        """``lately``: windows of a store's last hour; of hundreds of stores they cannot be read in a round."""
        self._history = history
        self._lately = lately
        self._decisions = history.decisions
        self._changes = changes
        self._now = now
        self._search_at = now()
        """When to search again for what is due for review."""
        self._due: list[Decision] = []
        """What was due for review at the last search, also of stores that are away, and has not been since."""
        self._ran: tuple[datetime, datetime] = now(), now()
        """When the first and the last of the rounds began that no long gap lies between."""

    def forget(self) -> None:
        """Search anew for what is to be reviewed: another agent may have done so since."""
        self._due, self._search_at = [], self._now()

    def run(self, this: Round) -> None:
        """Begin soaks and end those that are over."""
        (began, last), now = self._ran, self._now()
        self._ran = began if now - last <= GAP else now, now
        for decision in self._decisions.in_state(State.APPLIED):
            self._begin(decision, this)
        superseded = self._history.changed.superseded()
        for decision in self._decisions.in_state(State.SOAKING):
            if decision.undo is None and not self._begun_anew(decision):
                verdict = _superseded(decision) if decision.id in superseded else self._verdict(decision, this)
                if verdict:
                    self._end(decision, verdict, this)

    def _begun_anew(self, decision: Decision) -> bool:
        """Begin a soak again that began at an hour that lies ahead: nobody knows how much of it is over."""
        now, began, until = self._now(), decision.made_at, decision.soak_until
        if until is None or began <= now:
            return False
        self._decisions.move(decision, State.SOAKING, now=now, applied_at=now, soak_until=now + (until - began))
        return True

    def review(self, this: Round) -> None:
        """Ask once a week whether a decision still pays, by the same trial over the week; one decision per round."""
        now = self._now()
        since = now - WEEK
        if now >= self._search_at:
            stores = self._history.stores()
            here = {digest for one in stores for digest in served(one.status)}
            self._due = self._history.changed.standing(since, [one.name for one in stores], here)
            self._search_at = now + RARELY
        for decision in self._due.copy():
            snapshot = this.snapshot_of(decision.target)
            if snapshot is None:
                continue
            self._due.remove(decision)
            if not measure(decision) or _overtaken(decision, this):
                continue
            if self._decisions.get(decision.id) == decision:  # else it was moved since
                told = f"the week has nothing to weigh {decision.field} by: what was before it is too long ago"
                verdict, weighable = Verdict(State.INCONCLUSIVE, told, {}), measure(decision) != "admission"
                if weighable and isinstance(trial := self._trial(decision, since, this, snapshot), Trial):
                    verdict = self._weighed(decision, coarse(trial, PARTS), this)
                self._history.verdicts.review(decision, STANDS[verdict.state], verdict, self._now())
                return

    def _begin(self, decision: Decision, this: Round) -> None:
        if not measure(decision):
            self._end(decision, unweighed(decision), this)
            return
        seconds = soak_seconds(this.rule(decision.target).guard.soak, self._fill_s(decision, this))
        until = decision.made_at + timedelta(seconds=seconds)
        self._decisions.move(decision, State.SOAKING, now=self._now(), soak_until=until)

    def _fill_s(self, decision: Decision, this: Round) -> float | None:
        """Seconds that the tier needs to fill; None if unknown, or the change does not affect what it holds."""
        kind, target = measure(decision), decision.target
        snapshot = this.snapshot_of(target)
        if snapshot is None or kind in {"fetch", "floor"}:
            return None
        capacity = decision.after if kind == "size" else _capacity(decision, snapshot)
        stores = this.fleet if target.store == FLEET else [snapshot]
        fill_s = slowest([self._store_fill_s(each, target, capacity or 0.0) for each in stores], target.tier)
        return FILLS * fill_s if fill_s and kind == "admission" else fill_s

    def _store_fill_s(self, snapshot: Snapshot, target: Target, capacity: float) -> float | None:
        windows = [
            window
            for window in self._lately(snapshot.store)
            if window.tier == target.tier and target.namespace in ("", window.namespace)
        ]
        chunk_bytes = {digest: float(pool.get("chunk_bytes") or 0) for digest, pool in pools(snapshot.status).items()}
        return fill_seconds(windows, capacity, chunk_bytes)

    def _end(self, decision: Decision, verdict: Verdict, this: Round) -> None:
        state, reason = verdict.state, verdict.reason
        if state == State.ROLLED_BACK:
            mode = this.mode(decision) if decision.mode == "auto" else decision.mode
            doubt = self._doubt(decision)
            if unpaid := this.unpaid(decision, back=True):
                doubt = f"; not rolled back: {unpaid}"
            if not doubt and mode == "auto":
                frozen = self._changes.frozen() or this.frozen(decision, self._now())
                with suppress(Refused):  # an operator was quicker
                    self._changes.roll_back(decision, VERDICT, reason, verdict.evidence, frozen=frozen)
                this.note([decision])
                return
            state = State.INCONCLUSIVE
            reason += doubt or f"; not rolled back by itself in mode {mode}: roll back decision {decision.id}"
        self._decisions.judge(decision, state, reason, verdict.evidence, self._now())

    def _doubt(self, decision: Decision) -> str:
        """Why a switch-off is not rolled back; empty: no reason. Probes of a link without fetches promise too much."""
        if not remote_fetch.protects(decision.field, decision.after):
            return ""
        now = self._now()
        undone = self._history.changed.undone(now - MEMORY, now, [decision.target.store])
        same = undone.get(place("", decision.target)[1:], ())
        again = any(remote_fetch.protects(made.field, made.before) for made in same)
        return DOUBTED if again else ""

    def _verdict(self, decision: Decision, this: Round) -> Verdict | None:
        """The verdict; None while the change soaks."""
        if not measure(decision):  # it began to soak under another version, which had something to weigh it by
            return unweighed(decision)
        now, until = self._now(), decision.soak_until or self._now()
        snapshot, began = this.snapshot_of(decision.target), decision.made_at
        if now < until or (snapshot and snapshot.at <= began):  # not even read since the change
            return None
        if snapshot is None:
            why = self._gone(decision.target, this)
            since = self._away_since(decision.target, this, until)
            if not why and now >= since + PATIENCE:
                why = f"the store has been away {'since the soak' if since == until else 'for a day'}"
            return Verdict(State.INCONCLUSIVE, why, {}) if why else None
        if found := _overtaken(decision, this):
            return Verdict(State.INCONCLUSIVE, f"somebody changed it within the soak: {found}", {})
        trial = self._trial(decision, began, this, snapshot)
        watched = min(max(until, self._ran[0]), until + WEEK)  # an agent may start again and again
        if trial.windows < ENOUGH_WINDOWS and now < watched + (until - began):
            return None  # too little traffic, or nobody looked: once the soak's length more
        return self._weighed(decision, trial, this)

    def _gone(self, target: Target, this: Round) -> str:
        """Why the target is gone for good; empty: it may come back."""
        if target.store == FLEET:
            return "" if this.managed else "the remote is not managed any more"
        there = this.missing or target.store in {store.name for store in self._history.stores()}
        return "" if there else "the store is none of the fleet's any more"

    def _away_since(self, target: Target, this: Round, until: datetime) -> datetime:
        """When all that has the target last answered, if that is known and after the soak: its verdict may wait."""
        rows = [self._history.store(name) for name in (target.store, *(this.missing if target == SPLIT else ()))]
        return max(until, min(row.last_seen if row else until for row in rows))

    def _weighed(self, decision: Decision, trial: Trial | Spells, this: Round) -> Verdict:
        return weigh(trial, worse_by=this.rule(decision.target).guard.roll_back_if_worse_by)

    def _trial(self, decision: Decision, since: datetime, this: Round, snapshot: Snapshot) -> Trial | Spells:
        target, kind, before, after = decision.target, measure(decision), decision.before, decision.after
        measured, spell = self._history.measured, (since, self._now())
        if kind == "size":
            told = concerning(measured.prospects(target.namespace, *spell), target, snapshot)
            prices = NO_PRICES if target == SPLIT else rates(this.rule(target).prices)  # as `tier_size` weighs them
            return size_trial(told, *shapes(decision), rates=prices, hosts=this.hosts(target, snapshot))
        if kind == "admission":  # the later half of the time since, full of the new setting's writes, and one before
            half = (self._now() - since) / FILLS
            windows = measured.fleet_windows([target.store], since - half, self._now())
            prices, filled_at = rates(this.rule(target).prices), since + half
            return admission_trial(windows, target.tier, prices, changed_at=since, filled_at=filled_at)
        if kind == "eviction":
            windows = measured.pool_windows(target.store, *spell, tier=target.tier, namespace=target.namespace)
            return eviction_trial(windows, before, after, _capacity(decision, snapshot))
        windows = measured.windows_since(target.store, *spell, tier=target.tier)
        if kind == "floor":
            return floor_trial(before, after, windows)
        return fetch_trial(after, windows, measured.typical([target.store]).get(target.store))


def _overtaken(decision: Decision, this: Round) -> str:
    """What it set that has another value by now; empty: nothing has, of stores that are still there.

    Of a split each host is looked at: their mean changes with every host that comes or leaves.
    """
    for part in parts(decision):
        there = this.snapshot_of(part.target)
        found = in_force(there.tuning, part.field) if there else part.after
        if found != part.after:
            which = "" if part is decision else f"{part.target}: "
            return f"{which}{part.field} is {found}, not {part.after}"
    return ""


def _superseded(decision: Decision) -> Verdict:
    """Inconclusive; fetching switched on, then off as it lost time, counts as undone; the other way is no error."""
    wrong = remote_fetch.protects(decision.field, decision.before)
    return Verdict(State.INCONCLUSIVE, f"{SUPERSEDED}: {UNDONE}" if wrong else SUPERSEDED, {})


def _capacity(decision: Decision, snapshot: Snapshot) -> float | None:
    """Bytes that the pool, or without one its tier, may hold now."""
    tier, pool = decision.target.tier, decision.target.namespace
    place = f"pools.{pool}.{tier}.effective" if pool else f"tiers.{tier}"
    found: float | None = read(snapshot.status, f"{place}.capacity_bytes")
    return found
