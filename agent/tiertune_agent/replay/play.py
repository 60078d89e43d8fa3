"""One run of a replay: what each request fetches, how long that takes, and which requests wait for others.

Without queueing, a request takes the time of its own fetches and prefill. With queueing, one link transfers the remote
chunks of all requests one after another, local chunks load at their own speed, and an engine prefills one request at a
time, in the order in which they are ready; the time to the first token then ends with that prefill. A transfer has the
speed that the link has when it begins. Routing by load uses the engines' queues even without queueing, though no
request waits in them then. While the link is down, chunks in the remote tier count as missing, and a transfer whose
turn comes then fails at once: its chunks are recomputed. Tiers hold the same with and without outages: writes catch up.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tiertune_agent.replay.contents import ReplayedRequest
from tiertune_agent.replay.link import Beliefs
from tiertune_connector.cost import ALONE, FetchEstimate, GateDecision, GateSettings, Others, decide
from tiertune_connector.protocol.messages import TierReport
from tiertune_connector.protocol.reporting import tier_reports

if TYPE_CHECKING:
    from tiertune_agent.replay.simulate import Replay

CHOOSERS = ("always", "never", "rule", "rule_oracle", "rule_blind")
"""Ways to choose what is fetched: every hit; nothing remote; the gate with estimated costs; the gate with the true
bandwidth; the gate with estimated costs, but blind to the queues."""

Report = Callable[[float, Sequence[TierReport]], None]
"""Called with the time at which a gate's outcome is known, which may lie ahead, and its decision and outcome for every
tier that offered chunks."""


@dataclass
class Tally:
    """What became of the requests of one run."""

    ttft_s: list[float] = field(default_factory=list)
    """By request, in the order of arrival; with queueing, complete only once all requests have been played."""
    prefill_s: float = 0.0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    remote_chunks: int = 0


class PrefillQueue:
    """Prefills of one engine, one at a time, in the order in which they are ready: a fetch holds up no other request.

    Put requests in the order of arrival, each after a call of ``until`` with its arrival time; it may be ready later.
    A prefill that starts by that time was ready by then, so no later arrival could have gone first.
    """

    def __init__(self) -> None:
        self._free_s = 0.0
        self._waiting: list[tuple[float, int, float]] = []  # ready, request, seconds; a heap
        self._waiting_s = 0.0

    def put(self, request: int, ready_s: float, seconds: float) -> None:
        """Add a request that can be prefilled from ``ready_s`` on; later requests have larger numbers."""
        heappush(self._waiting, (ready_s, request, seconds))
        self._waiting_s += seconds

    def until(self, at_s: float) -> Iterator[tuple[int, float]]:
        """Start all prefills whose turn comes by ``at_s``; yields each and when it will end, which may lie ahead."""
        while self._waiting and max(self._free_s, self._waiting[0][0]) <= at_s:
            ready_s, request, seconds = heappop(self._waiting)
            self._free_s = max(self._free_s, ready_s) + seconds
            self._waiting_s = self._waiting_s - seconds if self._waiting else 0.0
            yield request, self._free_s

    def requests(self, at_s: float) -> int:
        """How many requests are not done at ``at_s``."""
        return len(self._waiting) + (self._free_s > at_s)

    def backlog_s(self, at_s: float) -> float:
        """Seconds of prefill that are not done at ``at_s``, including those of requests that still fetch."""
        return max(0.0, self._free_s - at_s) + self._waiting_s


class LinkQueue:
    """One transfer after another, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque()

    def transfers(self, at_s: float) -> int:
        """How many transfers are not done at ``at_s``; times must not decrease from call to call."""
        while self._ends and self._ends[0] <= at_s:
            self._ends.popleft()
        return len(self._ends)

    def start_s(self, at_s: float) -> float:
        """When a transfer asked for at ``at_s`` begins; times as of ``transfers``."""
        return self._ends[-1] if self.transfers(at_s) else at_s

    def add(self, end_s: float) -> None:
        """Add a transfer that began at ``start_s`` of when it was asked for, and ends at ``end_s``."""
        self._ends.append(end_s)


class Play:
    """A run in progress."""

    def __init__(
        self,
        replay: "Replay",
        chooser: str,
        settings: Mapping[str, GateSettings] | None = None,
        report: Report | None = None,
    ) -> None:
        """``settings`` bound the gate by tier and are read anew for every request; ``report`` gets what it did."""
        if chooser not in CHOOSERS:
            raise ValueError(f"there is no way to choose {chooser!r}: use one of {', '.join(CHOOSERS)}")
        self.tally = Tally()
        self._replay, self._chooser = replay, chooser
        self._settings = settings or {}
        self._report = report
        scenario = replay.scenario
        self._beliefs = [Beliefs(replay.link, replay.chunk_bytes) for _ in range(scenario.nodes)]
        self._queueing = scenario.queueing
        queues = scenario.queueing or scenario.routing == "least_loaded"
        self._engines = [PrefillQueue() for _ in range(scenario.engines if queues else 0)]
        self._transfers = LinkQueue()

    def all(self, requests: Iterable[ReplayedRequest]) -> Tally:
        """Play all requests to their end."""
        for found in requests:
            self.request(found)
        for engine in self._engines:
            self._end(engine, float("inf"))
        return self.tally

    def idlest(self, times: Iterable[float]) -> Iterator[int]:
        """At each of the times, the engine with the smallest backlog of prefill; on ties the lowest."""
        for at_s in times:
            for queue in self._engines:
                self._end(queue, at_s)
            waiting = [queue.backlog_s(at_s) for queue in self._engines]
            yield waiting.index(min(waiting))

    def request(self, found: ReplayedRequest) -> None:
        """Play the next request; calls come in the order of arrival."""
        if self._queueing:
            self._end(self._engines[found.engine], found.at_s)
        tiers = found.tiers
        if self._replay.link.down(found.at_s):
            tiers = tiers[: _local(tiers)]
        if self._chooser in {"always", "never"}:
            cut, ready_s, _ = self._fetch(found, tiers if self._chooser == "always" else tiers[: _local(tiers)])
        else:
            decision = self._decide(found, tiers)
            cut, ready_s, seconds = self._fetch(found, tiers[: decision.cut])
            if self._report is not None and decision.candidates:
                told = tier_reports(  # what an engine's adapter would report to its store
                    decision,
                    chunk_tokens=self._replay.chunk_tokens,
                    actual_s=max(seconds.values()) if decision.fetches else None,  # each tier answers for its own part
                    seconds=seconds,
                    failure="failed" if cut < decision.cut else "",
                    used=decision.cut_to(cut, range(cut), tiers),
                )
                self._report(found.at_s + ready_s, told)
        self._prefill(found, cut, ready_s)
        self._count(found, tiers[:cut])

    def _decide(self, found: ReplayedRequest, tiers: Sequence[str]) -> GateDecision:
        """How many leading chunks the request has before its prefill."""
        backlog_s, link_s, others = self._queues(found)
        return decide(
            tiers,
            computed_tokens=tiers.count("gpu") * self._replay.chunk_tokens,
            prompt_tokens=found.prompt_tokens,
            chunk_tokens=self._replay.chunk_tokens,
            chunk_bytes=self._replay.chunk_bytes,
            fetch={**self._replay.local, "remote": self._remote(found, link_s)},
            prefill=self._replay.prefill.each_s,
            settings=self._settings,
            backlog_s=backlog_s,
            others=others,
        )

    def _queues(self, found: ReplayedRequest) -> tuple[float, float, Others]:
        """Seconds of prefill on its engine, seconds until the link is free, and others, as the gate sees them."""
        if not self._queueing or self._chooser == "rule_blind":
            return 0.0, 0.0, ALONE
        engine, link, at_s = self._engines[found.engine], self._transfers, found.at_s
        return engine.backlog_s(at_s), link.start_s(at_s) - at_s, Others(engine.requests(at_s), link.transfers(at_s))

    def _remote(self, found: ReplayedRequest, queue_s: float) -> FetchEstimate:
        """The cost that the gate assumes for a fetch over the link."""
        if self._chooser != "rule_oracle":
            return self._beliefs[self._replay.scenario.node(found.engine)].estimate(found.at_s, queue_s)
        return replace(self._replay.link.truth(found.at_s), queue_s=queue_s)

    def _fetch(self, found: ReplayedRequest, tiers: Sequence[str]) -> tuple[int, float, dict[str, float]]:
        """Load the chunks; returns how many leading ones are there then, seconds since arrival, each tier's part."""
        remote, chunk_bytes, link = tiers.count("remote"), self._replay.chunk_bytes, self._replay.link
        fetch_s = remote_s = 0.0
        if remote:
            start_s = self._transfers.start_s(found.at_s) if self._queueing else found.at_s
            took_s = 0.0 if link.down(start_s) else link.truth(start_s).seconds(remote, remote * chunk_bytes)
            if self._queueing:
                self._transfers.add(start_s + took_s)
            fetch_s = remote_s = start_s - found.at_s + took_s
            if took_s:
                self._beliefs[self._replay.scenario.node(found.engine)].observed(start_s, remote, took_s)
                self.tally.remote_chunks += remote
            else:  # the link is down by then
                tiers = tiers[: _local(tiers)]
        seconds = {"remote": remote_s}
        for tier, cost in self._replay.local.items():
            chunks = tiers.count(tier)
            seconds[tier] = cost.seconds(chunks, chunks * chunk_bytes)
            fetch_s += seconds[tier]
        return len(tiers), fetch_s, seconds

    def _prefill(self, found: ReplayedRequest, cut: int, fetch_s: float) -> None:
        """Compute the rest of the prompt, ``fetch_s`` after the arrival at the earliest."""
        prefill_s = self._replay.prefill.seconds(self._had(found, cut), found.prompt_tokens)
        assert prefill_s is not None  # the model tells it
        self.tally.prefill_s += prefill_s
        if self._engines:
            self._engines[found.engine].put(len(self.tally.ttft_s), found.at_s + fetch_s, prefill_s)
        self.tally.ttft_s.append(-found.at_s if self._queueing else fetch_s + prefill_s)

    def _end(self, queue: PrefillQueue, at_s: float) -> None:
        for request, ended_s in queue.until(at_s):
            if self._queueing:
                self.tally.ttft_s[request] += ended_s

    def _count(self, found: ReplayedRequest, tiers: Sequence[str]) -> None:
        tokens, hits = self._replay.chunk_tokens, self.tally.hit_tokens
        for tier, count in Counter(tiers).items():
            hits[tier] += count * tokens
        if tiers:
            hits[tiers[-1]] -= len(tiers) * tokens - self._had(found, len(tiers))

    def _had(self, found: ReplayedRequest, cut: int) -> int:
        """Prompt tokens of the first ``cut`` chunks; at least the last token is always computed."""
        return min(cut * self._replay.chunk_tokens, found.prompt_tokens - 1)


def _local(tiers: Sequence[str]) -> int:
    """Leading chunks before the first remote one."""
    return tiers.index("remote") if "remote" in tiers else len(tiers)
