"""How busy the GPUs of each stage are, and whether moving one to the other stage would help."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from tiertune_agent.fields import JsonDict
from tiertune_agent.records import StageWindow, grouped
from tiertune_agent.tuners.evidence import ENOUGH_WINDOWS, ERRORS, Ratio, Summand, ratio

COMPUTES = ("prefill", "decode")
"""Phases in which a GPU works; in the others it waits."""
BUSY = 0.7
"""Below this share, another GPU hardly shortens a queue: waits grow as 1 / (1 - busy)."""


@dataclass(frozen=True)
class Demand:
    """The GPUs of one stage and their work."""

    gpus: int
    work: Ratio
    """GPU seconds per second."""

    @property
    def busy(self) -> float:
        return self.share(self.gpus)

    @property
    def error(self) -> float:
        """Standard error of ``busy``."""
        return self.work.error / self.gpus

    def share(self, gpus: int) -> float:
        """How busy ``gpus`` GPUs would be with the same work."""
        return self.work.value / gpus

    def document(self) -> JsonDict:
        return {"gpus": self.gpus, "busy": self.busy, **self.work.document("gpu_seconds_per_second")}


def demand(windows: Sequence[StageWindow]) -> dict[str, Demand]:
    """Demand by stage, for stages with known GPUs and enough windows."""
    found = {}
    for stage, mine in sorted(grouped(windows, lambda window: window.stage).items()):
        gpus = len({(window.store, window.gpu) for window in mine if window.gpu})
        work = ratio(_parts(mine))
        if gpus and work.windows >= ENOUGH_WINDOWS:
            found[stage] = Demand(gpus, work)
    return found


def evened(prefill: Demand, decode: Demand, least: float) -> dict[str, int] | None:
    """The GPUs of each stage after one was moved; None if that would not help, or no stage needs help."""
    busier, other = (prefill, decode) if prefill.busy > decode.busy else (decode, prefill)
    apart = busier.busy - other.busy
    if busier.busy < BUSY or other.gpus < 2 or apart <= ERRORS * (busier.error**2 + other.error**2) ** 0.5:
        return None
    if max(busier.share(busier.gpus + 1), other.share(other.gpus - 1)) >= busier.busy * (1 - least):
        return None
    more = 1 if busier is prefill else -1
    return {"prefill": prefill.gpus + more, "decode": decode.gpus - more}


def _parts(windows: Sequence[StageWindow]) -> list[Summand]:
    """GPU seconds of all stores per second, one part per window; by the GPUs' own utilisation if no steps are known.

    Windows of different stores do not begin together: each counts with the first store's window that it falls into.
    """
    store = min(window.store for window in windows)
    starts = sorted({window.start for window in windows if window.store == store})
    seconds = {window.start: window.seconds for window in windows if window.store == store}
    stepped = any(window.phase in COMPUTES for window in windows)
    work = dict.fromkeys(starts, 0.0)
    for window in windows:
        start = starts[max(0, bisect(starts, window.start) - 1)]
        if not 0 <= (window.start - start).total_seconds() < 2 * seconds[start]:
            continue
        if stepped:
            work[start] += window.gpu_seconds if window.phase in COMPUTES else 0.0
        else:
            work[start] += (window.utilization or 0.0) * window.seconds if window.gpu else 0.0
    return [Summand(work[start], seconds[start]) for start in starts]
