"""NVML in the store: figures by GPU and stage, whatever a driver does meanwhile; absence is a state."""

# ruff: noqa: N801, N802, N818 (the names of pynvml)

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import Clock, amid, counted, eventually
from tiertune_connector.counters import Counters
from tiertune_connector.profile import gpu
from tiertune_connector.profile.gpu import SAMPLE_EVERY_S, STALE_AFTER, GpuSampler, find_nvml, stages_of


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class FakeNvml:
    """The names of pynvml, over GPUs that a test sets; ``fails`` maps a function to what it raises."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_NoPermission = NVMLError_NoPermission

    def __init__(self, *uuids):
        self.uuids = list(uuids)
        self.energy_mj = dict.fromkeys(uuids, 5_000_000)
        self.fails, self.initialised = {}, False

    def _do(self, function, index=None):
        error = self.fails.get(function) or self.fails.get((function, index))
        if error is not None:
            raise error
        assert function == "nvmlInit" or self.initialised, f"{function} without nvmlInit"

    def nvmlInit(self):
        self._do("nvmlInit")
        self.initialised = True

    def nvmlDeviceGetCount(self):
        self._do("nvmlDeviceGetCount")
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._do("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._do("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=75, memory=30)

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._do("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(used=30 << 30, free=50 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, handle):
        self._do("nvmlDeviceGetPowerUsage", handle)
        return 350_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._do("nvmlDeviceGetTotalEnergyConsumption", handle)
        return self.energy_mj[self.uuids[handle]]


@pytest.fixture
def fake():
    return FakeNvml("GPU-1", "GPU-2")


@pytest.fixture
def stages():
    return {"GPU-1": "prefill"}


@pytest.fixture
def sampler(counters, stages, fake, clock):
    return GpuSampler(lambda: stages, counters, clock=clock, nvml=fake)


class TestSampling:
    def test_every_gpu_is_told_with_its_stage(self, sampler, counters):
        """Utilisation as a share, bytes by state, watts; a GPU that no engine registered has no stage."""
        sampler.sample()
        assert counted(counters, "gpu_utilization_ratio") == {("GPU-1", "prefill"): 0.75, ("GPU-2", ""): 0.75}
        assert counted(counters, "gpu_memory_bytes")["GPU-1", "prefill", "used"] == 30 << 30
        assert counted(counters, "gpu_memory_bytes")["GPU-1", "prefill", "free"] == 50 << 30
        assert counted(counters, "gpu_power_watts")["GPU-2", ""] == 350.5
        assert sampler.state == "ok: 2 of 2 GPUs"

    def test_a_gpu_that_changes_hands_counts_for_both(self, sampler, fake, counters, stages):
        """Energy goes to the stage that has the GPU when it is read, from the first sample on."""
        for stage in ("prefill", "prefill", "decode"):
            stages["GPU-1"] = stage
            sampler.sample()
            fake.energy_mj["GPU-1"] += 2_500
        counts = counted(counters, "gpu_energy_joules_total")
        assert (counts["GPU-1", "prefill"], counts["GPU-1", "decode"]) == (2.5, 2.5)
        assert set(counted(counters, "gpu_power_watts")) == {("GPU-1", "decode"), ("GPU-2", "")}

    @given(readings=st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
    def test_the_counter_never_falls(self, readings):
        """Whatever a driver reports; while its readings grow it is exact."""
        fake, counters = FakeNvml("GPU-1"), Counters()
        sampler = GpuSampler(dict, counters, clock=Clock(), nvml=fake)
        expected = last = 0.0
        for index, reading in enumerate(readings):
            fake.energy_mj["GPU-1"] = reading
            sampler.sample()
            if index:
                grown = reading - readings[index - 1]
                expected += max(0, grown) / 1e3
            now = counted(counters, "gpu_energy_joules_total")["GPU-1", ""]
            assert now >= last
            last = now
        assert last == pytest.approx(expected)

    def test_a_sampler_that_stopped_tells_nothing_old(self, sampler, counters, clock):
        """Gauges that nobody renewed go; the counter stays."""
        sampler.sample()
        clock.now += STALE_AFTER * SAMPLE_EVERY_S
        assert counted(counters, "gpu_power_watts") == {}
        assert counted(counters, "gpu_energy_joules_total")


class TestTrouble:
    @pytest.mark.parametrize(
        ("function", "metric"),
        [
            ("nvmlDeviceGetUtilizationRates", "gpu_utilization_ratio"),
            ("nvmlDeviceGetMemoryInfo", "gpu_memory_bytes"),
            ("nvmlDeviceGetPowerUsage", "gpu_power_watts"),
            ("nvmlDeviceGetTotalEnergyConsumption", "gpu_energy_joules_total"),
        ],
    )
    def test_what_a_gpu_cannot_tell_is_left_out(self, sampler, fake, counters, function, metric):
        """The other figures are told, and the GPU is well."""
        for error in (NVMLError_NotSupported, NVMLError_FunctionNotFound, NVMLError_NoPermission):
            fake.fails[function] = error("no")
            sampler.sample()
            told = [name for name in counters.snapshot()[1] if name.startswith("gpu_")]
            assert (metric in told, len(told)) == (False, 3)
        assert sampler.state == "ok: 2 of 2 GPUs"

    def test_one_lost_gpu_does_not_hide_the_others(self, sampler, fake, counters):
        """It is named in the state, and asked again; its energy goes on from where it was."""
        sampler.sample()
        fake.fails["nvmlDeviceGetHandleByIndex", 0] = NVMLError("GPU is lost")
        fake.energy_mj["GPU-1"] += 1_000
        sampler.sample()
        assert set(counted(counters, "gpu_power_watts")) == {("GPU-2", "")}
        assert sampler.state == "ok: 1 of 2 GPUs; GPU 0: GPU is lost"
        fake.fails.clear()
        fake.energy_mj["GPU-2"] += 2_000
        sampler.sample()
        assert sampler.state == "ok: 2 of 2 GPUs"
        assert counted(counters, "gpu_energy_joules_total") == {("GPU-1", "prefill"): 1.0, ("GPU-2", ""): 2.0}

    def test_where_every_gpu_is_lost_none_is_there(self, sampler, fake, counters):
        """The state says so first, and why."""
        fake.fails["nvmlDeviceGetHandleByIndex"] = NVMLError("GPU is lost")
        sampler.sample()
        assert sampler.state == "absent: 0 of 2 GPUs; GPU 0: GPU is lost; GPU 1: GPU is lost"

    @pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
    def test_without_a_driver_it_says_so_once_and_looks_again(self, sampler, fake, caplog, function):
        """A driver that is loaded later is found."""
        fake.fails[function] = NVMLError("Driver Not Loaded")
        with caplog.at_level("INFO"):
            for _ in range(3):
                sampler.sample()
        assert sampler.state == "absent: Driver Not Loaded"
        assert len(caplog.records) == 1
        fake.fails.clear()
        sampler.sample()
        assert sampler.state == "ok: 2 of 2 GPUs"

    def test_a_host_without_gpus_is_no_error(self, counters, clock):
        """NVML is there, GPUs are not."""
        sampler = GpuSampler(dict, counters, clock=clock, nvml=FakeNvml())
        sampler.sample()
        assert sampler.state == "absent: no GPU"


class TestThread:
    @pytest.fixture(autouse=True)
    def _often(self, monkeypatch):
        monkeypatch.setattr(gpu, "SAMPLE_EVERY_S", 0.01)

    def test_it_samples_until_it_is_stopped(self, counters, fake):
        """And nothing is left behind."""
        sampler = GpuSampler(dict, counters, clock=Clock(), nvml=fake)
        with amid(lambda _, stop: sampler.run(stop), 1):
            eventually(lambda: sampler.state.startswith("ok"))

    def test_what_nobody_foresaw_is_counted_and_it_goes_on(self, counters, fake):
        """A failure of one round costs one sample."""
        fake.fails["nvmlDeviceGetCount"] = ZeroDivisionError("a library's own")
        sampler = GpuSampler(dict, counters, clock=Clock(), nvml=fake)
        with amid(lambda _, stop: sampler.run(stop), 1):
            eventually(lambda: counted(counters, "internal_errors_total").get(("gpus",), 0) >= 2)
            fake.fails.clear()
            eventually(lambda: sampler.state.startswith("ok"))

    def test_without_the_package_it_ends_at_once(self, counters, clock, caplog):
        """The log and the status say why there is nothing; the store is well."""
        sampler = GpuSampler(dict, counters, clock=clock, nvml=None)
        with caplog.at_level("INFO"):
            sampler.run(threading.Event())
        assert sampler.state == "absent: the package nvidia-ml-py is not installed (extra gpu)"
        assert [record.message for record in caplog.records] == [f"GPUs: {sampler.state}"]


def test_engines_say_which_gpus_they_use():
    """The stage of a GPU is its engines'; one that stages share carries all their names."""
    sessions = [(["GPU-1", "GPU-2"], "prefill"), (["GPU-2"], "decode"), ([], "talker"), (["GPU-1"], "prefill")]
    assert stages_of(sessions) == {"GPU-1": "prefill", "GPU-2": "decode+prefill"}


def test_the_real_library_is_asked_by_the_names_it_has():
    """Every function and error that is used is in nvidia-ml-py, where it is installed."""
    nvml = find_nvml()
    if nvml is None:
        pytest.skip("nvidia-ml-py is not installed (extra gpu)")
    for name in vars(FakeNvml):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(nvml, name)


@pytest.mark.gpu
def test_a_real_gpu_tells_its_figures(counters, clock):
    """Utilisation, memory and power of every GPU of this machine are plausible."""
    nvml = find_nvml()
    if nvml is None:
        pytest.skip("nvidia-ml-py is not installed (extra gpu)")
    sampler = GpuSampler(dict, counters, clock=clock, nvml=nvml)
    sampler.sample()
    if sampler.state.startswith("absent"):
        pytest.skip(f"no GPU: {sampler.state}")
    assert all(0 <= ratio <= 1 for ratio in counted(counters, "gpu_utilization_ratio").values())
    assert all(watts > 0 for watts in counted(counters, "gpu_power_watts").values())
    memory = counted(counters, "gpu_memory_bytes").values()
    assert memory
    assert min(memory) >= 0
