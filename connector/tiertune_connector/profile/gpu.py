"""What the GPUs of this host do, asked of NVML by the store: utilisation, memory, power, energy, by stage.

A host without GPUs, without a driver or without the package ``nvidia-ml-py`` (extra ``gpu``) is a state, not an error.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tiertune_connector.counters import Counters, Gauge
from tiertune_connector.units import Clock

log = logging.getLogger(f"vllm.{__name__}")
SAMPLE_EVERY_S = 5.0
_STATES = ("used", "free")
STALE_AFTER = 3
"""Periods after which gauges that were not renewed are not reported any more."""


def find_nvml() -> Any:  # noqa: ANN401 (pynvml, which has no types)
    """The module ``pynvml``; None without the package."""
    try:
        return import_module("pynvml")
    except ImportError:
        return None


@dataclass(eq=False)
class GpuSampler:
    """Asks every GPU every few seconds; energy is a counter, the rest are gauges.

    ``stages`` tells the stage that computes on a GPU, by the GPU's UUID; ``nvml`` is `find_nvml`'s.
    """

    stages: Callable[[], Mapping[str, str]]
    counters: Counters
    clock: Clock
    nvml: Any = None

    def __post_init__(self) -> None:
        self.state = "absent: not asked yet"
        """In words, for ``/v1/status``: how many GPUs tell, or why none."""
        self._energy: dict[str, float] = {}
        self._gauges: list[Gauge] = []
        self._sampled_at = 0.0
        self.counters.gauges_from(self.gauges)

    def run(self, stopping: threading.Event) -> None:
        """Sample until told to stop; without NVML say so, and end. For a thread of its own."""
        if self.nvml is None:
            self._tell("absent: the package nvidia-ml-py is not installed (extra gpu)")
            return
        wait_s = 0.0
        while not stopping.wait(wait_s):
            wait_s = SAMPLE_EVERY_S
            with self.counters.surviving("gpus", "the GPUs could not be sampled"):
                self.sample()

    def gauges(self) -> Iterator[Gauge]:
        """Gauges of the last sample, while it is fresh."""
        if self.clock() - self._sampled_at < STALE_AFTER * SAMPLE_EVERY_S:
            yield from self._gauges

    def sample(self) -> None:
        """Ask every GPU once. One that fails is left out, and asked again the next time."""
        nvml, stages, gauges, failed = self.nvml, self.stages(), list[Gauge](), list[str]()
        try:
            nvml.nvmlInit()  # changes nothing where it was done before
            count = nvml.nvmlDeviceGetCount()
            for index in range(count):
                try:
                    gauges += self._ask(nvml.nvmlDeviceGetHandleByIndex(index), stages)
                except nvml.NVMLError as error:
                    failed.append(f"GPU {index}: {error}")
            well = count - len(failed)
            told = "; ".join([f"{'ok' if well else 'absent'}: {well} of {count} GPUs", *failed])
            state = told if count else "absent: no GPU"
        except nvml.NVMLError as error:
            state = f"absent: {error}"
        self._gauges, self._sampled_at = gauges, self.clock()
        self._tell(state)

    def _ask(self, handle: Any, stages: Mapping[str, str]) -> list[Gauge]:  # noqa: ANN401 (pynvml's)
        """One GPU's gauges; what it cannot tell is left out. Its joules since the first sample are counted."""
        nvml = self.nvml
        untold = suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission)
        gpu = str(nvml.nvmlDeviceGetUUID(handle))
        labels, gauges = (gpu, stages.get(gpu, "")), list[Gauge]()
        with untold:
            gauges.append(("gpu_utilization_ratio", labels, nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100))
        with untold:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gauges += [("gpu_memory_bytes", (*labels, state), float(getattr(memory, state))) for state in _STATES]
        with untold:
            gauges.append(("gpu_power_watts", labels, nvml.nvmlDeviceGetPowerUsage(handle) / 1e3))
        with untold:
            joules = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            grown = joules - self._energy.get(gpu, joules)
            self._energy[gpu] = joules
            self.counters.add("gpu_energy_joules_total", labels, max(0.0, grown))
        return gauges

    def _tell(self, state: str) -> None:
        if state != self.state:
            self.state = state
            log.info("GPUs: %s", state)


def stages_of(sessions: Iterable[tuple[Iterable[str], str]]) -> dict[str, str]:
    """The stage of each GPU, from ``(UUIDs, stage)`` of engines; for a GPU that stages share, all their names."""
    found: dict[str, set[str]] = {}
    for gpus, stage in sessions:
        for gpu in gpus:
            found.setdefault(gpu, set()).add(stage)
    return {gpu: "+".join(sorted(stages)) for gpu, stages in found.items()}
