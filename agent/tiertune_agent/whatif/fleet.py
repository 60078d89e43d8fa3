"""What the fleet's requests would have cost with tiers of other sizes, from the samples of all stores."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from itertools import chain
from math import inf, log
from operator import itemgetter
from typing import NamedTuple

from tiertune_agent.collector.samples import Answer, SampleReader
from tiertune_agent.collector.sampling import SEED, SLACK, Handout, wanted_rate
from tiertune_agent.fields import read
from tiertune_agent.records import Prospect, Snapshot
from tiertune_agent.tuners.base import pools, served
from tiertune_agent.whatif.shapes import Grid, Split, local_tiers, median_shape, remote_bytes
from tiertune_agent.whatif.terms import KnownCosts, bytes_each
from tiertune_connector.tuning import LEFT_SHARE
from tiertune_connector.units import Clock
from tiertune_connector.whatif.chain import PREFIX_ROUTING, ChainGhosts, Costs, SampledRequest, Shape
from tiertune_connector.whatif.sampler import hashes, threshold

KEPT_SAMPLES = 32_768
"""Samples kept of each namespace, to warm the ghosts of a new grid."""
FORGOTTEN_AFTER = timedelta(days=1)
"""A namespace goes after so long without a request: each revision of weights is another one. So do stores."""
WAITED_FOR = timedelta(hours=1)
"""How long the sizes of a store that does not answer count: of many stores one is always silent."""
LEAST_CHUNKS = 4
"""Chunks that a simulated DRAM holds, unless it is simulated whole. With none it would have the hot keys' hits."""
_PACE_S = 60.0
_SHARES = log(1.25)
"""Log of the factor by which a namespace's share of the tiers must move to count as changed."""


class GhostPlan(NamedTuple):
    """What the ghosts of one namespace simulate."""

    shapes: tuple[Shape, ...]
    now: Shape
    rate: float
    chunk_bytes: int
    """Bytes of a chunk, with those of other groups of layers, divided by the namespace's share of its hosts' tiers, as
    if it had them alone."""
    remote_chunk_bytes: int
    """The same for the remote."""

    def sampled(self, seen: SampledRequest, rate: float) -> SampledRequest:
        """What is simulated of what stores sampled at ``rate``, which another namespace may need."""
        if self.rate == 1:  # it needs no hot ones, another one may
            return seen._replace(samples=[sample._replace(hot=False) for sample in seen.samples])
        if rate == self.rate:
            return seen
        below = threshold(self.rate)
        low = (hashes([sample.key for sample in seen.samples], SEED) < below).tolist()
        kept = [sample for sample, is_low in zip(seen.samples, low, strict=True) if is_low or sample.hot]
        return seen._replace(samples=kept)

    def tells(self, shape: Shape) -> bool:
        """Whether its DRAM is simulated with so many chunks that its hits are not those of any size."""
        return self.rate == 1 or not shape.dram or shape.dram * self.rate >= LEAST_CHUNKS * self.chunk_bytes


@dataclass
class _Namespace:
    plan: GhostPlan
    ghosts: ChainGhosts
    since_s: float
    """When the last prospect was told, in steady seconds; below, all lookups since then, sampled or not."""
    asked: datetime
    """When the last requests came."""
    wanted: float = 1.0
    """The rate at which it should be simulated, also while its engines are away."""
    requests: int = 0
    chunks: int = 0
    log: deque[tuple[SampledRequest, Costs]] = field(default_factory=deque)
    logged: int = 0

    def play(self, seen: SampledRequest, costs: Costs, *, told: bool = False) -> None:
        """Play a request; ``told``: without a bill, as a prospect may have counted it already."""
        self.ghosts.request(seen, costs, billed=not told)
        self.log.append((seen, costs))
        self.logged += len(seen.samples)
        while self.logged > KEPT_SAMPLES:
            self.logged -= len(self.log.popleft()[0].samples)

    def came(self, grown: Mapping[str, int], at: datetime) -> None:
        """Count more lookups, up to ``at``."""
        self.asked = at if grown["requests"] else self.asked
        self.requests += grown["requests"]
        self.chunks += grown["chunks"]

    def forget(self, now_s: float) -> None:
        """Leave everything up to now out of prospects."""
        self.since_s, self.requests, self.chunks = now_s, 0, 0
        self.ghosts.take()

    def replan(self, plan: GhostPlan) -> None:
        """Simulate another plan, warmed with recent requests if they were sampled alike."""
        kept = list(self.log) if plan.rate == self.plan.rate else []
        self.plan, self.ghosts = plan, _ghosts(plan)
        self.log.clear()
        self.logged = 0
        for seen, costs in kept:
            self.play(seen, costs, told=True)


class Pace:
    """Chunks that the fleet looks up per second."""

    def __init__(self) -> None:
        self.per_s: float | None = None
        """None: not known yet."""
        self._chunks = 0
        self._since: datetime | None = None

    def add(self, chunks: int, at: datetime) -> None:
        """Add chunks looked up until ``at``; a burst of a few seconds says nothing."""
        if self._since is None:
            self._since = at
            return
        self._chunks += chunks
        seconds = (at - self._since).total_seconds()
        if seconds >= _PACE_S:
            self.per_s, self._chunks, self._since = self._chunks / seconds, 0, at


class FleetWhatif:
    """Joins the samples of all stores, plays them in miniature fleets, and reports what they cost there."""

    def __init__(self, reader: SampleReader, handout: Handout, steady_s: Clock) -> None:
        """``steady_s`` counts seconds by a clock that nobody sets."""
        self._steady_s = steady_s
        self._now_s = steady_s()
        """When the last round was."""
        self._reader = reader
        self._handout = handout
        self._known = KnownCosts()
        self._grid = Grid()
        self._lately: dict[str, Snapshot] = {}
        """Stores as they last answered."""
        self._remote: int | None = None
        """The remote's size in the last round."""
        self._namespaces: dict[str, _Namespace] = {}
        self._pace = Pace()
        self._resumed = True
        """Whether the next round reports nothing: another agent may have reported on what came before it."""

    def resume(self) -> None:
        """Play what came meanwhile without reporting it, so that the miniature fleets hold what the real one does."""
        self._resumed = True

    def round(
        self,
        fleet: Sequence[Snapshot],
        at: datetime,
        *,
        every_s: float,
        managed: bool = False,
        split: Split | None = None,
    ) -> list[Prospect]:
        """Read what is new; returns a prospect for each namespace whose last one is ``every_s`` seconds old.

        Other sizes of the remote are simulated if it is ``managed``; splits, if it shares a budget with DRAM.
        """
        if not fleet:
            return []
        self._learn(fleet, at)
        hosts = self._waited_for(fleet, at)
        answers = self._reader.read({snapshot.store: snapshot.url for snapshot in fleet})
        self._remote = remote_bytes(fleet, self._remote)
        now = median_shape(hosts, self._remote)
        wanted = {name: one.wanted for name, one in self._namespaces.items()} | _wanted(fleet, now)
        self._hand_out(answers, at, wanted)
        since_s, now_s = self._now_s, self._steady_s()
        self._now_s = now_s
        agreeing = [answer for answer in answers if self._handout.agrees(answer)]
        shapes = tuple(self._grid.around(now, local_tiers(hosts, now) + ("remote",) * managed, split))
        for namespace in sorted({digest for answer in agreeing for digest in answer.header.namespaces}):
            self._plan(namespace, fleet, shapes, now=now, at=at, since_s=since_s, wanted=wanted.get(namespace, 1.0))
        began_s = now_s - max(read(snapshot.status, "uptime_s") or inf for snapshot in fleet)
        if began_s > since_s:  # all did since the last round; while they were away, none had a size to pay rent for
            for known in self._namespaces.values():
                known.forget(began_s)
        self._count(agreeing, at)
        self._play(agreeing, fleet)
        self._namespaces = {name: one for name, one in self._namespaces.items() if at - one.asked < FORGOTTEN_AFTER}
        if self._resumed:
            self._resumed = False
            for known in self._namespaces.values():
                known.forget(now_s)
        return [told for name in self._namespaces if (told := self._prospect(name, at, now_s, every_s))]

    def _waited_for(self, fleet: Sequence[Snapshot], at: datetime) -> list[Snapshot]:
        """Stores that answered lately, as they last did: one that misses a round changes no sizes."""
        lately = {store: one for store, one in self._lately.items() if at - one.at < WAITED_FOR}
        self._lately = lately | {one.store: replace(one, windows=(), stages=(), writes=None) for one in fleet}
        return list(self._lately.values())

    def _learn(self, fleet: Sequence[Snapshot], at: datetime) -> None:
        """Take the costs that stores report; forget those of stores and namespaces long gone."""
        for snapshot in fleet:
            self._known.hear(snapshot)
        if gone := self._known.forget(at - FORGOTTEN_AFTER):
            for known in self._namespaces.values():
                known.ghosts.forget(gone)

    def _hand_out(self, answers: Sequence[Answer], at: datetime, wanted: Mapping[str, float]) -> None:
        self._pace.add(sum(grown["chunks"] for answer in answers for grown in answer.grown.values()), at)
        rates = list(wanted.values()) or [1.0]
        self._handout.round(answers, at, wanted=max(rates), least=min(rates), chunks_per_s=self._pace.per_s)

    def _plan(
        self,
        namespace: str,
        fleet: Sequence[Snapshot],
        shapes: tuple[Shape, ...],
        *,
        now: Shape,
        at: datetime,
        since_s: float,
        wanted: float,
    ) -> None:
        """Set up the namespace's ghosts, or replace them if they no longer simulate what there is."""
        chunk_bytes = _chunk_bytes(namespace, fleet)
        if not chunk_bytes:
            return
        sizes = (max(1, round(chunk_bytes / share)) for share in _shares(namespace, fleet))
        known = self._namespaces.get(namespace)
        rate = self._handout.current.rate
        if rate >= SLACK * wanted:  # another namespace needs more
            before = known.plan.rate if known else rate
            rate = before if 1 / SLACK < wanted / before < SLACK else wanted
        plan = GhostPlan(shapes, now, rate, *sizes)
        if known is None:
            known = self._namespaces[namespace] = _Namespace(plan, _ghosts(plan), since_s, at)
        elif _differs(known.plan, plan):
            known.replan(plan)
        known.wanted = wanted

    def _count(self, answers: Sequence[Answer], at: datetime) -> None:
        """Count all lookups since the last answers."""
        for digest, grown in chain.from_iterable(answer.grown.items() for answer in answers):
            if digest in self._namespaces:  # it may have come after the store told its state
                self._namespaces[digest].came(grown, at)

    def _play(self, answers: Sequence[Answer], fleet: Sequence[Snapshot]) -> None:
        """Play all stores' requests in order of arrival. An earlier agent may have reported a store's first ones."""
        stores = {snapshot.store: snapshot for snapshot in fleet}
        came = chain.from_iterable(answer.requests for answer in answers)
        first = {answer.store for answer in answers if not answer.grown}
        costs = cache(lambda store, namespace: self._known.costs(stores[store], namespace))
        rate = self._handout.current.rate
        for _, namespace, seen in sorted(came, key=itemgetter(0), reverse=True):
            known, cost = self._namespaces.get(namespace), costs(seen.host, namespace)
            if known is not None and cost is not None:  # else the cost of prefilling is not known yet
                known.play(known.plan.sampled(seen, rate), cost, told=seen.host in first)

    def _prospect(self, namespace: str, at: datetime, now_s: float, every_s: float) -> Prospect | None:
        known = self._namespaces[namespace]
        requests, seconds = known.requests, now_s - known.since_s
        if seconds < every_s or not requests:
            return None
        bill = known.ghosts.take()
        if not bill.chunks:
            return None
        # Ratio estimate: the samples give the cost of a chunk, the totals how many chunks a request has.
        scale, plan = known.chunks / requests / bill.chunks, known.plan
        known.forget(now_s)
        costs = {
            name: scale * seconds_
            for name, seconds_ in bill.seconds.items()
            if plan.tells(plan.now) and plan.tells(Shape.parse(name.removesuffix(PREFIX_ROUTING)))
        }
        return Prospect(namespace, at - timedelta(seconds=seconds), seconds, requests, costs)


def _ghosts(plan: GhostPlan) -> ChainGhosts:
    return ChainGhosts(
        plan.shapes,
        rate=plan.rate,
        chunk_bytes=plan.chunk_bytes,
        remote_chunk_bytes=plan.remote_chunk_bytes,
        landing=1 - 1 / LEFT_SHARE,
        prefix_routed=(plan.now,) if plan.now in plan.shapes else (),
    )


def _wanted(fleet: Sequence[Snapshot], now: Shape) -> dict[str, float]:
    """The rates at which the namespaces of present engines are simulated."""
    nbytes = len(fleet) * (now.dram + now.disk) + now.remote
    rates = {}
    for namespace in {digest for snapshot in fleet for digest in served(snapshot.status)}:
        if size := _chunk_bytes(namespace, fleet):
            near, _ = _shares(namespace, fleet)
            rates[namespace] = wanted_rate(nbytes / size, near * now.dram / size)
    return rates


def _chunk_bytes(namespace: str, fleet: Sequence[Snapshot]) -> int:
    """Bytes of its chunks; 0: not told yet."""
    told = (read(snapshot.status, f"pools.{namespace}") for snapshot in fleet)
    return max(map(bytes_each, filter(None, told)), default=0)  # one that has just begun knows one group


def _shares(namespace: str, fleet: Sequence[Snapshot]) -> tuple[float, float]:
    """Shares that the namespace's pools have of the DRAM of hosts that have them, and of all hosts.

    1 if it is the only one, or nothing is known.
    """
    mine = near = every = 0
    for snapshot in fleet:
        told = pools(snapshot.status)
        rooms = {digest: int(read(pool, "dram.effective.capacity_bytes") or 0) for digest, pool in told.items()}
        own, room = rooms.get(namespace, 0), sum(rooms.values())
        mine += own
        near += room if own else 0
        every += room
    return (mine / near, mine / every) if mine else (1.0, 1.0)


def _differs(old: GhostPlan, new: GhostPlan) -> bool:
    """Whether ghosts of one plan say nothing about the other."""
    same = (old.shapes, old.rate) == (new.shapes, new.rate)
    ratios = old.chunk_bytes / new.chunk_bytes, old.remote_chunk_bytes / new.remote_chunk_bytes
    return not same or any(abs(log(ratio)) > _SHARES for ratio in ratios)
