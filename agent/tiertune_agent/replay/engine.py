"""The model of an engine and of its tiers' speeds: an assumption, not a measurement."""

from collections.abc import Mapping
from math import inf, sqrt

from tiertune_agent.replay.scenario import GpuSpec, ModelSpec, Scenario
from tiertune_connector.cost import FetchEstimate, ModelShape, PrefillCost

OVERHEAD_S = 0.015
"""Fixed part of every prefill, whatever its length."""

Estimates = Mapping[str, FetchEstimate]


def prefill_cost(scenario: Scenario) -> PrefillCost:
    """Prefill seconds from FLOPs at the stated share of the peak."""
    model, gpu = scenario.model, scenario.gpu
    shape = ModelShape(model.params, model.layers, model.width)
    return PrefillCost(shape, overhead_s=OVERHEAD_S, seconds_per_flop=1 / (gpu.flops * gpu.utilisation))


def local_costs(scenario: Scenario) -> Estimates:
    """What a fetch from dram and from disk costs, at any time."""
    specs = {"dram": scenario.tiers.dram, "disk": scenario.tiers.disk}
    return {tier: FetchEstimate(spec.latency_s, 0.0, (spec.gbps or inf) * 1e9 / 8) for tier, spec in specs.items()}


def prefill_s(model: ModelSpec, gpu: GpuSpec, start: float, end: float) -> float:
    """Seconds of computing tokens ``start`` to ``end`` of a prompt."""
    linear, quadratic = token_s(model, gpu)
    return OVERHEAD_S + linear * (end - start) + quadratic * (end * end - start * start)


def token_s(model: ModelSpec, gpu: GpuSpec) -> tuple[float, float]:
    """(a, b): computing tokens h0 to h1 of a prompt takes a + b * (h0 + h1) seconds per token."""
    flops = gpu.flops * gpu.utilisation
    return 2 * model.params / flops, 2 * model.layers * model.width / flops


def break_even_tokens(model: ModelSpec, gpu: GpuSpec, fetch_token_s: float, latency_s: float) -> float:
    """Length from which fetching a whole prefix takes less time than recomputing it, without the time per chunk."""
    linear, quadratic = token_s(model, gpu)
    if fetch_token_s > linear:
        return (fetch_token_s - linear) / quadratic
    return latency_s / (linear - fetch_token_s) if fetch_token_s < linear else sqrt(latency_s / quadratic)


def break_even_bandwidth(model: ModelSpec, gpu: GpuSpec, around: float) -> float:
    """Bytes per second above which fetching a span from h0 to h1 pays, with h0 + h1 = ``around``; without latencies."""
    linear, quadratic = token_s(model, gpu)
    return model.kv_token_bytes / (linear + quadratic * around)
