"""Replay a trace under a virtual clock: the same contents, judged by several ways to choose what is fetched."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tiertune_agent.replay.contents import Found, Sizes, contents, route, sizes, split_sizes
from tiertune_agent.replay.engine import Estimates, Link, Speeds, prefill_cost
from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.traces import Trace
from tiertune_connector.cost import decide

RUNS = ("always", "never", "best_static", "rule", "rule_oracle", "baseline")
NOT_YET = ("best_split", "tuned")

Chooser = Callable[[Found], int]
"""How many leading chunks a request has before its prefill."""


@dataclass
class Tally:
    """What became of the requests of one run."""

    ttft_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    remote_chunks: int = 0


class Replay:
    """One trace under one scenario; runs share what does not differ between them."""

    def __init__(self, trace: Trace, scenario: Scenario) -> None:
        self.trace, self.scenario = trace, scenario
        self._prefill = prefill_cost(scenario)
        self._chunk_bytes = trace.block_tokens * scenario.model.kv_token_bytes
        rng = np.random.default_rng(scenario.seed)
        self._engines = route(trace, scenario, rng)
        span_s = float(trace.t[-1] - trace.t[0])
        self._speeds = Speeds(scenario, Link(scenario.link, scenario.events, span_s, self._chunk_bytes, rng))
        self._tallies: dict[str, Tally] = {}

    def run(self, name: str) -> dict[str, Any]:
        """The report of one of RUNS."""
        if name == "best_static":
            best = min(("always", "never"), key=lambda static: np.mean(self._tally(static).ttft_s))
            return {**self.run(best), "is": best}
        return self._report(self._tally(name), 0.5 if name == "baseline" else self._remote_share)

    def _tally(self, name: str) -> Tally:
        if name not in self._tallies:
            chooser: dict[str, Chooser] = {
                "always": always,
                "never": never,
                "rule": lambda found: self._gate(found, self._speeds.estimate(found.at_s)),
                "rule_oracle": lambda found: self._gate(found, self._speeds.truth(found.at_s)),
                "baseline": always,
            }
            self._tallies[name] = self._play(self._even if name == "baseline" else self._own, chooser[name])
        return self._tallies[name]

    @cached_property
    def _own(self) -> list[Found]:
        return self._contents(sizes(self.scenario, self.trace.unique, self._chunk_bytes))

    @cached_property
    def _even(self) -> list[Found]:
        return self._contents(split_sizes(self.scenario, self.trace.unique, self._chunk_bytes, 0.5))

    def _contents(self, capacities: Sizes) -> list[Found]:
        return contents(self.trace, self.scenario, self._engines, capacities)

    @property
    def _remote_share(self) -> float:
        tiers = self.scenario.tiers
        dram, remote = (tier.chunks(self.trace.unique, self._chunk_bytes) for tier in (tiers.dram, tiers.remote))
        return remote / (dram + remote) if remote else 0.0

    def _gate(self, found: Found, costs: Estimates) -> int:
        decision = decide(
            found.tiers,
            computed_tokens=found.computed * self.trace.block_tokens,
            prompt_tokens=found.prompt_tokens,
            chunk_tokens=self.trace.block_tokens,
            chunk_bytes=self._chunk_bytes,
            fetch=costs,
            prefill=self._prefill.seconds,
            settings={},
        )
        return decision.cut

    def _play(self, requests: Sequence[Found], choose: Chooser) -> Tally:
        tally, tokens = Tally(), self.trace.block_tokens
        for found in requests:
            cut = choose(found)
            chunks = Counter(found.tiers[:cut])
            costs = self._speeds.truth(found.at_s)
            fetch_s = sum(
                costs[tier].seconds(count, count * self._chunk_bytes) for tier, count in chunks.items() if tier != "gpu"
            )
            had = min(cut * tokens, found.prompt_tokens - 1)
            prefill_s = self._prefill.seconds(had, found.prompt_tokens)
            assert prefill_s is not None  # the model tells it
            tally.ttft_s.append(fetch_s + prefill_s)
            tally.prefill_s += prefill_s
            tally.remote_chunks += chunks["remote"]
            for tier, count in chunks.items():
                tally.hit_tokens[tier] += count * tokens
            if cut:
                tally.hit_tokens[found.tiers[cut - 1]] -= cut * tokens - had
        return tally

    def _report(self, tally: Tally, remote_share: float) -> dict[str, Any]:
        ttft = np.array(tally.ttft_s)
        settled = ttft[self.trace.t - self.trace.t[0] >= 3 * self.scenario.period_s]
        prompt_tokens = int(self.trace.input_len.sum())
        hits = {tier: tally.hit_tokens[tier] for tier in ("gpu", "dram", "disk", "remote")}
        return {
            "ttft_mean_s": float(ttft.mean()),
            "ttft_p50_s": float(np.percentile(ttft, 50)),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "ttft_mean_after_3_periods_s": float(settled.mean()) if settled.size else None,
            "prefill_gpu_s": tally.prefill_s,
            "prompt_tokens": prompt_tokens,
            "hit_tokens": hits,
            "recomputed_tokens": prompt_tokens - sum(hits.values()),
            "fetched_bytes": tally.remote_chunks * self._chunk_bytes,
            "decisions": 0,
            "rollbacks": 0,
            "split": [[0.0, remote_share]],
        }


def always(found: Found) -> int:
    """Fetch every hit."""
    return len(found.tiers)


def never(found: Found) -> int:
    """Fetch from local tiers, never from the remote one."""
    return found.tiers.index("remote") if "remote" in found.tiers else len(found.tiers)


def replay_document(
    trace: Trace, scenario: Scenario, names: Sequence[str], clock: Callable[[], float]
) -> dict[str, Any]:
    """The runs called ``names``, as ``tiertune replay --json`` writes them; ``clock`` tells seconds."""
    start = clock()
    replay = Replay(trace, scenario)
    runs = {name: replay.run(name) for name in names}
    return {
        "trace": trace.name,
        "scenario": scenario.name,
        "requests": len(trace),
        "wall_s": clock() - start,
        "runs": runs,
    }
