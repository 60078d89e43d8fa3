"""Regret of the sizes in force against the best fixed split in hindsight: the replay plays both on recorded traffic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from tiertune_agent.demo.world import HOSTS, Setup
from tiertune_agent.replay.contents import FleetPools, contents
from tiertune_agent.replay.engine import OVERHEAD_S
from tiertune_agent.replay.play import Play
from tiertune_agent.replay.scenario import Scenario
from tiertune_agent.replay.simulate import Replay
from tiertune_agent.replay.traces import Trace
from tiertune_agent.whatif.shapes import SHARES

Seconds = npt.NDArray[np.float64]
PROBE_S = 1.0
"""Between the probes by which the replay's gates know the link, as the stores' do."""
PARAMS = 1e9
"""Of the replay's model. Its GPU's speed is chosen so that a chunk's prefill takes as long as with the engines."""


@dataclass(frozen=True)
class Recorded:
    """The served requests, in order of arrival."""

    trace: Trace
    hosts: list[int]
    """Per request, the index of its host."""

    @property
    def turn(self) -> int:
        """Index of the first request of the last phase."""
        return self.trace.type.index(self.trace.type[-1])


@dataclass(frozen=True)
class Standing:
    """Capacities in bytes, in force from a time on."""

    at: float
    """Unix time."""
    dram: Sequence[int]
    """By host."""
    remote: int


@dataclass(frozen=True)
class Fetch:
    """What fetching from the remote cost from a time on, as the stores measured it."""

    at: float
    """Unix time."""
    first_s: float
    """Seconds before the first byte."""
    chunk_s: float
    """Seconds per chunk."""


@dataclass(frozen=True)
class Regret:
    requests: int
    """Requests that count: those after three periods."""
    ttft_s: float
    """Their mean, with the sizes that were in force."""
    by_share: Mapping[float, float]
    """Their mean by the remote's share of the budget, fixed from the start."""
    after: Mapping[float, float]
    """The same over only the requests since the traffic turned."""

    @property
    def best(self) -> float:
        """The fixed share with the lowest mean."""
        return min(self.by_share, key=lambda share: self.by_share[share])

    def to_stay(self, share: float) -> float:
        """By how much the split that is nearest to ``share`` was worse than the best, since the traffic turned."""
        stays = min(self.after, key=lambda each: abs(each - share))
        return self.after[stays] / min(self.after.values()) - 1

    @property
    def share(self) -> float:
        """Fraction by which the sizes in force were worse than the best fixed split; negative: better."""
        return self.ttft_s / self.by_share[self.best] - 1


def recorded(trace: Trace, journals: Sequence[Path]) -> Recorded:
    """The trace's first round as the players' journals (one each) have it, in order of time."""
    rows = [
        (float(at), int(row), number % len(HOSTS))
        for number, journal in enumerate(journals)
        for at, turn, row in _lines(journal)
        if turn == "0"
    ]
    rows.sort()
    times, order, hosts = (list(column) for column in zip(*rows, strict=True))
    chains = [trace.ids[trace.offsets[row] : trace.offsets[row + 1]] for row in order]
    count = len(order)
    return Recorded(
        Trace(
            name="recorded",
            block_tokens=trace.block_tokens,
            t=np.array(times),
            input_len=trace.input_len[order],
            session=np.arange(count),
            type=[trace.type[row] for row in order],
            offsets=np.concatenate([[0], np.cumsum([len(chain) for chain in chains])]),
            ids=np.concatenate(chains),
        ),
        [int(host) for host in hosts],
    )


def regret(
    traffic: Recorded, setup: Setup, stood: Sequence[Standing], *, fetches: Sequence[Fetch], period_s: float
) -> Regret:
    """``stood``: all sizes that were in force, ``fetches``: all measured costs, oldest first.

    Every split pays what fetching cost at the time: on a busy machine that is several times as much in one minute as in
    the next, and who was right to do without the remote would have been wrong by the price of a quiet moment.
    """
    replay = Replay(traffic.trace, _scenario(traffic.trace, setup, fetches, period_s))
    late = np.array(replay.times) >= 3 * period_s

    def ttft_s(fleet: FleetPools, conductor: Any = None) -> Seconds:  # noqa: ANN401 (of the replay)
        found = contents(traffic.trace, replay.scenario, traffic.hosts, fleet, conductor)
        return np.array(Play(replay, "rule").all(found).ttft_s)

    still = {share: ttft_s(replay.fleet(replay.split(share))) for share in SHARES}
    fleet = replay.fleet(replay.split(0.5))
    followed = ttft_s(fleet, _AsStood(traffic.trace, stood, setup.chunk_bytes, fleet))
    return Regret(
        requests=int(late.sum()),
        ttft_s=float(followed[late].mean()),
        by_share={share: float(each[late].mean()) for share, each in still.items()},
        after={share: float(each[traffic.turn :].mean()) for share, each in still.items()},
    )


class _AsStood:
    """Gives the replay's fleet the real sizes of each moment. Its hosts are alike, so each has the real hosts' mean."""

    def __init__(self, trace: Trace, stood: Sequence[Standing], chunk_bytes: int, fleet: FleetPools) -> None:
        self._fleet = fleet
        self._begin = float(trace.t[0])
        self._left = list(stood)
        self._chunk_bytes = chunk_bytes

    def request(self, index: int, at_s: float, engine: int) -> None:  # noqa: ARG002 (a conductor's)
        while self._left and self._left[0].at - self._begin <= at_s:
            sizes = self._left.pop(0)
            dram = sum(sizes.dram) // len(sizes.dram)
            self._fleet.resize(dram=dram // self._chunk_bytes, remote=sizes.remote // self._chunk_bytes)


def _scenario(trace: Trace, setup: Setup, fetches: Sequence[Fetch], period_s: float) -> Scenario:
    """The real fleet as a scenario: its engines' prefill, its stores' fetches, its budget (half of it remote)."""
    assert setup.prefill_step_s == OVERHEAD_S, "the replay's overhead is fixed"
    first_s, chunk_s = (median(values) for values in zip(*((one.first_s, one.chunk_s) for one in fetches), strict=True))
    budget = len(HOSTS) * setup.dram_bytes + setup.remote_bytes
    half = {"gib": budget / 2 / 2**30}
    speed = 2 * PARAMS * trace.block_tokens / setup.prefill_chunk_s
    model = {"params": PARAMS, "layers": 1, "width": 1, "kv_bytes": setup.chunk_bytes // trace.block_tokens}
    line = {
        "gbps": 8e-9 * setup.chunk_bytes / chunk_s,
        "efficiency": 1.0,
        "latency_s": first_s,
        "per_chunk_s": 0.0,
        "probe_s": PROBE_S,
    }
    begin = float(trace.t[0])
    starts = [max(0.0, one.at - begin) for one in fetches]
    ends = [*starts[1:], float(trace.t[-1]) - begin + 1.0]
    speeds = [
        {"at_s": start, "for_s": end - start, "link_factor": chunk_s / one.chunk_s}
        for one, start, end in zip(fetches, starts, ends, strict=True)
        if end > start
    ]
    return Scenario.model_validate(
        {
            "name": "acceptance",
            "engines": len(HOSTS),
            "nodes": len(HOSTS),
            "model": model,
            "gpu": {"flops": speed, "utilisation": 1.0},
            "tiers": {"dram": half, "remote": half},
            "link": line,
            "period_s": period_s,
            "events": speeds,
        }
    )


def _lines(journal: Path) -> list[tuple[str, str, str]]:
    """Time, round and row of each request."""
    lines = [line.split() for line in journal.read_text().splitlines()]
    return [(at, *request.split("-")) for at, request in lines]  # type: ignore[misc]
