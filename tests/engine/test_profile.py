"""Stages of real PyTorch modules: hooks, compiled modules, CUDA events where there is a device."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from tiertune_connector.profile.gpu import find_nvml  # noqa: E402
from tiertune_connector.profile.stages import Profiler  # noqa: E402
from tiertune_connector.profile.timers import cuda_timer, gpu_uuid  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Talker(torch.nn.Module):
    """Two layers, the second of which may be a stage of its own, or fail."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 64, device=device)
        self.head = torch.nn.Linear(64, 16, device=device)

    def forward(self, input_ids, *, fail=False):
        hidden = self.embed(input_ids)
        if fail:
            raise ValueError("bad input")
        return self.head(hidden)


def count_ids(args, kwargs, output):
    ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    assert output.shape[-1] == 16
    return ids.shape[-1]


def told(profiler):
    profiler.harvest()
    return {report.stage: (report.gpu_seconds, report.tokens) for report in profiler.totals.take()}


@pytest.fixture
def profiler():
    return Profiler()


@pytest.fixture
def one_thread():
    """Of torch's own, which else wait for each other wherever something else computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ids():
    return torch.arange(8)


class TestModules:
    def test_a_forward_is_measured_and_its_output_is_untouched(self, profiler, ids):
        """Wall time on the CPU, tokens from positional or keyword arguments; without the hooks all is as before."""
        talker = Talker()
        expected = talker(ids)
        attached = profiler.stage("talker").attach(talker, tokens=count_ids)
        assert torch.equal(talker(ids), expected)
        assert torch.equal(talker(input_ids=ids), expected)
        seconds, tokens = told(profiler)["talker"]
        assert (0 < seconds < 5, tokens) == (True, 16)
        attached.remove()
        talker(ids)
        assert told(profiler) == {}
        assert not talker._forward_hooks
        assert not talker._forward_pre_hooks

    def test_an_error_in_a_forward_passes_through(self, profiler, ids):
        """Its seconds count, its tokens do not, and the next call is measured as ever."""
        talker = Talker()
        profiler.stage("talker").attach(talker, tokens=count_ids)
        with pytest.raises(ValueError, match="bad input"):
            talker(ids, fail=True)
        seconds, tokens = told(profiler)["talker"]
        assert (seconds > 0, tokens) == (True, 0)
        talker(ids)
        assert told(profiler)["talker"][1] == 8

    def test_a_hook_of_others_that_raises_does_no_harm(self, profiler, ids):
        """torch then runs our second hook without the first, which measures nothing."""

        def raises(*_):
            raise RuntimeError("a hook's own error")

        talker = Talker()
        raising = talker.register_forward_pre_hook(raises)
        profiler.stage("talker").attach(talker)
        with pytest.raises(RuntimeError, match="a hook's own error"):
            talker(ids)
        assert told(profiler) == {}
        raising.remove()
        talker(ids)
        assert list(told(profiler)) == ["talker"]

    def test_threads_share_a_module(self, profiler, ids):
        """Concurrent forwards of one module count all their tokens."""
        talker = Talker()
        profiler.stage("talker").attach(talker, tokens=count_ids)
        threads = [threading.Thread(target=lambda: [talker(ids) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told(profiler)["talker"][1] == 4 * 50 * 8

    def test_a_compiled_module_is_measured_from_outside(self, profiler, ids):
        """Attached to what torch.compile returned; attached to what is inside it nothing breaks, graph included."""
        inside = Talker()
        profiler.stage("inside").attach(inside)
        compiled = torch.compile(inside, backend="eager", fullgraph=True)
        profiler.stage("outside").attach(compiled, tokens=count_ids)
        assert compiled(ids).shape == (8, 16)
        found = told(profiler)
        assert found["outside"][0] > 0
        assert found["outside"][1] == 8

    def test_a_module_that_gets_its_parameters_later_is_measured_where_they_are(self, profiler, ids):
        """Attached while it is on the meta device, as engines build models."""
        with torch.device("meta"):
            talker = Talker()
        profiler.stage("talker").attach(talker)
        talker.to_empty(device="cpu")
        talker(ids)
        assert told(profiler)["talker"][0] > 0

    @pytest.mark.usefixtures("one_thread")
    def test_a_forward_costs_little_more(self, profiler, ids):
        """Both hooks together take less than 100 microseconds, in the best of some batches in turns."""
        plain, hooked = Talker(), Talker()
        profiler.stage("talker").attach(hooked)
        without_s, with_s = [], []
        for _ in range(40):
            without_s.append(_timed(lambda: [plain(ids) for _ in range(100)]))
            with_s.append(_timed(lambda: [hooked(ids) for _ in range(100)]))
        assert (min(with_s) - min(without_s)) / 100 < 100e-6


@pytest.mark.gpu
@needs_gpu
class TestCuda:
    def test_a_step_is_measured_without_waiting_for_it(self):
        """The mark is set while the device still works; its seconds are those of the work."""
        work = torch.rand(4096, 4096, device="cuda")
        _spin(work, 3)
        torch.cuda.synchronize()
        timer = cuda_timer()
        began = time.perf_counter()
        mark = timer.start(7)
        _spin(work, 50)
        timer.stop(mark)
        launched = time.perf_counter() - began
        assert timer.poll() == []
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
        ((step, seconds),) = timer.poll()
        assert step == 7
        assert launched < seconds <= whole

    def test_a_module_takes_its_devices_time(self, profiler):
        """As much as a pair of events around it measures, of which a part of it takes less."""
        talker = Talker("cuda")
        profiler.stage("talker").attach(talker)
        profiler.stage("head").attach(talker.head, tokens=lambda args, kwargs, output: len(output))
        ids = torch.arange(16, device="cuda").repeat(4096)
        talker(ids)
        torch.cuda.synchronize()
        told(profiler)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(20):
            talker(ids)
        ended.record()
        torch.cuda.synchronize()
        found = told(profiler)
        whole = began.elapsed_time(ended) / 1e3
        assert found["head"][1] == 20 * len(ids)
        assert 0.5 * whole < found["talker"][0] <= 1.01 * whole
        assert 0 < found["head"][0] < found["talker"][0]

    def test_a_graph_is_captured_and_replayed_with_hooks_in_place(self, profiler):
        """Nothing of ours gets into the graph, and measuring goes on after it."""
        talker = Talker("cuda")
        profiler.stage("talker").attach(talker, tokens=count_ids)
        ids = torch.arange(16, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            talker(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = talker(ids)
        told(profiler)
        graph.replay()
        talker(ids)
        torch.cuda.synchronize()
        assert torch.isfinite(output).all()
        seconds, tokens = told(profiler)["talker"]
        assert (seconds > 0, tokens) == (True, 16)

    def test_a_device_is_named_as_nvml_names_it(self):
        """So that what NVML tells can be joined to the stage that computes there."""
        nvml = find_nvml()
        if nvml is None:
            pytest.skip("nvidia-ml-py is not installed (extra gpu)")
        nvml.nvmlInit()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        assert gpu_uuid() in set(map(nvml.nvmlDeviceGetUUID, handles))
        nvml.nvmlShutdown()

    def test_the_hot_path_never_synchronises(self, profiler):
        """torch itself would raise if a hook waited for the device."""
        talker = Talker("cuda")
        profiler.stage("talker").attach(talker)
        ids = torch.arange(16, device="cuda")
        talker(ids)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(100):
                talker(ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _spin(matrix, times):
    for _ in range(times):
        matrix @ matrix


def _timed(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
