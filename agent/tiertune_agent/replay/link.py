"""The link to the remote tier in a replay: its true speed over time, and what each node's store estimates."""

from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec
import numpy as np
import numpy.typing as npt

from tiertune_agent.replay.scenario import Event, LinkSpec
from tiertune_connector.cost import FetchCost, FetchEstimate
from tiertune_connector.slower.transit import PIECE_CHUNKS, PIECE_S


class Link:
    """Bandwidth of the link over time."""

    def __init__(self, spec: LinkSpec, events: Sequence[Event], span_s: float, rng: np.random.Generator) -> None:
        """A link for ``span_s`` seconds; ``rng`` gives the fluctuation."""
        self.spec = spec
        self._events = events
        self._factors = _fluctuation(spec, span_s, rng)

    def truth(self, at_s: float) -> FetchEstimate:
        """What a fetch at that time costs, if the link is up."""
        spec = self.spec
        bytes_per_s = spec.bytes_per_s
        if spec.fluctuation is not None:
            step = int(at_s // spec.fluctuation.step_s)
            bytes_per_s *= float(self._factors[min(step, len(self._factors) - 1)])
        for event in self._events:
            if event.link_factor is not None and event.at_s <= at_s < event.at_s + event.for_s:
                bytes_per_s *= event.link_factor
        return FetchEstimate(spec.latency_s, spec.per_chunk_s, bytes_per_s)

    def down(self, at_s: float) -> bool:
        """Whether the link is down at that time."""
        return any(event.link is not None and event.at_s <= at_s < event.at_s + event.for_s for event in self._events)


class Beliefs:
    """Production's cost estimator of one node, which learns from probes and from the node's own loads.

    The scenario tells the latency and the handling, so the bandwidth is learned from the seconds beyond them, however
    few: in production those that hardly exceed the latency are noise.

    All nodes probe the one link at the same times, at the start of every span of ``probe_s``; a probe counts from the
    next span on. A load counts once its first piece has arrived, as in a store. Nothing is learned while the link is
    down: its breaker is open then.
    """

    def __init__(self, link: Link, chunk_bytes: int) -> None:
        self._link, self._chunk_bytes = link, chunk_bytes
        self._cost = FetchCost(t0_s=0.0, bytes_per_s=link.spec.bytes_per_s)
        self._due = [(link.spec.probe_s, 1, 1, 0.0)]
        """A heap of what will count: when, the span that begins then if a probe does (0: a load), chunks, seconds."""

    def estimate(self, at_s: float, queue_s: float = 0.0) -> FetchEstimate:
        """The estimate of the node's store at that time, for a fetch behind ``queue_s`` seconds of other transfers.

        Times must not decrease from call to call.
        """
        self._learn(at_s)
        estimate = self._cost.estimate(at_s, queue_s)
        assert estimate is not None  # it starts at the nominal bandwidth
        spec = self._link.spec
        return msgspec.structs.replace(estimate, t0_s=spec.latency_s, per_chunk_s=spec.per_chunk_s)

    def observed(self, at_s: float, chunks: int, seconds: float) -> None:
        """Note that a load of the node used the link from ``at_s`` on for ``seconds``, its wait before not included."""
        piece_s = max(PIECE_S, seconds * PIECE_CHUNKS / chunks)
        heappush(self._due, (at_s + min(seconds, piece_s), 0, chunks, seconds))

    def _learn(self, at_s: float) -> None:
        """Observe the probes and loads that count by ``at_s``, in order of time."""
        spec = self._link.spec
        while self._due[0][0] <= at_s:
            counts_at, span, chunks, seconds = heappop(self._due)
            if span:
                heappush(self._due, ((span + 1) * spec.probe_s, span + 1, 1, 0.0))
                began_s = (span - 1) * spec.probe_s
                if self._link.down(began_s):
                    continue
                seconds = self._link.truth(began_s).seconds(1, self._chunk_bytes)
            beyond_s = seconds - spec.per_chunk_s * chunks - spec.latency_s
            self._cost.observe(chunks, chunks * self._chunk_bytes, beyond_s, counts_at)


def _fluctuation(spec: LinkSpec, span_s: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Factors on the nominal bandwidth, one per step."""
    if spec.fluctuation is None:
        return np.ones(1)
    noise = spec.fluctuation
    logs = np.zeros(int(span_s // noise.step_s) + 2)
    scale = noise.sigma * np.sqrt(1 - noise.phi * noise.phi)
    for step in range(1, len(logs)):
        logs[step] = noise.phi * logs[step - 1] + scale * rng.standard_normal()
    factors: npt.NDArray[np.float64] = np.exp(logs)
    return factors
