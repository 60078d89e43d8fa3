"""The model of an engine and of its tiers' speeds: an assumption, not a measurement."""

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from tiertune_agent.replay.scenario import Event, LinkSpec, Scenario, TierSpec
from tiertune_connector.cost import FetchCost, FetchEstimate, ModelShape, PrefillCost

OVERHEAD_S = 0.015
"""Of every prefill, whatever its length."""

Estimates = Mapping[str, FetchEstimate]


def prefill_cost(scenario: Scenario) -> PrefillCost:
    """Prefill seconds from FLOPs at the stated share of the peak."""
    model, gpu = scenario.model, scenario.gpu
    shape = ModelShape(model.params, model.layers, model.width, model.kv_token_bytes)
    return PrefillCost(shape, overhead_s=OVERHEAD_S, seconds_per_flop=1 / (gpu.flops * gpu.utilisation))


class Link:
    """Bandwidth of the link over time, and what a store's probes make of it."""

    def __init__(
        self, spec: LinkSpec, events: Sequence[Event], span_s: float, chunk_bytes: int, rng: np.random.Generator
    ) -> None:
        """A link for ``span_s`` seconds; ``rng`` gives the fluctuation."""
        self._spec, self._events = spec, events
        self._factors = _fluctuation(spec, span_s, rng)
        self._estimates = self._probed(span_s, chunk_bytes)

    def truth(self, at_s: float) -> FetchEstimate:
        """What a fetch at that time costs."""
        spec = self._spec
        bytes_per_s = spec.bytes_per_s
        if spec.fluctuation is not None:
            bytes_per_s *= self._factors[int(at_s // spec.fluctuation.step_s)]
        for event in self._events:
            if event.at_s <= at_s < event.at_s + event.for_s:
                bytes_per_s *= event.link_factor
        return FetchEstimate(spec.latency_s, spec.per_chunk_s, bytes_per_s)

    def estimate(self, at_s: float) -> FetchEstimate:
        """What a store believes at that time."""
        return self._estimates[int(at_s // self._spec.probe_s)]

    def _probed(self, span_s: float, chunk_bytes: int) -> list[FetchEstimate]:
        """The estimate in every span of ``probe_s``: the probe of a span counts from the next one on."""
        spec = self._spec
        cost = FetchCost(
            alpha=0.5,
            slower_alpha=0.5,
            t0_s=spec.latency_s,
            per_chunk_s=spec.per_chunk_s,
            bytes_per_s=spec.bytes_per_s,
            stale_s=spec.probe_s,
        )
        estimates = []
        for probe in range(int(span_s // spec.probe_s) + 1):
            estimate = cost.estimate(probe * spec.probe_s)
            assert estimate is not None  # it starts at the nominal bandwidth
            estimates.append(estimate)
            seconds = self.truth(probe * spec.probe_s).seconds(1, chunk_bytes)
            cost.observe(1, chunk_bytes, seconds, (probe + 1) * spec.probe_s)
        return estimates


class Speeds:
    """Fetch costs of all tiers over time."""

    def __init__(self, scenario: Scenario, link: Link) -> None:
        self._link = link
        self._local = {"dram": _local(scenario.tiers.dram), "disk": _local(scenario.tiers.disk)}

    def truth(self, at_s: float) -> Estimates:
        return {**self._local, "remote": self._link.truth(at_s)}

    def estimate(self, at_s: float) -> Estimates:
        return {**self._local, "remote": self._link.estimate(at_s)}


def _local(tier: TierSpec) -> FetchEstimate:
    return FetchEstimate(tier.latency_s, 0.0, inf if tier.gbps is None else tier.gbps * 1e9 / 8)


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
