"""The fleets, links and traces that the parts measure on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiertune_agent.policy.document import Policy
from tiertune_agent.replay.scenario import Scenario

FLEETS = {
    "70b": ("llama-3-70b", "h100x8"),
    "8b": ("llama-3-8b", "h100"),
    "a10": ("llama-3-8b", "a10"),
    "deepseek": ("deepseek-v3", "h200x8"),
}
"""Model, and GPUs of one engine."""
ROUTINGS = ("random", "sticky")
TOTALS = (0.01, 0.03, 0.1, 0.3)
"""Totals of DRAM and remote, as shares of the trace's unique bytes."""
LINKS = (10.0, 25.0, 100.0)
"""Gigabits per second."""
UNEVEN = (0.02, 0.3)
"""DRAM and remote where the split is not measured: most hits are in remote."""
FLUCTUATION = {"kind": "ar1", "sigma": 0.9, "phi": 0.9, "step_s": 30}
"""Fluctuation of the link, as in reference runs."""


@dataclass(frozen=True)
class Grid:
    """What was asked for; parts take from it what they depend on."""

    traces: Sequence[str]
    """Files, or names of shipped traces."""
    fleets: Sequence[str] = ("70b", "8b")
    routings: Sequence[str] = ROUTINGS
    totals: Sequence[float] = TOTALS
    links: Sequence[float] = LINKS
    seeds: int = 1
    policy: Policy | None = None
    """Policy that the agent follows; None: the replay's own."""
    policy_name: str = ""

    @property
    def under(self) -> str:
        """Ending of the name of a row that depends on the policy."""
        return f" under {self.policy_name}" if self.policy_name else ""


def short(trace: str) -> str:
    """A trace's name, as rows tell it."""
    return Path(trace).stem


def scenario(
    fleet: str,
    *,
    dram: float,
    remote: float,
    gbps: float = 25.0,
    routing: str = "sticky",
    seed: int = 0,
    engines: int = 4,
    **more: Any,  # noqa: ANN401 (fields of a scenario)
) -> Scenario:
    """One engine per node, ``dram`` and ``remote`` as shares of the unique bytes, a link that fluctuates."""
    model, gpu = FLEETS[fleet]
    return Scenario.model_validate(
        {
            "name": f"{fleet}-{gbps:g}g-{routing}",
            "engines": engines,
            "nodes": engines,
            "routing": routing,
            "model": model,
            "gpu": gpu,
            "tiers": {"dram": {"share": dram}, "remote": {"share": remote}},
            "link": {"gbps": gbps, "fluctuation": FLUCTUATION},
            "seed": seed,
            **more,
        }
    )
