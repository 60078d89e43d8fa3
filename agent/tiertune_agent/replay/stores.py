"""What the stores of a fleet tell its agent in a replay: windows, ghosts, prospects and costs, from the requests.

All nodes are alike here, so the fleet appears as one store.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from math import inf
from typing import TYPE_CHECKING

from tiertune_agent.records import Prospect, Window, covered_s, series, total
from tiertune_agent.replay.contents import Sizes
from tiertune_agent.replay.link import Beliefs
from tiertune_agent.tuners.base import TypicalCandidate
from tiertune_agent.tuners.remote_fetch import Candidates, candidates, typical_candidate
from tiertune_agent.tuners.tier_size import horizon
from tiertune_connector.catalogue import BY_NAME
from tiertune_connector.cost import GateSettings
from tiertune_connector.counters import Counters
from tiertune_connector.protocol.messages import TierReport
from tiertune_connector.store.accounts import count_gate
from tiertune_connector.whatif.chain import ChainGhosts, Costs, SampledRequest, Shape
from tiertune_connector.whatif.pool_ghosts import MOST_CHUNKS, PoolGhosts, halved
from tiertune_connector.whatif.sampler import Frequent, Sampler, mix

if TYPE_CHECKING:
    from tiertune_agent.replay.simulate import Replay

HOT = 64
"""Keys of the hot set."""
SAMPLED_CHUNKS = 1024
"""Most chunks of DRAM and remote in a miniature fleet, if ``RATES`` allow it."""
RATES = (0.01, 1.0)
"""Least and largest share of keys sampled for the fleet's chains."""
WINDOWS = 20
"""Windows per period."""
KEPT_WINDOWS = 200
"""Windows of the pool's ghosts: ten periods."""
KEPT_REMOTE = 1200
"""Windows of the remote tier; tuners read the last of them, verdicts all."""
GHOST_RATE = 0.25
"""Share of keys that pools' ghosts see. A busy store affords less, but a trace has only a hundred chunks a second."""
WHOLE_BELOW = 128
"""Ghosts of a pool with fewer chunks see all keys: a sample of a tiny pool tells little."""
WATCHED_NODES = 4
"""At most this many nodes' pools have ghosts; the others are like them."""
STORE, POOL = "", "replay"
"""Names of the only store, which a policy's rules for some stores do not fit, and of the only namespace."""
_CAPACITY = "tier_capacity_bytes"
BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
"""Date of the first request, for tuners that need dates."""


class Stores:
    """Takes every request and what its gate did, and makes windows and prospects of them."""

    def __init__(self, replay: "Replay", shapes: Sequence[Shape], start: Sizes, margin: float) -> None:
        """``shapes`` are simulated, the fleet begins with ``start``; ``margin`` is the gates'."""
        scenario = replay.scenario
        self._period_s, self.window_s = scenario.period_s, scenario.period_s / WINDOWS
        self._chunk_bytes, self._replay = replay.chunk_bytes, replay
        self._chains, self._offsets = replay.trace.chains, replay.trace.offsets.tolist()
        self._beliefs = Beliefs(replay.link, replay.chunk_bytes)
        self.costs = Costs(cache(partial(_prefill_s, replay)), {}, margin)
        """What requests pay at the time, by the estimates of a store."""
        total = (start.dram * scenario.nodes + start.remote) * replay.chunk_bytes
        rate = min(RATES[1], max(RATES[0], SAMPLED_CHUNKS * replay.chunk_bytes / max(1, total)))
        self._hashes = mix(replay.trace.ids.astype("uint64"), scenario.seed)
        self._sampler, self._frequent = Sampler(rate), Frequent()
        self._ghosts = ChainGhosts(shapes, rate=rate, chunk_bytes=replay.chunk_bytes)
        watched = range(0, scenario.nodes, -(-scenario.nodes // WATCHED_NODES))
        self._chunks = start.dram
        self._pools = {node: PoolGhosts(start.dram, rate=_ghost_rate(start.dram)) for node in watched}
        self._counted: Mapping[str, float] = {}
        self.prospects: list[Prospect] = []
        self.windows: list[Window] = []
        """Windows with the pool's ghosts, oldest first."""
        self.remote = deque[Window](maxlen=KEPT_REMOTE)
        """Windows of the remote tier, oldest first."""
        self._candidates = list[Candidates]()
        self.news = False
        """Whether the remote's windows have shown anything new since this was last reset."""
        self._reports: list[tuple[float, TierReport]] = []
        self._learn_costs(0.0)

    # -- input

    def heed(self, gate: GateSettings) -> None:
        """What the remote's gate refuses from now on saves nothing in the simulations, either."""
        self.costs.margin = gate.margin if gate.fetch_on else inf
        self.costs.floor = gate.min_fetch_tokens / self._replay.chunk_tokens

    def request(self, index: int, node: int) -> None:
        """Request ``index`` is looked up on the node."""
        chain = self._chains[index]
        hashed = self._hashes[self._offsets[index] : self._offsets[index + 1]]
        self._frequent.requests([chain])
        (picks,) = self._sampler.pick([chain], hashed)
        self._ghosts.request(SampledRequest(node, len(chain), picks), self.costs)
        pool = self._pools.get(node)
        if pool is not None:
            pool.requests([chain], hashed)

    def report(self, at_s: float, reports: Sequence[TierReport]) -> None:
        """Take what a gate did, and its outcome, known at ``at_s``."""
        self._reports += [(at_s, report) for report in reports if report.tier == "remote"]

    def resize(self, chunks: int) -> None:
        """Every pool holds at most ``chunks`` from now on."""
        self._chunks = chunks
        for pool in self._pools.values():
            pool.resize(chunks)

    # -- output

    def typical(self) -> TypicalCandidate | None:
        """The typical candidate of the last windows that had requests with chunks in the remote tier."""
        return typical_candidate(self._candidates)

    def fill_s(self, chunks: int, algorithm: str) -> float | None:
        """Seconds in which a pool of ``chunks`` fills, at the rate at which those of the present size missed lately.

        None: they missed nothing.
        """
        size = self._chunks * self._chunk_bytes
        labels = {"algorithm": algorithm, "capacity_bytes": str(size)}
        told = [window for window in self.windows if window.gauge(_CAPACITY) == size]  # others need not count at it
        missed = total(told, "whatif_tokens_total", result="miss", **labels) / len(self._pools)
        return chunks * self._replay.chunk_tokens * covered_s(told) / missed if missed else None

    def close_window(self, number: int) -> None:
        """Close window ``number`` (from 1), and renew costs, and once a period hot keys, for what follows."""
        at_s = number * self.window_s
        start = BEGIN + timedelta(seconds=at_s - self.window_s)
        bill = self._ghosts.take()
        costs = {name: seconds / bill.requests for name, seconds in bill.seconds.items()}
        if costs:
            self.prospects.append(Prospect("", start, self.window_s, bill.requests, costs))
        held = {_CAPACITY: float(self._chunks * self._chunk_bytes)}
        self.windows.append(Window(STORE, POOL, "", "", start, self.window_s, self._ghost_tokens() | held))
        if number % WINDOWS == 0:
            self._sampler = Sampler(self._sampler.rate, self._frequent.top(HOT))
        self._learn_costs(at_s)
        self._close_remote(start, at_s)
        since = start - horizon(self._period_s)
        self.prospects = [prospect for prospect in self.prospects if prospect.start >= since]
        self.windows = self.windows[-KEPT_WINDOWS:]

    def _learn_costs(self, at_s: float) -> None:
        estimates = {**self._replay.local, "remote": self._beliefs.estimate(at_s)}
        self.costs.fetch_s = {
            tier: (estimate.t0_s, estimate.per_chunk_s + self._chunk_bytes / estimate.bytes_per_s)
            for tier, estimate in estimates.items()
        }

    def _ghost_tokens(self) -> dict[str, float]:
        """``whatif_tokens_total`` of the window, over all pools watched."""
        totals = defaultdict[str, float](float)
        for pool in self._pools.values():
            for (algorithm, chunks), (hits, asked) in pool.counts().items():
                size = str(chunks * self._chunk_bytes)
                for result, count in (("hit", hits), ("miss", asked - hits)):
                    labels = (("algorithm", algorithm), ("capacity_bytes", size), ("result", result))
                    totals[series("whatif_tokens_total", labels)] += count
        before, self._counted = self._counted, totals
        grown = {name: now - before.get(name, 0.0) for name, now in totals.items()}
        tokens = self._replay.chunk_tokens
        return {name: count * tokens for name, count in grown.items() if count > 0}  # others are none

    def _close_remote(self, start: datetime, at_s: float) -> None:
        """Add a window of the remote tier. Its estimate comes from probes, not from nodes' loads."""
        ended = [report for known_s, report in self._reports if known_s <= at_s]
        self._reports = [each for each in self._reports if each[0] > at_s]
        estimate = self._beliefs.estimate(at_s)
        gauges = {
            "fetch_estimate_t0_seconds": estimate.t0_s,
            "fetch_estimate_bytes_per_second": estimate.speed(self._chunk_bytes),  # with handling, as stores tell it
            "fetch_estimate_age_seconds": estimate.age_s,
        }
        window = Window(STORE, "", "", "remote", start, self.window_s, _gated(ended, self._chunk_bytes) | gauges)
        self.remote.append(window)
        self.news = self.news or bool(ended) or estimate.age_s < self.window_s
        self._candidates = candidates(self._candidates, [window])


def _prefill_s(replay: "Replay", chunks: int) -> float:
    seconds = replay.prefill.seconds(0, chunks * replay.chunk_tokens)
    assert seconds is not None  # the model tells it
    return seconds


def _gated(reports: Sequence[TierReport], chunk_bytes: int) -> dict[str, float]:
    """What a store counts of gates that decided about its remote tier, as a window of that tier has it."""
    if not reports:
        return {}  # most windows of a sparse trace, and counters take a while to set up
    counters = Counters()
    for told in reports:
        count_gate(counters, told, chunk_bytes)
    return {
        series(name, list(zip(BY_NAME[name].labels, labels, strict=True))[1:]): cells[0]
        for name, rows in counters.tables().items()
        for labels, cells in rows.items()
        if BY_NAME[name].kind == "counter"  # no tuner reads a histogram of these
    }


def _ghost_rate(chunks: int) -> float:
    """Share of keys that a pool's ghosts see: all for a tiny pool, fewer for a large one."""
    return 1.0 if chunks < WHOLE_BELOW else halved(GHOST_RATE, chunks, 4 * MOST_CHUNKS)
