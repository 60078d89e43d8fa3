"""Prefix hits of one cache under the eviction tuner, and with what the ghosts pick, against each algorithm alone."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.goals import Goal
from benchmarks.tuning.figures import mean
from benchmarks.tuning.jobs import Job, Row, Summary
from benchmarks.tuning.worlds import Grid, scenario, short
from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.contents import Sizes, contents
from tiertune_agent.replay.curve import batches, chunks_of, pool_hits
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.replay.traces import Trace, open_trace
from tiertune_agent.replay.tuned import DEFAULT_POLICY, Change, ReplayAgent
from tiertune_connector.eviction import CANDIDATES
from tiertune_connector.whatif.pool_ghosts import PoolGhosts

SIZES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Sizes of the cache, as shares of the unique blocks."""
SHOWN = ("best", "against_best", "against_lru", "picked_loses_points")
GOALS = {
    "eviction_against_best": Goal("at least", 0.98),
    "eviction_against_lru_worst": Goal("at least", 0.99),
    "picked_loses_points": Goal("at most", 0.1),
}


def jobs(grid: Grid) -> Iterator[Job]:
    for trace in grid.traces:
        for size in SIZES:
            yield Job(evictions, trace, {f"{short(trace)} {size:g}{grid.under}": (size, grid.policy)})


def evictions(name: str, cases: Sequence[tuple[float, Policy | None]]) -> Iterator[Row]:
    trace = open_trace(name)
    for size, policy in cases:
        exact = exact_candidates(trace, size)
        mine, changes = tuned_hits(trace, chunks_of(trace, size), policy or DEFAULT_POLICY)
        best = max(exact, key=lambda algorithm: exact[algorithm])
        yield {
            "trace": trace.name,
            "size": size,
            "chunks": chunks_of(trace, size),
            "hit_ratio": {**exact, "tuned": mine},
            "best": best,
            "against_best": mine / exact[best] if exact[best] else 1.0,
            "against_lru": mine / exact["lru"] if exact["lru"] else 1.0,
            "picked_loses_points": candidate_regret(trace, size, 0, exact),
            "switches": [(change.at_s, change.after) for change in changes],
        }


def candidate_regret(trace: Trace, size: float, seed: int, exact: Mapping[str, float]) -> float:
    """Points of hit ratio that are lost with the candidate that the ghosts of a pool of this size call best.

    ``exact``: hit ratios of the candidates, from ``exact_candidates``.
    """
    chunks = chunks_of(trace, size)
    ghosts = PoolGhosts(chunks)
    for chains, hashed, _ in batches(trace, seed):
        ghosts.requests(chains, hashed)
    counts = ghosts.counts()
    chosen = max(CANDIDATES, key=lambda name: counts[name, chunks][0])
    return 100 * (max(exact.values()) - exact[chosen])


def exact_candidates(trace: Trace, size: float) -> dict[str, float]:
    """Hit ratio of every candidate algorithm in a cache for this share of the unique blocks."""
    return {name: pool_hits(trace, name, chunks_of(trace, size)) / trace.accesses for name in CANDIDATES}


def tuned_hits(trace: Trace, chunks: int, policy: Policy) -> tuple[float, list[Change]]:
    """Hit ratio of a cache of one engine whose algorithm the tuner may change, and what it changed."""
    one = scenario("70b", dram=1.0, remote=0.0, engines=1)
    start = Sizes(dram=chunks, disk=0, remote=0)
    replay = Replay(trace, one)
    fleet = replay.fleet(start)
    agent = ReplayAgent(replay, _only_eviction(policy), start, fleet)
    found = contents(trace, one, [0] * len(trace), fleet, agent)
    return sum(len(request.tiers) for request in found) / trace.accesses, agent.changes


def _only_eviction(policy: Policy) -> Policy:
    tuners = policy.tuners
    observed = tuners.tier_size.model_copy(update={"mode": "observe"})
    return policy.model_copy(update={"tuners": tuners.model_copy(update={"tier_size": observed})})


def summary(rows: Sequence[Row]) -> Summary:
    return {
        "eviction_against_best": mean(row["against_best"] for row in rows),
        "eviction_against_lru_worst": min((row["against_lru"] for row in rows), default=None),
        "picked_loses_points": mean(row["picked_loses_points"] for row in rows),
    }
