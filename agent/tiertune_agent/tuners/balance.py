"""How busy the GPUs of each stage are, and whether moving one to the other stage would help."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiertune_agent.records import StageWindow, grouped

MIXED = "mixed"
COMPUTES = ("prefill", "decode", MIXED)
"""Phases in which a GPU works; in the others it waits."""
OBSERVED_S = 600.0
"""Fewer seconds of a GPU may be chance: in a few windows one stage is often the busier."""
BUSY = 0.7
"""Below this share, another GPU hardly shortens a queue: waits grow as 1 / (1 - busy)."""


@dataclass(frozen=True)
class Demand:
    """The GPUs of one stage, and the share of time in which they work."""

    gpus: int
    busy: float

    def share(self, gpus: int) -> float:
        """How busy ``gpus`` GPUs would be with the same work."""
        return self.busy * self.gpus / gpus


def demand(windows: Sequence[StageWindow]) -> dict[str, Demand]:
    """Demand by stage, for stages whose GPUs were observed for long enough: the steps' GPU seconds of all that passed.

    Where no steps are known, by the GPUs' own utilisation.
    """
    found = {}
    for stage, mine in sorted(grouped(windows, lambda window: window.stage).items()):
        observed = [window for window in mine if window.gpu]
        gpus, passed_s = len({(window.store, window.gpu) for window in observed}), sum(one.seconds for one in observed)
        phases = {window.phase for window in mine}.intersection(COMPUTES)
        if phases == {MIXED}:  # no engine's steps but a profiled module's, which may be a part of what its GPUs do
            phases = set()
        steps = [window.gpu_seconds for window in mine if window.phase in phases]
        if gpus and passed_s >= OBSERVED_S * gpus:
            work = steps or [(window.utilization or 0.0) * window.seconds for window in observed]
            found[stage] = Demand(gpus, sum(work) / passed_s)
    return found


def evened(prefill: Demand, decode: Demand, least: float) -> dict[str, int] | None:
    """The GPUs of each stage after one was moved; None if that would not help, or no stage needs help."""
    busier, other = (prefill, decode) if prefill.busy > decode.busy else (decode, prefill)
    if busier.busy < BUSY or other.gpus < 2:
        return None
    if max(busier.share(busier.gpus + 1), other.share(other.gpus - 1)) >= busier.busy * (1 - least):
        return None
    more = 1 if busier is prefill else -1
    return {"prefill": prefill.gpus + more, "decode": decode.gpus - more}
