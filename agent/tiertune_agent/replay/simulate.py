"""Replay a trace under a virtual clock: the same requests, under several ways to choose what is fetched and kept."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from tiertune_agent.fields import JsonDict
from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.contents import FleetPools, ReplayedRequest, Sizes, arrivals, contents, route
from tiertune_agent.replay.engine import local_costs, prefill_cost
from tiertune_agent.replay.link import Link
from tiertune_agent.replay.play import Play, Tally
from tiertune_agent.replay.scenario import Scenario, Sized
from tiertune_agent.replay.traces import Trace
from tiertune_agent.replay.tuned import ReplayAgent, tuned
from tiertune_agent.terminal.progress import Step, unseen
from tiertune_agent.whatif.shapes import SHARES
from tiertune_connector.tuning import TIERS
from tiertune_connector.units import Clock

RUNS = ("always", "never", "best_static", "rule", "rule_oracle", "baseline", "best_split", "tuned")
QUEUED_RUNS = ("rule_blind",)
"""Runs that exist only with queueing."""


class Replay:
    """One trace under one scenario; runs share what does not differ between them."""

    def __init__(
        self, trace: Trace, scenario: Scenario, kept: dict[Sizes, list[ReplayedRequest]] | None = None
    ) -> None:
        """Replays of one trace may share ``kept`` if their scenarios differ only in model, GPU and link."""
        self.trace, self.scenario = trace, scenario
        self.chunk_tokens = trace.block_tokens
        self.chunk_bytes = trace.block_tokens * scenario.model.kv_token_bytes
        self.prefill = prefill_cost(scenario)
        self.local = local_costs(scenario)
        rng = np.random.default_rng(scenario.seed)
        self.times = arrivals(trace, scenario)
        self._engines = route(trace, scenario, rng)
        self.link = Link(scenario.link, scenario.events, self.times[-1], rng)
        self._keep_all = kept is not None
        self._kept: dict[Sizes, list[ReplayedRequest]] = {} if kept is None else kept
        self._tallies: dict[tuple[Sizes, str], Tally] = {}

    @cached_property
    def own(self) -> Sizes:
        """Sizes of the scenario's own tiers."""
        tiers = self.scenario.tiers
        return Sizes(
            dram=max(1, int(self._chunks("dram") / self.scenario.nodes)),
            disk=self._disk,
            remote=int(self._chunks("remote")),
            dram_eviction=tiers.dram.eviction,
            disk_eviction=tiers.disk.eviction,
            remote_eviction=tiers.remote.eviction,
        )

    def split(self, share: float) -> Sizes:
        """The same total of DRAM and remote with ``share`` of it remote, all LRU."""
        total, nodes = int(self._chunks("dram") + self._chunks("remote")), self.scenario.nodes
        return Sizes(dram=max(1, int(total * (1 - share) / nodes)), disk=self._disk, remote=int(total * share))

    def run(self, name: str) -> JsonDict:
        """Report a run of the scenario's, other than ``tuned``."""
        if name == "best_static":
            best = min(("always", "never"), key=lambda static: np.mean(self._tally(self.own, static).ttft_s))
            return {**self.run(best), "is": best}
        if name == "best_split":
            return self._best_split()
        if name == "baseline":
            return self.report(self._tally(self.split(0.5), "always"), split=[[0.0, 0.5]])
        dram, remote = self._chunks("dram"), self._chunks("remote")
        share = remote / (dram + remote) if remote else 0.0
        return self.report(self._tally(self.own, name), split=[[0.0, share]])

    def fleet(self, capacities: Sizes) -> FleetPools:
        """Empty pools of these sizes."""
        return FleetPools(self.scenario, capacities, self.chunk_tokens)

    def play(self, play: Play, fleet: FleetPools, conductor: ReplayAgent | None = None) -> Tally:
        """Play a run to its end; ``conductor`` sees every request before it is looked up, and may change the fleet."""
        engines: Iterable[int] = self._engines if self._engines is not None else play.idlest(self.times)
        return play.all(contents(self.trace, self.scenario, engines, fleet, conductor))

    def report(self, tally: Tally, *, split: list[list[float]], decisions: int = 0, rollbacks: int = 0) -> JsonDict:
        """A run as ``tiertune replay --json`` writes it; ``split`` lists times and the remote's share since."""
        ttft = np.array(tally.ttft_s)
        settled = ttft[np.array(self.times) >= 3 * self.scenario.period_s]
        prompt_tokens = int(self.trace.input_len.sum())
        hits = {tier: tally.hit_tokens[tier] for tier in ("gpu", *TIERS)}
        return {
            "ttft_mean_s": float(ttft.mean()),
            "ttft_p50_s": float(np.percentile(ttft, 50)),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "ttft_mean_after_3_periods_s": float(settled.mean()) if settled.size else None,
            "prefill_gpu_s": tally.prefill_s,
            "prompt_tokens": prompt_tokens,
            "hit_tokens": hits,
            "recomputed_tokens": prompt_tokens - sum(hits.values()),
            "fetched_bytes": tally.remote_chunks * self.chunk_bytes,
            "decisions": decisions,
            "rollbacks": rollbacks,
            "split": split,
        }

    @property
    def _disk(self) -> int:
        """Chunks per node."""
        return int(self._chunks("disk") / self.scenario.nodes)

    def _chunks(self, tier: str) -> float:
        """Chunks of a tier of the whole fleet, not rounded."""
        sized: Sized = getattr(self.scenario.tiers, tier)
        return sized.chunks(self.trace.unique, self.chunk_bytes)

    def _best_split(self) -> JsonDict:
        """The gate's run at its best split by mean TTFT; on ties, the one with the least remote."""
        best = min(SHARES, key=lambda share: np.mean(self._tally(self.split(share), "rule").ttft_s))
        report = self.report(self._tally(self.split(best), "rule"), split=[[0.0, best]])
        return {**report, "is": f"{best:g} remote"}

    def _tally(self, capacities: Sizes, chooser: str) -> Tally:
        if (capacities, chooser) not in self._tallies:
            self._tallies[capacities, chooser] = self._played(capacities, chooser)
        return self._tallies[capacities, chooser]

    def _played(self, capacities: Sizes, chooser: str) -> Tally:
        """Play a run; contents that several runs need are kept, if the routing does not depend on the run."""
        keeps = self._keep_all or capacities in (self.own, self.split(0.5))
        if self._engines is None or not keeps:
            return self.play(Play(self, chooser), self.fleet(capacities))
        if capacities not in self._kept:
            self._kept[capacities] = list(contents(self.trace, self.scenario, self._engines, self.fleet(capacities)))
        return Play(self, chooser).all(self._kept[capacities])


def runs_of(scenario: Scenario) -> tuple[str, ...]:
    """Names of all runs that the scenario can have."""
    return (*RUNS, *QUEUED_RUNS) if scenario.queueing else RUNS


def replay_document(
    trace: Trace,
    scenario: Scenario,
    names: Sequence[str],
    clock: Clock,
    policy: Policy | None = None,
    *,
    step: Step = unseen,
) -> JsonDict:
    """The runs called ``names``, as ``tiertune replay --json`` writes them; ``clock`` returns seconds.

    The run ``tuned`` follows ``policy``; without one, a policy that acts as quickly as the evidence allows. ``step`` is
    called after each run.
    """
    start = clock()
    replay, runs = Replay(trace, scenario), {}
    for name in names:
        runs[name] = tuned(replay, policy) if name == "tuned" else replay.run(name)
        step()
    return {
        "trace": trace.name,
        "scenario": scenario.name,
        "requests": len(trace),
        "wall_s": clock() - start,
        "runs": runs,
    }
