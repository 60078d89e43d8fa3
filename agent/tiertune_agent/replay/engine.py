"""The model of an engine and of its tiers' speeds: an assumption, not a measurement."""

from collections.abc import Mapping
from math import inf

from tiertune_agent.replay.scenario import Scenario, TierSpec
from tiertune_connector.cost import FetchEstimate, ModelShape, PrefillCost

OVERHEAD_S = 0.015
"""Of every prefill, whatever its length."""

Estimates = Mapping[str, FetchEstimate]


def prefill_cost(scenario: Scenario) -> PrefillCost:
    """Prefill seconds from FLOPs at the stated share of the peak."""
    model, gpu = scenario.model, scenario.gpu
    shape = ModelShape(model.params, model.layers, model.width, model.kv_token_bytes)
    return PrefillCost(shape, overhead_s=OVERHEAD_S, seconds_per_flop=1 / (gpu.flops * gpu.utilisation))


def local_costs(scenario: Scenario) -> Estimates:
    """What a fetch from dram and from disk costs, at any time."""
    return {"dram": _local(scenario.tiers.dram), "disk": _local(scenario.tiers.disk)}


def _local(tier: TierSpec) -> FetchEstimate:
    return FetchEstimate(tier.latency_s, 0.0, inf if tier.gbps is None else tier.gbps * 1e9 / 8)
