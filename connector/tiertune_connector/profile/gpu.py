"""What the GPUs of this host do, asked of NVML by the store: utilisation, memory, power, energy, by stage.

A host without GPUs, without a driver or without the package ``nvidia-ml-py`` (extra ``gpu``) is a state, not an error.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from tiertune_connector.counters import Counters, Gauge

log = logging.getLogger(__name__)
SAMPLE_EVERY_S = 5.0
STALE_AFTER = 3
"""Periods after which gauges that were not renewed are not reported any more."""


class Nvml:
    """The few questions to NVML. All raise ``error``; what a GPU cannot tell is left out."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 (pynvml, which has no types)
        """``module`` is pynvml."""
        self.error: type[Exception] = module.NVMLError
        self._cannot = (
            module.NVMLError_NotSupported,
            module.NVMLError_FunctionNotFound,
            module.NVMLError_NoPermission,
        )
        self._nvml = module
        self._open = False

    def open(self) -> None:
        if not self._open:
            self._nvml.nvmlInit()
            self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()

    def count(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def sample(self, index: int) -> tuple[str, list[Gauge], float | None]:
        """One GPU's UUID; gauges, each with the labels that are its own; joules since the driver was loaded."""
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        rates = self._told(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._told(nvml.nvmlDeviceGetPowerUsage, handle)
        millijoules = self._told(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        gauges: list[Gauge] = []
        if rates is not None:
            gauges.append(("gpu_utilization_ratio", (), rates.gpu / 100))
        if memory is not None:
            both = (("used", memory.used), ("free", memory.free))
            gauges += [("gpu_memory_bytes", (state,), float(nbytes)) for state, nbytes in both]
        if milliwatts is not None:
            gauges.append(("gpu_power_watts", (), milliwatts / 1e3))
        return str(nvml.nvmlDeviceGetUUID(handle)), gauges, None if millijoules is None else millijoules / 1e3

    def _told(self, ask: Callable[[Any], Any], handle: Any) -> Any:  # noqa: ANN401
        try:
            return ask(handle)
        except self._cannot:
            return None


def find_nvml() -> Nvml | None:
    """None without the package."""
    try:
        return Nvml(import_module("pynvml"))
    except ImportError:
        return None


class GpuSampler:
    """Asks every GPU every few seconds, on a thread of its own; energy is a counter, the rest are gauges."""

    def __init__(
        self,
        stages: Callable[[], Mapping[str, str]],
        counters: Counters,
        *,
        clock: Callable[[], float],
        nvml: Nvml | None = None,
        every_s: float = SAMPLE_EVERY_S,
    ) -> None:
        """``stages`` tells the stage that computes on a GPU, by the GPU's UUID."""
        self.state = "absent: not asked yet"
        """In words, for ``/v1/status``: how many GPUs tell, or why none."""
        self._stages = stages
        self._counters = counters
        self._clock = clock
        self._nvml = nvml
        self._every_s = every_s
        self._energy: dict[str, float] = {}
        self._gauges: list[Gauge] = []
        self._sampled_at = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        counters.gauges_from(self.gauges)

    def start(self) -> None:
        """Sample until ``stop``; without NVML say so once, and do nothing."""
        if self._nvml is None:
            self._tell("absent: the package nvidia-ml-py is not installed (extra gpu)")
            return
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(5)

    def gauges(self) -> Iterator[Gauge]:
        """Gauges of the last sample, while it is fresh."""
        if self._clock() - self._sampled_at < STALE_AFTER * self._every_s:
            yield from self._gauges

    def sample(self) -> None:
        """Ask every GPU once. One that fails is left out, and asked again the next time."""
        nvml = self._nvml
        assert nvml is not None
        gauges: list[Gauge] = []
        failed: list[str] = []
        try:
            nvml.open()
            count = nvml.count()
        except nvml.error as error:
            self._tell(f"absent: {error}")
            self._close()
            return
        stages = self._stages()
        for index in range(count):
            try:
                gpu, told, joules = nvml.sample(index)
            except nvml.error as error:
                failed.append(f"GPU {index}: {error}")
                continue
            labels = (gpu, stages.get(gpu, ""))
            gauges += [(name, (*labels, *own), value) for name, own, value in told]
            if joules is not None:
                self._count_energy(labels, joules)
        if len(failed) == count:
            self._close()
        self._gauges, self._sampled_at = gauges, self._clock()
        self._tell("; ".join([f"ok: {count - len(failed)} of {count} GPUs", *failed]) if count else "absent: no GPU")

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            wait_s = self._every_s
            with self._counters.surviving("gpus", "the GPUs could not be sampled"):
                self.sample()
        self._close()

    def _close(self) -> None:
        """Have the next sample initialise NVML again: the driver may have been loaded anew."""
        nvml = self._nvml
        assert nvml is not None
        try:
            nvml.close()
        except nvml.error as error:
            log.debug("NVML could not be closed: %s", error)

    def _count_energy(self, labels: tuple[str, str], joules: float) -> None:
        """Count joules since the first sample. A reading below the last one began again at 0."""
        gpu, _ = labels
        last = self._energy.get(gpu, joules)
        self._energy[gpu] = joules
        self._counters.add("gpu_energy_joules_total", labels, joules - last if joules >= last else joules)

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
