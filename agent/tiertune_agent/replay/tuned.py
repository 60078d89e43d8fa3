"""The agent in a replay: the tuners, guard and verdicts of production under the trace's clock, decisions in memory.

It starts from ``baseline`` (DRAM and remote 50/50, LRU) with the gate on and keeps the total of bytes. All nodes are
alike, so one proposal changes every node. Tuners are asked at the end of every period, all but the gate's settings
more often, as in production; a tier is changed at most once within a period.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tiertune_agent.fields import Json, JsonDict, capacity_field, capacity_of, read, replaced
from tiertune_agent.policy.budgets import Budgets
from tiertune_agent.policy.document import Guard, Policy, Rule, made, rates, rules_for, settings_of, split_rules
from tiertune_agent.policy.guard import Recent, guard
from tiertune_agent.records import Made, State, Target
from tiertune_agent.replay.contents import FleetPools, Sizes
from tiertune_agent.replay.play import Play, Tally
from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.stores import BEGIN, KEPT_REMOTE, POOL, STORE, WINDOWS, Stores
from tiertune_agent.tuners import gate_settings
from tiertune_agent.tuners.base import MOST_OF_TIER, Answer, Current, NoChange, Proposal, Tuner
from tiertune_agent.tuners.eviction import EvictionSettings, EvictionTuner
from tiertune_agent.tuners.gate_settings import GateTuner
from tiertune_agent.tuners.registry import Tuners
from tiertune_agent.tuners.remote_fetch import RemoteFetch, RemoteFetchSettings
from tiertune_agent.tuners.tier_size import TierSize, TierSizeSettings
from tiertune_agent.verdicts.soak import soak_seconds
from tiertune_agent.verdicts.trials import eviction_trial, fetch_trial, floor_trial, measure, size_trial, unweighed
from tiertune_agent.verdicts.verdict import Trial, weigh
from tiertune_agent.whatif.shapes import SHARES
from tiertune_connector.cost import GateSettings
from tiertune_connector.tuning import TIERS
from tiertune_connector.whatif.chain import Shape

if TYPE_CHECKING:
    from tiertune_agent.replay.simulate import Replay

START = 0.5
FETCH_WINDOWS = 2
"""From one look at remote fetches to the next; production's periods stand to each other as much."""
DRAM_FIELD = capacity_field("dram")
EVICTION_FIELD = f"pools.{POOL}.dram.eviction"
DRAM, REMOTE = Target(STORE, "dram"), Target(STORE, "remote")
TARGETS: Mapping[type[Tuner], Target] = {
    RemoteFetch: REMOTE,
    GateTuner: REMOTE,
    TierSize: DRAM,
    EvictionTuner: Target(STORE, "dram", POOL),
}
"""What each tuner is asked about."""

DEFAULT_POLICY = Policy(
    version=1,
    mode="auto",
    guard=Guard(changes_per_hour=1000, min_requests=50, soak=300.0),
    tuners=Tuners(
        remote_fetch=RemoteFetchSettings(margin=1.0, disable_after=4 * WINDOWS, enable_after=1),
        tier_size=TierSizeSettings(hold_off=0.0, max_step=1.0, min_gain=0.005),
        eviction=EvictionSettings(hold_off=0.0),
    ),
)
"""Without a policy file: on auto, and as quick as the evidence allows; the gate is that of the run ``rule``.

A change soaks for 300 s, and for a scenario's period or until its tier could have filled if that is longer: with a
policy's ten minutes a pool would be held for two periods.

It refuses each fetch that does not pay, so that fetching is switched off costs more where it is wrong than it saves
where it is right: off after as many windows as four periods have in which nothing that was found paid, on at the first
measurement that does."""


@dataclass(frozen=True, kw_only=True)
class Change(Proposal):
    """One decision of the run: a proposal that was made."""

    number: int
    at_s: float
    tuner: str
    target: Target
    state: State
    until_s: float
    """When its soak ends."""

    @property
    def made(self) -> Made:
        moment = BEGIN + timedelta(seconds=self.at_s)
        learned = self.state is State.ROLLED_BACK or "requests" in self.evidence
        return Made(self.field, self.before, self.after, moment, self.evidence.get("goal"), learned)

    def document(self) -> JsonDict:
        told = {name: getattr(self, name) for name in ("at_s", "tuner", "field", "before", "after", "reason")}
        return {"id": self.number, **told, "state": str(self.state)}


class ReplayAgent:
    """Conducts one run: sees every request, and acts at the end of windows."""

    def __init__(self, replay: "Replay", policy: Policy, start: Sizes, fleet: FleetPools) -> None:
        """``start`` are the sizes at first, of the ``fleet`` too; DRAM and remote of them are the budget."""
        scenario = replay.scenario
        self._fleet = fleet
        self._rule = _adapted(policy.for_target(DRAM), scenario)
        self._chunk_bytes, self._nodes, self._period_s = replay.chunk_bytes, scenario.nodes, scenario.period_s
        held = {tier: {"capacity_bytes": getattr(start, tier) * self._chunk_bytes} for tier in TIERS}
        gate = GateSettings()
        remote = {"fetch": "on", "margin": gate.margin, "min_fetch_tokens": gate.min_fetch_tokens}
        self._tuning: Json = {
            "tiers": {**held, "remote": {**held["remote"], **remote}},
            "pools": {POOL: {"dram": {"eviction": start.dram_eviction}}},
        }
        """Every store's; the remote's capacity is the fleet's."""
        self.gate = {"remote": gate}
        """The gates' bounds, to be read anew for every request."""
        self._budget = self.shape.dram * self._nodes + self.shape.remote
        shapes = [self._split_shape(int((1 - share) * self._budget / self._nodes)) for share in SHARES]
        self.stores = Stores(replay, shapes, start, gate.margin)
        self._ended = 0  # windows
        self._asked = 0  # by the last request
        self._settled_s = {DRAM.tier: 0.0, REMOTE.tier: 0.0}
        """By tier, until when it is not changed again: the end of the period."""
        self.changes: list[Change] = []
        self.answers: dict[str, JsonDict] = {}
        """The newest of each tuner that changed nothing: when, and why."""
        self.incidents: list[JsonDict] = []
        self.split: list[list[float]] = [[0.0, self._share()]]

    def until(self, at_s: float) -> None:
        """End the windows that are over, without those in which nothing happens."""
        while at_s >= (self._ended + 1) * self.stores.window_s:
            self._ended += self._idle(at_s) + 1
            self._window()

    def _idle(self, at_s: float) -> int:
        """How many windows nothing happens in, up to the last period before ``at_s``.

        So long after a request those that are kept are all empty. Fetching is switched on again in that last period.
        """
        settled = self._ended - self._asked >= KEPT_REMOTE
        if not settled or any(change.state is State.SOAKING for change in self.changes):
            return 0
        left = int(at_s / self.stores.window_s) - self._ended - WINDOWS
        return max(0, left - left % WINDOWS)

    def request(self, index: int, at_s: float, engine: int) -> None:
        """Request ``index`` is about to be looked up: it comes to ``engine``, ``at_s`` seconds after the first."""
        self.until(at_s)
        self._asked = self._ended
        self.stores.request(index, self._fleet.node(engine))

    @property
    def _at_s(self) -> float:
        """Now, which is the end of the last window."""
        return self._ended * self.stores.window_s

    def _window(self) -> None:
        """A window ends."""
        number = self._ended
        self.stores.close_window(number)
        self._notice()
        of_period = number % WINDOWS == 0
        if of_period or (number % FETCH_WINDOWS == 0 and self.stores.news):
            self.stores.news = False
            self._act([RemoteFetch, GateTuner] if of_period else [RemoteFetch])
        asked = TierSize, EvictionTuner
        self._act([each for each in asked if number * settings_of(self._rule, each.name).looks % WINDOWS == 0])

    def _notice(self) -> None:
        """Drift: the fleet is not as it was left, so it is taken as it is, and told."""
        pool = self._fleet.dram_pools[0]
        for field, expected, found in (
            (DRAM_FIELD, max(self._chunk_bytes, self.shape.dram), pool.capacity * self._chunk_bytes),  # one at least
            (EVICTION_FIELD, self._algorithm, pool.algorithm),
        ):
            if found != expected:
                message = f"{field} is {found}, and was left at {expected}: somebody changed it by hand"
                self.incidents.append({"at_s": self._at_s, "kind": "drift", "message": message})
                self._tuning = replaced(self._tuning, field, found)
                self.stores.resize(pool.capacity)

    # -- what is done

    def _act(self, asked: Sequence[type[Tuner]]) -> None:
        """Judge what has soaked, then ask the tuners of one tier, of which at most one changes something."""
        for tier in {TARGETS[tuner].tier for tuner in asked}:
            self._judge(tier)
            if self._at_s < self._settled_s[tier]:
                return
        for tuner in (made(each, self._rule) for each in asked):
            answer = self._ask(tuner)
            if isinstance(answer, Proposal):
                self._take(tuner, answer)
                return
            self.answers[tuner.name] = {"tuner": tuner.name, "at_s": self._at_s, "reason": answer.reason}

    def _ask(self, tuner: Tuner) -> Answer:
        now, target = BEGIN + timedelta(seconds=self._at_s), TARGETS[type(tuner)]
        own = [change for change in self.changes if change.tuner == tuner.name]
        undone = [change.made for change in own if change.state is State.ROLLED_BACK]
        last = own[-1].made if own else None
        rules = rules_for(self._rule, tuner.name, target.tier, elsewhere={})
        if tuner.scope == "size":
            sizes = self._rule.tuners.tier_size
            rules = split_rules(replace(rules, waits=False), sizes, self._budget, self._nodes)
        current = Current(
            target,
            self._tuning,
            self._status(),
            last=last,
            typical=None if self.gate["remote"].fetch_on else self.stores.typical(),
            prospects=self.stores.prospects,
            hosts=self._nodes,
            rates=rates(self._rule.prices),
            budget_bytes=self._budget,
            remote_bytes=self.shape.remote,
            least_bytes=rules.least,
            most_bytes=rules.most,
        )
        soaking = self._soaking(target.tier)
        recent = Recent(
            now=now,
            frozen="",  # a trace has no dates for the policy's calendar
            soaking=f"change {soaking[-1].number}" if soaking else "",
            last=last,
            undone=undone,
            changes_last_hour=sum(change.at_s > self._at_s - 3600 for change in self.changes),
        )
        windows = list(self.stores.remote)[-MOST_OF_TIER:] if target == REMOTE else self.stores.windows
        answer = guard(tuner.evaluate(windows, current), rules, recent)
        if not isinstance(answer, Proposal):
            return answer
        if rules.mode != "auto":
            return NoChange(f"mode {rules.mode}: {answer.reason}")
        return self._in_chunks(answer) if answer.field == DRAM_FIELD else answer

    def _in_chunks(self, proposal: Proposal) -> Answer:
        """Whole chunks; one chunk where a step is allowed less, on the way to a goal that is further."""
        before, chunk = int(proposal.before), self._chunk_bytes
        after = int(proposal.after) - int(proposal.after) % chunk
        if after == before:
            way = int(proposal.evidence.get("goal", before)) - before
            after += chunk if way >= chunk else -chunk if way <= -chunk else 0
        if after == before or after * self._nodes > self._budget:
            return NoChange(f"less than a chunk; {proposal.reason}")
        return replace(proposal, after=after)

    def _take(self, tuner: Tuner, proposal: Proposal) -> None:
        target = TARGETS[type(tuner)]
        for change in self._soaking(target.tier):
            if change.field == proposal.field:
                self._end(change, State.INCONCLUSIVE)  # superseded
        soak_s = soak_seconds(max(self._rule.guard.soak, self._period_s), self._fill_s(proposal))
        self.changes.append(
            Change(
                **vars(proposal),
                number=len(self.changes) + 1,
                at_s=self._at_s,
                tuner=tuner.name,
                target=target,
                state=State.SOAKING if measure(proposal) else unweighed(proposal).state,
                until_s=self._at_s + soak_s,
            )
        )
        self._set(target.tier, proposal.field, proposal.after)

    def _fill_s(self, proposal: Proposal) -> float | None:
        """Seconds in which a node's DRAM fills; None where the change does not affect what it holds."""
        if proposal.field not in (DRAM_FIELD, EVICTION_FIELD):
            return None
        resized = proposal.field == DRAM_FIELD
        chunks = int(proposal.after) // self._chunk_bytes if resized else self._fleet.dram_pools[0].capacity
        return self.stores.fill_s(chunks, self._algorithm)

    def _soaking(self, tier: str) -> list[Change]:
        return [change for change in self.changes if change.state is State.SOAKING and change.target.tier == tier]

    def _judge(self, tier: str) -> None:
        """End soaks that are over."""
        over = [change for change in self._soaking(tier) if self._at_s >= change.until_s]
        for change in over:
            if read(self._tuning, change.field) != change.after:
                self._end(change, State.INCONCLUSIVE, "; somebody changed it within the soak")
                continue
            verdict = weigh(self._trial(change), worse_by=self._rule.guard.roll_back_if_worse_by)
            undone = verdict.state is State.ROLLED_BACK
            self._end(change, verdict.state, f"; rolled back: {verdict.reason}" if undone else "")
            if undone:
                self._set(change.target.tier, change.field, change.before)

    def _end(self, change: Change, state: State, why: str = "") -> None:
        self.changes[change.number - 1] = replace(change, state=state, reason=change.reason + why)

    def _trial(self, change: Change) -> Trial:
        since, stores, before, after = change.made.at, self.stores, change.before, change.after
        if change.field == DRAM_FIELD:
            prospects = [prospect for prospect in stores.prospects if prospect.start >= since]
            return size_trial(prospects, self._split_shape(before), self._split_shape(after))
        if change.target == REMOTE:
            windows = [window for window in stores.remote if window.start >= since]
            floor = change.field == gate_settings.FLOOR
            return floor_trial(before, after, windows) if floor else fetch_trial(after, windows, stores.typical())
        windows = [window for window in stores.windows if window.start >= since]
        return eviction_trial(windows, before, after, float(self.shape.dram))

    def _set(self, tier: str, field: str, value: Any) -> None:  # noqa: ANN401 (of a document)
        self._settled_s[tier] = (self._at_s // self._period_s + 1) * self._period_s
        self._tuning = replaced(self._tuning, field, value)
        if field == EVICTION_FIELD:
            self._fleet.switch(self._algorithm)
        elif field == DRAM_FIELD:
            self._tuning = replaced(self._tuning, capacity_field("remote"), self._split_shape(value).remote)
            dram, remote = (size // self._chunk_bytes for size in (self.shape.dram, self.shape.remote))
            self._fleet.resize(dram=dram, remote=remote)
            self.stores.resize(max(1, dram))
            self.split.append([self._at_s, self._share()])
        else:
            told = read(self._tuning, "tiers.remote")
            self.gate["remote"] = gate = GateSettings(told["fetch"] == "on", told["margin"], told["min_fetch_tokens"])
            self.stores.heed(gate)

    # -- how things stand

    @property
    def shape(self) -> Shape:
        return Shape(*(capacity_of(self._tuning, tier) for tier in TIERS))

    @property
    def _algorithm(self) -> str:
        return str(read(self._tuning, EVICTION_FIELD))

    def _split_shape(self, dram: int) -> Shape:
        """The rest of the budget is remote."""
        return Shape(dram, self.shape.disk, max(0, self._budget - dram * self._nodes))

    def _share(self) -> float:
        return self.shape.remote / self._budget if self._budget else 0.0

    def _status(self) -> JsonDict:
        dram = {"effective": {"capacity_bytes": self.shape.dram}}
        return {
            "tiers": {"dram": {"health": "ok"}, "remote": {"health": "ok"}},
            "pools": {POOL: {"model": "", "chunk_bytes": self._chunk_bytes, "dram": dram}},
        }


def conduct(replay: "Replay", policy: Policy | None = None) -> tuple[ReplayAgent, Tally]:
    """The run ``tuned``: the agent at its end, and what became of the requests."""
    start = replay.split(START)
    fleet = replay.fleet(start)
    agent = ReplayAgent(replay, policy or DEFAULT_POLICY, start, fleet)
    return agent, replay.play(Play(replay, "rule", agent.gate, agent.stores.report), fleet, agent)


def tuned(replay: "Replay", policy: Policy | None = None) -> JsonDict:
    """The run ``tuned``, as ``tiertune replay --json`` tells it, with what was decided and why."""
    agent, tally = conduct(replay, policy)
    rolled_back = sum(change.state is State.ROLLED_BACK for change in agent.changes)
    report = replay.report(tally, split=agent.split, decisions=len(agent.changes), rollbacks=rolled_back)
    changes = [change.document() for change in agent.changes]
    return {**report, "changes": changes, "answers": [*agent.answers.values()], "incidents": agent.incidents}


def _adapted(rule: Rule, scenario: Scenario) -> Rule:
    """The same rules with the scenario's period, that of fetches as much shorter as in production.

    The budgets of DRAM and remote are bounds: what is split is the scenario's own total.
    """
    budgets, tuners, period_s = rule.budgets, rule.tuners, scenario.period_s
    sizes = tuners.tier_size
    bounds = {
        "dram": (sizes.max.dram, budgets.dram and budgets.dram // scenario.nodes),
        "remote": (sizes.max.remote, budgets.remote),
    }
    least = {tier: min((most for most in both if most is not None), default=None) for tier, both in bounds.items()}
    changed = {
        "remote_fetch": tuners.remote_fetch.model_copy(update={"period": period_s * FETCH_WINDOWS / WINDOWS}),
        "tier_size": sizes.model_copy(update={"period": period_s, "max": sizes.max.model_copy(update=least)}),
        "eviction": tuners.eviction.model_copy(update={"period": period_s}),
    }
    return rule.model_copy(update={"budgets": Budgets(), "tuners": tuners.model_copy(update=changed)})
