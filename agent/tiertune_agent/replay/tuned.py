"""The agent in a replay: the tuners, guard and verdicts of production under the trace's clock, decisions in memory.

It starts from ``baseline`` (DRAM and remote 50/50, LRU) with the gate on and keeps the total of bytes. All nodes are
alike, so one proposal changes every node; what production reads from stores (samples, ghosts, probes) is made here from
the requests that pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tiertune_agent.guard import Recent, guard
from tiertune_agent.policy import Guard, Policy, Rule, Tuners, frozen_by, rates, rules_for
from tiertune_agent.records import Made, Prospect, State, Target, Window, series
from tiertune_agent.replay.fleet import Fleet
from tiertune_agent.replay.link import Beliefs
from tiertune_agent.replay.sizes import Sizes
from tiertune_agent.trials import eviction_trial, size_trial
from tiertune_agent.tuners.base import Answer, Current, NoChange, Proposal, Tuner
from tiertune_agent.tuners.eviction import Eviction, EvictionSettings
from tiertune_agent.tuners.tier_size import TierSize, TierSizeSettings, horizon_s
from tiertune_agent.verdict import Verdict, compare
from tiertune_connector.cost import PrefillCost
from tiertune_connector.whatif.chain import ChainGhosts, Seen, Shape
from tiertune_connector.whatif.pool_ghosts import PoolGhosts, rate_of
from tiertune_connector.whatif.sampler import Frequent, Sampler, mix

if TYPE_CHECKING:
    from tiertune_agent.replay.play import Tally
    from tiertune_agent.replay.simulate import Replay

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Of the total that the remote tier has in the shapes that are simulated."""
START = 0.5
HOT = 64
"""Keys of the hot set."""
SAMPLED_CHUNKS = 1024
"""Of the total that a miniature fleet holds at most."""
RATES = (0.01, 0.1)
"""Least and largest share of keys sampled for the fleet's chains."""
WINDOWS = 20
"""In a period."""
KEPT_WINDOWS = 200
"""Of the pool's ghosts: ten periods."""
GHOST_RATE = 0.25
"""Share of keys that pools' ghosts see: more than a busy store affords, at the hundred chunks a second of a trace."""
WATCHED_NODES = 4
"""Nodes whose pools have ghosts; the others are like them."""
POOL = "replay"
"""Name of the only namespace."""
DRAM_FIELD = "tiers.dram.capacity_bytes"
EVICTION_FIELD = f"pools.{POOL}.dram.eviction"
BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
"""When the first request comes, to tuners that think in dates."""

DEFAULT_POLICY = Policy(
    version=1,
    mode="auto",
    guard=Guard(changes_per_hour=1000, min_requests=50),
    tuners=Tuners(tier_size=TierSizeSettings(hold_off=0.0, min_gain=0.01), eviction=EvictionSettings(hold_off=0.0)),
)
"""Without a policy file: on auto, and as quick as the evidence allows."""


@dataclass
class Change:
    """One decision of the run."""

    number: int
    at_s: float
    tuner: str
    target: Target
    field: str
    before: Any
    after: Any
    reason: str
    evidence: dict[str, Any]
    state: State = State.SOAKING
    until_s: float = 0.0
    """When its soak ends."""

    def made(self) -> Made:
        moment = BEGIN + timedelta(seconds=self.at_s)
        return Made(self.field, self.before, self.after, moment, self.evidence.get("goal"))

    def document(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("at_s", "tuner", "field", "before", "after", "reason")}
        return {"id": self.number, **told, "state": str(self.state)}


class _Costs:
    """What requests pay at the time, by the estimates that a store has."""

    margin = 1.0

    def __init__(self, prefill: PrefillCost, chunk_tokens: int, chunk_bytes: int) -> None:
        self._prefill, self._chunk_tokens, self._chunk_bytes = prefill, chunk_tokens, chunk_bytes
        self._known: list[float] = []
        self.fetches: dict[str, tuple[float, float]] = {}

    def prefill_s(self, chunks: int) -> float:
        known = self._known
        while len(known) <= chunks:
            seconds = self._prefill.seconds(0, len(known) * self._chunk_tokens)
            assert seconds is not None  # the model tells it
            known.append(seconds)
        return known[chunks]

    def fetch_s(self, tier: str) -> tuple[float, float]:
        return self.fetches[tier]


class Agent:
    """Conducts one run: sees every request, and acts at the end of every period."""

    def __init__(self, replay: "Replay", policy: Policy, start: Sizes) -> None:
        """``start`` are the sizes at first; DRAM and remote of them are the budget."""
        scenario, world = replay.scenario, replay.world
        self._rule = _at_period(policy.for_target(Target("fleet", "dram")), scenario.period_s)
        self._chunk_bytes, self._nodes, self._period_s = replay.chunk_bytes, scenario.nodes, scenario.period_s
        self._chains = replay.trace.keys
        self._beliefs = Beliefs(world.link, 1, replay.chunk_bytes)
        self._world = world
        self._costs = _Costs(world.prefill, world.chunk_tokens, replay.chunk_bytes)
        self.shape = self._shape(start.dram, start.disk, start.remote)
        self._algorithm = start.dram_eviction
        self._budget = self.shape.dram * self._nodes + self.shape.remote
        shapes = [self._split_shape(int((1 - share) * self._budget / self._nodes)) for share in SHARES]
        rate = min(RATES[1], max(RATES[0], SAMPLED_CHUNKS * replay.chunk_bytes / max(1, self._budget)))
        self._hashes = mix(replay.trace.ids.astype("uint64"), scenario.seed)
        self._offsets = replay.trace.offsets.tolist()
        self._sampler, self._frequent = Sampler(rate, scenario.seed), Frequent()
        self._ghosts = ChainGhosts(shapes, rate=rate, chunk_bytes=replay.chunk_bytes)
        watched = range(0, self._nodes, -(-self._nodes // WATCHED_NODES))
        seed, seen = scenario.seed, _ghost_rate(start.dram)
        self._pools = {node: PoolGhosts(start.dram, seed=seed, rate=seen) for node in watched}
        self._counted: dict[tuple[str, int], tuple[float, float]] = {}
        self._prospects: list[Prospect] = []
        self._windows: list[Window] = []
        self._window_s = scenario.period_s / WINDOWS
        self._ended = 0  # windows
        self.changes: list[Change] = []
        self.answers: dict[str, tuple[float, str]] = {}
        """The newest of each tuner that changed nothing: when, and why."""
        self.incidents: list[dict[str, Any]] = []
        self.split: list[list[float]] = [[0.0, self._share()]]
        self._learn_costs(0.0)

    # -- what passes

    def request(self, index: int, at_s: float, engine: int, fleet: Fleet) -> None:
        """As every conductor."""
        while at_s >= (self._ended + 1) * self._window_s:
            self._ended += 1
            self._close_window(self._ended * self._window_s)
            self._notice(self._ended * self._window_s, fleet)
            if self._ended % WINDOWS == 0:
                self._act(self._ended * self._window_s, fleet)
        chain = self._chains[index]
        hashed = self._hashes[self._offsets[index] : self._offsets[index + 1]]
        node = fleet.node(engine)
        self._frequent.request(chain)
        picks = self._sampler.pick(chain, hashed)
        self._ghosts.request(Seen(node, len(chain), picks), self._costs)
        pool = self._pools.get(node)
        if pool is not None:
            pool.request(chain, hashed)

    def _close_window(self, at_s: float) -> None:
        """What the stores tell of the window that ends, and what holds from now on."""
        start = BEGIN + timedelta(seconds=at_s - self._window_s)
        bill = self._ghosts.take()
        if bill.requests:
            costs = {name: seconds / bill.requests for name, seconds in bill.seconds.items()}
            if costs:
                self._prospects.append(Prospect("", start, self._window_s, bill.requests, costs))
        self._windows.append(Window("fleet", POOL, "", "", start, self._window_s, self._ghost_tokens()))
        if self._ended % WINDOWS == 0:
            self._sampler.adopt(self._sampler.rate, self._sampler.seed, self._frequent.top(HOT), self._ended)
        self._learn_costs(at_s)
        since = start - timedelta(seconds=horizon_s(self._period_s))
        self._prospects = [prospect for prospect in self._prospects if prospect.start >= since]
        self._windows = self._windows[-KEPT_WINDOWS:]

    def _learn_costs(self, at_s: float) -> None:
        estimates = {**self._world.local, "remote": self._beliefs.estimate(0, at_s)}
        self._costs.fetches = {
            tier: (estimate.t0_s, estimate.per_chunk_s + self._chunk_bytes / estimate.bytes_per_s)
            for tier, estimate in estimates.items()
        }

    def _ghost_tokens(self) -> dict[str, float]:
        """``whatif_tokens_total`` of the window, over all pools watched."""
        totals: dict[tuple[str, int], tuple[float, float]] = {}
        for pool in self._pools.values():
            for key, (hits, chunks) in pool.counts().items():
                hit, missed = totals.get(key, (0.0, 0.0))
                totals[key] = (hit + hits, missed + chunks - hits)
        values: dict[str, float] = {}
        for key, counts in totals.items():
            algorithm, chunks = key
            for result, now, before in zip(("hit", "miss"), counts, self._counted.get(key, (0.0, 0.0)), strict=True):
                labels = (
                    ("algorithm", algorithm),
                    ("capacity_bytes", str(chunks * self._chunk_bytes)),
                    ("result", result),
                )
                values[series("whatif_tokens_total", labels)] = max(0.0, now - before) * self._world.chunk_tokens
        self._counted = totals
        return values

    def _notice(self, at_s: float, fleet: Fleet) -> None:
        """Drift: the fleet is not as it was left, so it is taken as it is, and told."""
        pool = fleet.dram_pools[0]
        for field, expected, found in (
            (DRAM_FIELD, self.shape.dram, pool.capacity * self._chunk_bytes),
            (EVICTION_FIELD, self._algorithm, pool.algorithm),
        ):
            if found != expected and not (field == DRAM_FIELD and pool.capacity == 1):
                message = f"{field} is {found}, and was left at {expected}: somebody changed it by hand"
                self.incidents.append({"at_s": at_s, "kind": "drift", "message": message})
                if field == DRAM_FIELD:
                    self.shape = replace(self.shape, dram=int(found))
                    self._resize_ghosts(pool.capacity)
                else:
                    self._algorithm = str(found)

    # -- what is done

    def _act(self, at_s: float, fleet: Fleet) -> None:
        """Judge what has soaked, then ask the tuners; at most one change of the pool in a period."""
        soaking = [change for change in self.changes if change.state is State.SOAKING and at_s >= change.until_s]
        if self._judge(soaking, at_s, fleet):
            return
        for tuner, target in self._tuners():
            answer = self._ask(tuner, target, at_s)
            if isinstance(answer, Proposal):
                self._take(tuner, target, answer, at_s, fleet)
                return
            self.answers[tuner.name] = (at_s, answer.reason)

    def _tuners(self) -> list[tuple[Tuner, Target]]:
        tuners = self._rule.tuners
        pool = Target("fleet", "dram", POOL)
        return [(TierSize(tuners.tier_size), Target("fleet", "dram")), (Eviction(tuners.eviction), pool)]

    def _ask(self, tuner: Tuner, target: Target, at_s: float) -> Answer:
        now = BEGIN + timedelta(seconds=at_s)
        made = [change for change in self.changes if change.target == target and change.tuner == tuner.name]
        undone = [change.made() for change in made if change.state is State.ROLLED_BACK]
        last = made[-1].made() if made else None
        current = Current(
            target,
            self._tuning(),
            self._status(),
            changed_at=last.at if last else None,
            prospects=self._prospects,
            hosts=self._nodes,
            rates=rates(self._rule.prices),
            goal=last.goal if last else None,
            budget_bytes=self._budget,
            remote_bytes=self.shape.remote,
        )
        rules = rules_for(self._rule, tuner.name, target.tier, advisory=tuner.advisory, elsewhere={})
        if tuner.name == "tier_size":
            whole = self._budget / self._nodes
            rules = replace(rules, waits=False, most=whole if rules.most is None else min(whole, rules.most))
        soaking = [change for change in self.changes if change.state is State.SOAKING]
        recent = Recent(
            now=now,
            frozen=frozen_by(self._rule, now),
            soaking=f"change {soaking[-1].number}" if soaking else "",
            last=last,
            undone=undone,
            changes_last_hour=sum(change.at_s > at_s - 3600 for change in self.changes),
        )
        answer = guard(tuner.evaluate(self._windows, current), rules, recent)
        if isinstance(answer, Proposal) and rules.mode != "auto":
            return NoChange(f"mode {rules.mode}: {answer.reason}")
        return answer

    def _take(self, tuner: Tuner, target: Target, proposal: Proposal, at_s: float, fleet: Fleet) -> None:
        after = proposal.after
        if proposal.field == DRAM_FIELD:
            after -= after % self._chunk_bytes
        for change in self.changes:
            if change.state is State.SOAKING and change.field == proposal.field:
                change.state = State.INCONCLUSIVE  # superseded
        soak_s = max(self._rule.guard.soak, self._period_s)
        self.changes.append(
            Change(
                len(self.changes) + 1,
                at_s,
                tuner.name,
                target,
                proposal.field,
                proposal.before,
                after,
                proposal.reason,
                dict(proposal.evidence),
                until_s=at_s + soak_s,
            )
        )
        self._set(proposal.field, after, at_s, fleet)

    def _judge(self, changes: Sequence[Change], at_s: float, fleet: Fleet) -> bool:
        """End soaks that are over; whether a change was rolled back."""
        for change in changes:
            verdict = self._verdict(change)
            change.state = verdict.state
            if verdict.state is State.ROLLED_BACK:
                change.reason += f"; rolled back: {verdict.reason}"
                self._set(change.field, change.before, at_s, fleet)
        return any(change.state is State.ROLLED_BACK for change in changes)

    def _verdict(self, change: Change) -> Verdict:
        since = BEGIN + timedelta(seconds=change.at_s)
        worse_by = self._rule.guard.roll_back_if_worse_by
        if change.tuner == "tier_size":
            before, after = self._split_shape(change.before), self._split_shape(change.after)
            return compare(
                size_trial([p for p in self._prospects if p.start >= since], before, after), worse_by=worse_by
            )
        windows = [window for window in self._windows if window.start >= since]
        return compare(eviction_trial(windows, change.before, change.after, float(self.shape.dram)), worse_by=worse_by)

    def _set(self, field: str, value: Any, at_s: float, fleet: Fleet) -> None:  # noqa: ANN401 (of a tuning document)
        if field == EVICTION_FIELD:
            self._algorithm = str(value)
            fleet.switch("dram", self._algorithm)
            return
        self.shape = self._split_shape(int(value))
        dram, remote = (int(size / self._chunk_bytes) for size in (self.shape.dram, self.shape.remote))
        fleet.resize(dram=dram, remote=remote)
        self._resize_ghosts(max(1, dram))
        self.split.append([at_s, self._share()])

    def _resize_ghosts(self, chunks: int) -> None:
        for pool in self._pools.values():
            pool.resize(chunks)

    # -- how things stand

    def _shape(self, dram: int, disk: int, remote: int) -> Shape:
        return Shape(dram * self._chunk_bytes, disk * self._chunk_bytes, remote * self._chunk_bytes)

    def _split_shape(self, dram: int) -> Shape:
        """The rest of the budget is remote."""
        return Shape(dram, self.shape.disk, max(0, self._budget - dram * self._nodes))

    def _share(self) -> float:
        return self.shape.remote / self._budget if self._budget else 0.0

    def _tuning(self) -> dict[str, Any]:
        return {
            "tiers": {"dram": {"capacity_bytes": self.shape.dram}, "disk": {"capacity_bytes": self.shape.disk}},
            "pools": {POOL: {"dram": {"eviction": self._algorithm}}},
        }

    def _status(self) -> dict[str, Any]:
        dram = {"effective": {"capacity_bytes": self.shape.dram}}
        return {
            "tiers": {"dram": {"health": "ok"}, "remote": {"health": "ok"}},
            "pools": {POOL: {"model": "", "chunk_bytes": self._chunk_bytes, "dram": dram}},
        }


def _ghost_rate(chunks: int) -> float:
    """The ghosts' own rate for pools that are tiny, or so large that it would be lower."""
    return 1.0 if rate_of(chunks) == 1 else min(GHOST_RATE, 4 * rate_of(chunks))


def conduct(replay: "Replay", policy: Policy | None = None) -> tuple[Agent, "Tally"]:
    """The run ``tuned``: the agent at its end, and what became of the requests."""
    start = replay.split(START)
    agent = Agent(replay, policy or DEFAULT_POLICY, start)
    return agent, replay.play(start, "rule", agent)


def tuned(replay: "Replay", policy: Policy | None = None) -> dict[str, Any]:
    """The run ``tuned``, as ``tiertune replay --json`` tells it, with what was decided and why."""
    agent, tally = conduct(replay, policy)
    rolled_back = sum(change.state is State.ROLLED_BACK for change in agent.changes)
    report = replay.report(tally, split=agent.split, decisions=len(agent.changes), rollbacks=rolled_back)
    answers = [{"tuner": tuner, "at_s": at_s, "reason": reason} for tuner, (at_s, reason) in agent.answers.items()]
    changes = [change.document() for change in agent.changes]
    return {**report, "changes": changes, "answers": answers, "incidents": agent.incidents}


def _at_period(rule: Rule, period_s: float) -> Rule:
    """The same rules with all tuners at the scenario's period."""
    tuners = {
        name: settings.model_copy(update={"period": period_s})
        for name, settings in ((name, getattr(rule.tuners, name)) for name in type(rule.tuners).model_fields)
    }
    return rule.model_copy(update={"tuners": rule.tuners.model_copy(update=tuners)})
